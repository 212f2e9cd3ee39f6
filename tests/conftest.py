"""What the tests of the optimizers share: a tiny classifier, its gradients in numpy, and ways to take one step."""

import ctypes
import gc
import logging
import os
import resource
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tfdpfl import native

# The same examples each time; `pytest --hypothesis-profile explore` looks for new ones.
# Neither depends on how fast the machine is.
ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **ANY_SPEED)
settings.register_profile("explore", derandomize=False, **ANY_SPEED)
settings.load_profile("same")

CLASSES, WIDTH, HIDDEN = 3, 6, 5

# All tests run with the kernels on one stack, and without them on the other.
if metadata.version("keras") < "3":
    os.environ.setdefault(native.SWITCH, "0")
# Where there was no C compiler at installation, there are no kernels to test.
OF_KERNELS = ["native/test_kernels.py", "clipping/test_native.py", "clipping/test_kernel_ops.py"]
collect_ignore = [] if native.LIBRARY.exists() else OF_KERNELS


# Slow tests run on the newer stack alone, but for those in files whose subject the version of Keras changes: layers,
# the optimizers' base class, `fit`, saved files, workers and TFF. Quick tests run on both, because the versions of
# NumPy, scikit-learn and dp-accounting differ, too. A slow test elsewhere that must run on both has the mark
# `both_stacks`; a test with the mark `one_stack` stands beside one of the same line that runs on both.
BOTH_STACKS = (
    *(f"clipping/ops/test_{ops}.py" for ops in "control_flow convolutions elementwise lookups products".split()),
    *(f"clipping/ops/test_{ops}.py" for ops in "reductions shapes windows".split()),
    "clipping/test_gradients.py",
    "clipping/test_reparametrized.py",
    "clipping/test_weight_uses.py",
    *(f"federated/test_{part}.py" for part in "aggregators example_level examples models".split()),
    *(f"federated/test_{part}.py" for part in "personalization processes runtime training".split()),
    "optimizers/test_keras2.py",
    "optimizers/test_optimizers.py",
    "optimizers/test_replicas.py",
    "optimizers/test_saving.py",
    "optimizers/test_variants.py",
    "optimizers/test_workers.py",
    "callbacks/test_averaged.py",
)
# These read sources and pages as text, and no version changes those (tests/test_house.py).
OF_TEXT = ("test_docstrings.py", "test_errors.py", "test_house.py")


def pytest_collection_modifyitems(items):
    if metadata.version("keras") >= "3":
        return
    here = Path(__file__).parent
    for item in items:
        file = item.path.relative_to(here).as_posix()
        both = file.startswith(BOTH_STACKS) or item.get_closest_marker("both_stacks")
        one = item.get_closest_marker("one_stack") or file in OF_TEXT
        if one or (item.get_closest_marker("slow") and not both):
            item.add_marker(pytest.mark.skip(reason="hangs on no version of Keras: runs on the keras3 stack"))


def pytest_collection_finish():
    """Tracing makes so many objects that the collector, as it comes set, takes a tenth of the time."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def peak_mib() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


collected_at = [0.0]  # MiB


def pytest_runtest_logfinish():
    """Collects where a test took the process's memory 100 MiB further: graphs are cycles, which the thresholds above
    leave for long, and what the C library then has free goes back to the system only when it is told. TensorFlow keeps
    the functions of each tf.custom_gradient that it ever traced, and their graphs with them.
    """
    if peak_mib() > collected_at[0] + 100:
        if "tensorflow" in sys.modules:
            from tensorflow.python.framework import ops

            gradients = ops.gradient_registry._registry
            for name in [name for name in gradients if name.startswith("CustomGradient-")]:
                del gradients[name]
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        collected_at[0] = peak_mib()


@pytest.fixture(autouse=True, scope="session")
def quick_ends_of_data():
    """Iterators without TensorFlow's autotuning, whose thread takes 50 ms to end, for each of some thousands of data
    sets: a fifth of the time of all tests."""
    from tensorflow.python.data.ops.dataset_ops import DatasetV2

    def untuned(dataset):
        import tensorflow as tf

        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.with_options(options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatasetV2, "_apply_debug_options", untuned)
        yield


@pytest.fixture(autouse=True)
def same_weights():
    """Keras's weights, shuffles and dropout are the same in each run; the package's own noise never is."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    # An error that passes through tf.map_fn leaves this set, and then TensorFlow enters no MirroredStrategy any more.
    tf.compat.v1.get_variable_scope()._caching_device = None


