"""One competitor in a process of its own, for step.py: python _worker.py FRAMEWORK MODE MODEL BATCH

Builds the model and steps twice; then answers each line of its input by a line of JSON: a number of steps with the CPU
seconds that a step took and the least wall seconds of one, "peak" with its memory in MB.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CLIP, NOISE_MULTIPLIER = 1.0, 1.1
Step = Callable[[], Any]


class NotSupported(Exception):
    """The competitor does not do this model."""


# Keras on TensorFlow: plain, ours, TF Privacy's.


def keras_step(mode: str, model: str, x: np.ndarray, y: np.ndarray) -> Step | None:
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    batches = iter(data)
    if mode == "import":
        next(batches)
        return None
    from _models import MODELS

    built = MODELS[model].build(tf.keras)
    reduction, optimizer = "sum_over_batch_size", "adam"
    if mode in ("tfdpfl", "noiseless"):
        import tfdpfl

        # Without noise every other part of the step is there: the difference is the noise's share.
        noise_multiplier = NOISE_MULTIPLIER if mode == "tfdpfl" else 0.0
        optimizer = tfdpfl.DPAdam(l2_norm_clip=CLIP, noise_multiplier=noise_multiplier)
    elif mode in ("DPKerasAdamOptimizer", "VectorizedDPKerasAdamOptimizer"):
        import tensorflow_privacy

        optimizer = getattr(tensorflow_privacy, mode)(CLIP, NOISE_MULTIPLIER, num_microbatches=len(x))
        reduction = "none"
    elif mode.startswith("DPModel"):
        built = _tfp_model(tf, built, fast=mode.endswith("fast"))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    if y.ndim > 1 and reduction == "none":
        whole = loss
        loss = lambda labels, logits: tf.reduce_mean(whole(labels, logits), 1)  # noqa: E731
    built.compile(optimizer=optimizer, loss=loss)
    first = iter([lambda: built.fit(data.take(1), verbose=0)])  # as a user sees it: with the optimizer's variables
    step = lambda: next(first, lambda: built.train_function(batches))()  # noqa: E731
    if mode != "floor":
        return step
    more = _floor(tf, x, built.count_params(), model)
    return lambda: (step(), more())


def _floor(tf: Any, x: np.ndarray, weights: int, model: str) -> Step:
    """What a private step does beside a plain one at the least, with TensorFlow's ops: the noise, and what squared
    norms are made of: sums of squares of single rows, Gram matrices of several, sums of a table's rows by id, products
    of a convolution's patches."""
    from _models import CONVOLUTIONS, LOOKUPS, NORMS

    import tfdpfl

    if model not in NORMS:
        raise NotSupported("no floor is written for it")
    source = tfdpfl.noise.Source()
    rows = [tf.random.normal([len(x), *((t, d) if t > 1 else (d,))]) for t, d in NORMS[model]]
    images, lookup = [], LOOKUPS.get(model)
    for side, channels, window, stride, out, filters in CONVOLUTIONS.get(model, []):
        at = stride * np.arange(out)[:, None] + np.arange(window)
        met = (at[:, None, :, None] * side + at[None, :, None, :]).ravel()
        random = [tf.random.normal([len(x), *shape]) for shape in ((side**2, channels), (out**2, filters))]
        images.append((*random, met.astype(np.int32), [len(x), out**2, window**2 * channels]))
    if lookup is not None:
        of_words = tf.random.normal([x.size, lookup[2]])
        keys = tf.constant((np.arange(len(x))[:, None] * lookup[1] + x).ravel())

    @tf.function
    def more() -> Any:
        found = source.gaussian([[weights]], 1.0)
        found += [tf.raw_ops.EuclideanNorm(input=r, axis=[1]) for r in rows if r.shape.rank == 2]
        found += [tf.matmul(r, r, transpose_b=True) for r in rows if r.shape.rank == 3]
        for image, gradient, met, shape in images:  # (tf.image.extract_patches is slower)
            patches = tf.reshape(tf.gather(image, met, axis=1), shape)
            formed = tf.matmul(gradient, patches, transpose_a=True)
            found.append(tf.raw_ops.EuclideanNorm(input=formed, axis=[1, 2]))
        if lookup is not None:
            distinct, where = tf.unique(keys)
            summed = tf.math.unsorted_segment_sum(of_words, where, tf.size(distinct))
            found.append(tf.raw_ops.EuclideanNorm(input=summed, axis=[1]))
        return found  # else TensorFlow leaves out what nobody asks for

    return more


