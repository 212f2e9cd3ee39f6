"""The callback puts half of the canaries in, and finds a training that memorises them."""

import json

import numpy as np
import pytest

from tfdpfl.audit import OneRunAudit


@pytest.mark.slow
def test_a_training_that_memorises_its_canaries_is_found():
    import tensorflow as tf

    keras, rng = tf.keras, np.random.default_rng(0)
    x, y = rng.normal(size=(20, 20)).astype("float32"), rng.integers(0, 10, 20)
    canaries = rng.normal(size=(200, 20)).astype("float32"), rng.integers(0, 10, 200)
    audit = OneRunAudit(canaries, delta=1e-5, seed=0)
    assert 70 < audit.inserted.sum() < 130
    data, labels = audit.with_canaries(x, y)
    there = {row.tobytes(): label for row, label in zip(data, labels, strict=True)}
    assert len(data) == 20 + audit.inserted.sum()
    said = [there.get(row.tobytes()) for row in canaries[0]]
    assert said == [int(label) if put else None for label, put in zip(canaries[1], audit.inserted, strict=True)]
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
    model.compile(keras.optimizers.Adam(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(data, labels, epochs=30, verbose=0, callbacks=[audit])
    report = audit.report
    assert report.epsilon > 1 and report.epsilon_gaussian > report.epsilon
    assert json.loads(json.dumps(report.to_dict()))["epsilon"] == report.epsilon
    assert str(report).startswith("one run with 200 canaries: epsilon ≥ ")
