"""Rows of correlated noise have the covariance that their matrix states, for every kind and for one of your own."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.accounting.correlated import CorrelatedRun
from tfdpfl.noise import BLT, Banded, BandedInverse, Noise, Source, Tree, compare, strategies
from tfdpfl.noise.correlated import Stream

LIMITS = {"min_separation": 4, "max_participations": 3}


EACH_KIND = [
    Tree(restart_every=5), Tree(), BLT(**LIMITS), Banded(bands=3, coefficients=(2.0, 1.0, 0.5), **LIMITS),
    BandedInverse(bands=3, coefficients=(2.0, -1.0, -0.25), **LIMITS),
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fading(Noise):
    """Each step takes back a share of the last step's noise."""

    fade: float = 0.6
    unit = 2.0
    sizes = ("fade",)

    def matrix(self, num_steps):
        return np.tril(self.fade ** np.subtract.outer(np.arange(num_steps), np.arange(num_steps)).clip(0))

    def sensitivity(self, num_steps, min_separation=1, max_participations=None):
        return float(np.linalg.norm(self.matrix(num_steps).sum(1)))  # as if it were in every step

    def variances(self, num_steps):
        return (np.tril(np.ones([num_steps] * 2)) @ np.linalg.inv(self.matrix(num_steps)) ** 2).sum(1)

    def event(self, uses, stddev):
        return strategies.moved_normals(self.sensitivity(*uses) / stddev, [(uses.num_steps, 1 / stddev)])

    @classmethod
    def candidates(cls, uses, objective):
        return [cls(**uses.limits)]

    def initial_state(self, size):
        return {"dp_noise_last": np.zeros(size, np.float32)}

    def draw(self, source, size, state, step):
        fresh, last = source.gaussian([[size]], 1.0)[0], tf.convert_to_tensor(state[0])
        state[0].assign(fresh)
        return fresh - tf.where(step > 0, self.fade, 0.0) * last


@pytest.fixture(autouse=True, scope="module")
def forget():
    yield
    strategies.KINDS.pop("Fading")


@pytest.mark.parametrize(
    "noise",
    [*EACH_KIND, Fading()],
    ids=Noise.text,
)
def test_rows_have_the_covariance_of_the_inverse_matrix_and_processes_that_share_keys_have_the_same(noise):
    def stream():
        made = Stream(noise, [(200, 100), (1000,)], lambda name, value: tf.Variable(value, name=name))
        assert all(v.assign(tf.ones_like(v)) is not None for v in made.state)  # at step 0 it counts as empty
        return made

    alone, source, sharing, rows, same = stream(), Source(3), [stream(), stream()], [], []
    for t in range(8):
        step, key = tf.constant(t, tf.int64), source.fresh_key()
        rows.append(alone.next(source, step))
        same.append([each.next(Source().shared(key), step) for each in sharing])
    assert [tuple(part.shape) for part in rows[0]] == [(200, 100), (1000,)]
    flat = [[np.concatenate([np.ravel(part) for part in row]) for row in of] for of in (rows, *zip(*same, strict=True))]
    np.testing.assert_array_equal(flat[1], flat[2])
    for row in flat[:2]:
        base = noise.matrix(8) @ np.array(row)
        # The deviation of an entry is at most sqrt(2 / 21,000), 0.01: 6 of them.
        np.testing.assert_allclose(base @ base.T / base.shape[1], np.eye(8), atol=0.06)


def test_rows_of_a_banded_inverse_are_sums_of_the_last_draws(monkeypatch):
    """By numpy: row t is the convolution of the coefficients with the base normals from step 0 on."""
    noise = BandedInverse(bands=3, coefficients=(2.0, -1.0, -0.25), **LIMITS)
    z = np.random.default_rng(0).normal(size=(6, 4))
    stream = Stream(noise, [(4,)], lambda name, value: tf.Variable(value, name=name))
    for v in stream.state:
        v.assign(tf.ones_like(v))
    assert len(stream.state) == 2
    for t in range(6):
        monkeypatch.setattr(Source, "gaussian", lambda self, shapes, stddev, t=t: [tf.constant(z[t], tf.float32)])
        (row,) = stream.next(Source(3), tf.constant(t, tf.int64))
        wanted = sum(c * z[t - a] for a, c in enumerate([2.0, -1.0, -0.25]) if a <= t)
        np.testing.assert_allclose(row, wanted, atol=1e-6)
    np.testing.assert_allclose([v.numpy() for v in stream.state], [z[5], z[4]], atol=1e-6)


def test_the_sensitivity_of_a_banded_inverse_is_of_the_numbers_that_steps_multiply_by(monkeypatch):
    """The rows of one draw of 1 at step 0 are the column of C⁻¹, to the last bit."""
    noise = BandedInverse(bands=4, coefficients=(0.9, -0.1, -0.3, -0.4), **LIMITS)
    stream, rows = Stream(noise, [(1,)], lambda name, value: tf.Variable(value, name=name)), []
    for t in range(6):
        monkeypatch.setattr(Source, "gaussian", lambda self, shapes, stddev, t=t: [tf.constant([float(t == 0)])])
        rows.append(float(stream.next(Source(3), tf.constant(t, tf.int64))[0][0]))
    np.testing.assert_array_equal(rows, noise.inverse(6))


def test_a_noise_cannot_take_the_name_of_another():
    with pytest.raises(
        ValueError, match=r"The noise Banded of .* has the same name as a noise of tfdpfl\.noise\.strategies"
    ):
        type("Banded", (Banded,), {"__module__": __name__})
    assert strategies.KINDS["Banded"] is Banded
    assert type("Fading", (Noise,), {"__module__": __name__}) is strategies.KINDS["Fading"]  # a cell that ran again
    strategies.KINDS["Fading"] = Fading


def test_a_noise_of_your_own_is_priced_saved_compared_and_refused_by_its_name():
    noise = Fading(min_separation=2, max_participations=3)
    run = CorrelatedRun(noise=noise, noise_multiplier=3.0, num_steps=10, min_separation=2, max_participations=3)
    assert CorrelatedRun.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    ledger = tfdpfl.PrivacyLedger().count_correlated([("a", 0)], run)
    bound = tfdpfl.PrivacyLedger().record(3.0 * 2.0 / noise.sensitivity(10), num_steps=1, num_examples=1, batch_size=1)
    assert ledger.epsilon(1e-5, "rdp") == pytest.approx(bound.epsilon(1e-5, "rdp"), rel=1e-3)
    assert tfdpfl.PrivacyLedger.from_dict(ledger.to_dict()) == ledger
    assert "Fading(fade=0.6) noise" in run.text()
    assert any(isinstance(line.noise, Fading) for line in compare(3))
    assert tfdpfl.DPSGD(1.0, 1.0, noise=noise.to_dict()).noise == noise
    with pytest.raises(ValueError, match=r"AdaptiveClip.* together with noise=Fading.*least_shift"):
        tfdpfl.DPSGD(tfdpfl.AdaptiveClip(), 1.0, noise=noise)
    with pytest.raises(ValueError, match=r"must be tfdpfl\.noise\.Tree, .* or Fading"):
        tfdpfl.DPSGD(1.0, 1.0, noise="fading")