def _tfp_model(tf: Any, plain: Any, fast: bool) -> Any:
    from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
    from tensorflow_privacy.privacy.keras_models import dp_keras_model

    registry = layer_registry.make_default_layer_registry() if fast else None
    if isinstance(plain, tf.keras.Sequential):
        # Without its input layer a Sequential has no graph, and the fast way is off.
        first = tf.keras.layers.InputLayer(plain.input_shape[1:], dtype=plain.inputs[0].dtype)
        make, structure = dp_keras_model.DPSequential, {"layers": [first, *plain.layers]}
    else:
        make, structure = dp_keras_model.DPModel, {"inputs": plain.inputs, "outputs": plain.outputs}
    model = make(CLIP, NOISE_MULTIPLIER, layer_registry=registry, **structure)
    if fast and not model._enable_fast_peg_computation:
        raise NotSupported("a layer is not in TF Privacy's registry")
    return model


# PyTorch: plain, Opacus's.


def torch_step(mode: str, model: str, x: np.ndarray, y: np.ndarray) -> Step | None:
    import torch

    inputs, labels = torch.from_numpy(x), torch.from_numpy(y).long()
    if mode == "import":
        return None
    from _torch_models import MODELS

    if model == "mnist_cnn" or model == "resnet":
        inputs = inputs.permute(0, 3, 1, 2).contiguous()
    module = MODELS[model](private=mode != "plain")
    optimizer = torch.optim.Adam(module.parameters())
    criterion: Any = torch.nn.CrossEntropyLoss()
    if mode != "plain":
        from opacus import PrivacyEngine

        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=len(x))
        more = {"criterion": criterion, "grad_sample_mode": "ghost"} if mode == "ghost" else {}
        made = PrivacyEngine().make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data,
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=CLIP,
            poisson_sampling=False,
            **more,
        )
        module, optimizer, criterion = (made[0], made[1], made[2] if mode == "ghost" else criterion)

    def step() -> None:
        optimizer.zero_grad()
        criterion(module(inputs), labels).backward()
        optimizer.step()

    return step


# Keras on JAX: plain, jax-privacy's.


def jax_step(mode: str, model: str, x: np.ndarray, y: np.ndarray) -> Step | None:
    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import keras

    if mode == "import":
        return None
    from _models import MODELS

    built = MODELS[model].build(keras)
    if mode != "plain":
        from jax_privacy import keras_api

        settings = keras_api.DPKerasConfig(
            epsilon=1e6,
            delta=1e-5,
            clipping_norm=CLIP,
            batch_size=len(x),
            gradient_accumulation_steps=1,
            train_steps=1_000_000,  # it stops by itself after these
            train_size=100 * len(x),
            noise_multiplier=NOISE_MULTIPLIER,
        )
        built = keras_api.make_private(built, settings)
    built.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def step() -> None:
        built.train_on_batch(x, y)
        jax.block_until_ready([v.value for v in built.trainable_variables])

    return step


STEPS = {"keras": keras_step, "torch": torch_step, "jax": jax_step}


def main(framework: str, mode: str, model: str, batch_size: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(kind: str, value: Any) -> None:
        answers.write(json.dumps([kind, value]) + "\n")

    def timed(step: Step, steps: int = 1) -> tuple[float, float]:
        """CPU seconds of the process a step, and the least wall seconds of a step."""
        walls = []
        began = time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            step()
            walls.append(time.perf_counter() - start)
        return (time.process_time() - began) / steps, min(walls)

    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        from _models import MODELS

        x, y = MODELS[model].batch(batch_size)
        step = STEPS[framework](mode, model, x, y)
        first, _ = timed(step) if step else (0.0, 0.0)
        answer("ready", [first, timed(step)[0] if step else 0.0])
        for line in sys.stdin:
            if line.strip() == "peak":
                answer("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            else:
                answer("seconds", timed(step, int(line)))
    except Exception as error:
        out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError"
        reason = str(error) if isinstance(error, NotSupported) else f"fails: {type(error).__name__}"
        answer("failed", "out of memory" if out_of_memory else reason)
        if "BENCHMARK_DEBUG" in os.environ:
            raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