@pytest.fixture(autouse=True)
def flower_log():
    """Flower's log is after each test as it was: tests that silence it hid what the next was to read."""
    log = logging.getLogger("flwr")
    before = log.level, log.propagate
    yield
    log.setLevel(before[0])
    log.propagate = before[1]


@pytest.fixture
def synced(monkeypatch):
    """The paths of the files and folders that were synced to the disk, in their order."""
    paths, real = [], os.fsync

    def fsync(descriptor):
        paths.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def keras3() -> bool:
    import tensorflow as tf

    return hasattr(tf.keras.optimizers.Optimizer, "scale_loss")


def classifier(seed=0, dtype=None):
    """Dense(5, tanh), Dense(3): logits, with weights that depend on nothing but the seed."""
    import tensorflow as tf

    keras = tf.keras
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(HIDDEN, activation="tanh", dtype=dtype),
            keras.layers.Dense(CLASSES, dtype=dtype),
        ]
    )
    model.set_weights(weights(seed))
    return model


def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


def examples(n=12, seed=0):
    rng = np.random.default_rng(seed + 1000)
    return rng.normal(size=(n, WIDTH)).astype(np.float32), rng.integers(0, CLASSES, n).astype(np.int32)


def cross_entropy():
    import tensorflow as tf

    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def per_example_gradients(values, x, y, sample_weight=None):
    """The classifier's gradients, [examples, ...] for each weight, by the chain rule in float64."""
    w1, b1, w2, b2 = [np.asarray(v, np.float64) for v in values]
    h = np.tanh(x.astype(np.float64) @ w1 + b1)
    logits = h @ w2 + b2
    p = np.exp(logits - logits.max(1, keepdims=True))
    d2 = p / p.sum(1, keepdims=True) - np.eye(CLASSES)[y]
    if sample_weight is not None:
        d2 *= np.asarray(sample_weight)[:, None]
    d1 = d2 @ w2.T * (1 - h**2)
    return [np.einsum("bi,bj->bij", x, d1), d1, np.einsum("bi,bj->bij", h, d2), d2]


def norms_of(gradients):
    return np.sqrt(sum((g**2).sum(tuple(range(1, g.ndim))) for g in gradients))


def clipped_sum(values, x, y, clip, num_microbatches=None, sample_weight=None):
    """What an optimizer without noise must sum."""
    gradients = per_example_gradients(values, x, y, sample_weight)
    if num_microbatches is not None:
        gradients = [g.reshape(num_microbatches, -1, *g.shape[1:]).mean(1) for g in gradients]
    factors = np.minimum(1, clip / np.maximum(norms_of(gradients), 1e-30))
    return [np.tensordot(factors, g, 1) for g in gradients]


def compiled(optimizer, seed=0, **kwargs):
    model = classifier(seed)
    model.compile(optimizer=optimizer, loss=kwargs.pop("loss", None) or cross_entropy(), **kwargs)
    return model


def looking_up(optimizer, rows, **kwargs):
    """A compiled model that looks up rows of a table, of which there are so many: at the data's first two columns, 30
    at most."""
    import tensorflow as tf

    inputs, draw = tf.keras.Input((WIDTH,)), np.random.default_rng(0).normal
    words = tf.keras.layers.Lambda(lambda x: tf.minimum(tf.cast(tf.abs(x[:, :2]) * 8, tf.int32), 29))(inputs)
    flat = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(rows, 4, name="table")(words))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(CLASSES, use_bias=False)(flat))
    model.set_weights([draw(size=(rows, 4)), draw(size=(8, CLASSES))])
    model.compile(optimizer, cross_entropy(), **kwargs)
    return model


def update_of(model, step):
    """How far each weight moved in ``step()``."""
    before = model.get_weights()
    step()
    return [a - b for a, b in zip(model.get_weights(), before, strict=True)]


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])
