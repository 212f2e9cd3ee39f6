"""Makes synthetic patients: those of a hospital for training, and others of the same kind for tests."""

from __future__ import annotations

import numpy as np

HOSPITALS = {"Edinburgh Hospital": 700, "Clydebank Infirmary": 800, "Orkney Hospital": 900}
_MEAN_AGE = [42, 54, 66]


def patients_of(number: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(x, y) to train on and (x, y) to test on, of the hospital with this number; the same in each process."""
    beds = [*HOSPITALS.values()][number]
    rng = np.random.default_rng(number)
    age = rng.normal(_MEAN_AGE[number], 12, 2 * beds).clip(20, 90)
    cholesterol = (150 + 2 * age + rng.normal(0, 30, 2 * beds)).clip(120, 350)
    pressure = (90 + 0.8 * age + 0.1 * cholesterol + rng.normal(0, 15, 2 * beds)).clip(90, 200)
    exercise = np.maximum(0, 8 - 0.05 * age + rng.normal(0, 3, 2 * beds))
    risk = 0.05 * age + 0.01 * cholesterol + 0.03 * pressure - 0.2 * exercise + rng.normal(0, 0.7, 2 * beds)
    # Public guesses of means and deviations: the patients' own would be a release.
    x = (np.column_stack([age, cholesterol, pressure, exercise]) - [55, 260, 155, 5]) / [15, 40, 20, 3]
    x, y = x.astype(np.float32), (risk > 9.0).astype(np.int32)
    return (x[:beds], y[:beds]), (x[beds:], y[beds:])
