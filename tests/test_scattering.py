"""The features of examples/mnist_scattering.py: each image's own, of formulas, and what scipy makes of them."""

import runpy
from pathlib import Path

import numpy as np
from scipy.signal import correlate2d

PROGRAM = Path(__file__).parent.parent / "examples" / "mnist_scattering.py"


def test_features_are_of_one_image_alone_and_of_wavelets():
    names = runpy.run_path(str(PROGRAM))
    images = np.random.default_rng(0).random((5, 8, 8, 1)).astype("float32")
    data = names["datasets"].ImageData("noise", images, None, None, None, 10)
    model = names["features_of"](data)
    assert not model.trainable_weights
    together = model.predict(images, verbose=0)
    alone = np.concatenate([model.predict(images[i : i + 1], verbose=0) for i in range(5)])
    assert together.shape == (5, 2 * 2 * 81) and np.allclose(together, alone, atol=1e-4)

    waves, mean = names["morlet"](0), names["low_pass"](1.6)[..., 0]
    assert np.abs(waves.sum((0, 1))).max() < 1e-12  # of a constant they see nothing
    got = names["Scattering"](8)(images).numpy()[0]
    same = lambda image, kernel: correlate2d(image, kernel, "same")
    image, kernels = images[0, :, :, 0].astype(float), np.moveaxis(waves, -1, 0)
    first = [
        np.hypot(same(image, real), same(image, imaginary))
        for real, imaginary in zip(*np.split(kernels, 2), strict=True)
    ]
    # TensorFlow pads a kernel of 11 by 3 before and 4 after, where it takes every fourth of 8.
    want = [same(channel, mean)[2::4, 2::4] for channel in (image, *first)]
    assert np.allclose(np.moveaxis(got, -1, 0)[:9], want, atol=1e-5)
