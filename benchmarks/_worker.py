"""One competitor in a process of its own, for step.py: python _worker.py FRAMEWORK MODE MODEL BATCH

Builds the model and steps twice; then answers each line of its input by a line of JSON: a number of steps with the CPU
seconds that a step took and the least wall seconds of one, "peak" with its memory in MB.
"""

from __future__ import annotations

import gc
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
    if mode in ("tfdpfl", "noiseless", "stock"):
        if mode == "stock":  # without the kernels
            os.environ["TFDPFL_NATIVE"] = "0"
        import tfdpfl

        # Without noise every other part of the step is there: the difference is the noise's share.
        noise_multiplier = 0.0 if mode == "noiseless" else NOISE_MULTIPLIER
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
    return lambda: next(first, lambda: built.train_function(batches))()


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
        gc.collect()  # else chance decides in whose first step the objects of the imports are looked through (0.15 s)
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
