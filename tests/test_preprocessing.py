"""Tests of `tfdpfl.preprocessing`: what layers learn has noise and a price, and one example moves it by no more than
that is for."""

import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from scipy.stats import chi2, norm

from tfdpfl import DPSGD, preprocessing
from tfdpfl.accounting import PrivacyLedger, price
from tfdpfl.accounting.calibration import gaussian_noise_multiplier
from tfdpfl.accounting.events import thresholded
from tfdpfl.callbacks import PrivacyBudget
from tfdpfl.callbacks._uncovered import uncovered_statistics
from tfdpfl.data import poisson_batches
from tfdpfl.errors import PrivacyError

COST = {"epsilon": 1.0, "delta": 1e-6}
RNG = np.random.default_rng(0)


@pytest.fixture
def exact(monkeypatch):
    """The sums before noise, with their sensitivity, in the order in which they are released; and no noise."""
    seen = []

    def of(self, sums, sensitivity):
        seen.append((np.array(sums, float), sensitivity))
        return seen[-1][0]

    monkeypatch.setattr(preprocessing._Release, "of", of)
    return seen


def test_normalization_learns_about_the_means_and_variances_and_is_saved_as_keras_saves_it(tmp_path):
    x = RNG.normal([1.0, -2.0, 30.0], [0.5, 2.0, 10.0], size=(20_000, 3)).astype("float32")
    ledger, layer = PrivacyLedger(), preprocessing.Normalization()
    layer.adapt(x, bounds=([-1, -10, -30], [3, 6, 90]), ledger=ledger, **COST)
    assert 0.99 < ledger.epsilon(1e-6) <= 1.0 and layer.promises(1e-6)[0].ledger is ledger
    shown = np.asarray(layer(x))
    assert np.abs(shown.mean(0)).max() < 0.05 and np.abs(shown.std(0) - 1).max() < 0.05
    model = tf.keras.Sequential([tf.keras.Input((3,)), layer])
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.layers[-1], preprocessing.Normalization)
    np.testing.assert_allclose(loaded(x[:9]), shown[:9], rtol=1e-5, atol=1e-5)
    assert loaded.layers[-1].ledger == ledger and "ledger" not in preprocessing.Normalization().get_config()
    (said,) = uncovered_statistics(loaded, PrivacyLedger())  # in a new process, too, ε needs the ledger
    assert said.startswith("ε does not include all") and not list(uncovered_statistics(loaded, ledger))
    # The ledger pays for a training, too.
    assert PrivacyBudget(delta=1e-5, ledger=ledger).ledger.epsilon(1e-6) == ledger.epsilon(1e-6)


def test_a_known_seed_is_in_the_report_of_the_ledger_that_paid_and_of_all_that_it_joins():
    secret, ledger, y = PrivacyLedger(), PrivacyLedger(), np.arange(300) % 3
    preprocessing.class_weights(y, num_classes=3, ledger=secret, **COST)
    preprocessing.class_weights(y, num_classes=3, ledger=ledger, seed=0, **COST)
    said = "The noise of tfdpfl.preprocessing comes from a seed"
    assert said not in str(secret.report(1e-5).notes) and said in str(ledger.report(1e-5).notes)
    for kept in (PrivacyLedger.from_dict(ledger.to_dict()), secret.merge(ledger)):
        assert said in str(kept.report(1e-5).notes)
    assert PrivacyLedger.from_dict(ledger.to_dict()) == ledger and "seeded" not in PrivacyLedger().to_dict()


def test_normalization_of_images_learns_one_figure_a_channel():
    images = RNG.uniform(0, 255, size=(400, 4, 4, 2)) * [1.0, 0.5]
    layer = preprocessing.Normalization()
    layer.adapt(images, bounds=(0, 255), epsilon=5.0, delta=1e-6, seed=1)
    shown = np.asarray(layer(images.astype("float32")))
    assert shown.shape == images.shape and np.abs(shown.mean((0, 1, 2))).max() < 0.2


def test_whitening_undoes_the_covariance_of_the_last_axis_and_is_saved(tmp_path):
    mixing = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])
    x = RNG.normal(size=(20_000, 2, 3)) @ mixing + np.array([[1.0, 0, -1], [0, 3, 0]])
    ledger, layer = PrivacyLedger(), preprocessing.Whitening()
    assert np.array_equal(np.asarray(layer(x[:5].astype("float32"))), x[:5].astype("float32"))  # before adapt
    layer.adapt(x, l2_norm_clip=12.0, ledger=ledger, **COST)
    assert 0.99 < ledger.epsilon(1e-6) <= 1.0 and layer.promises(1e-6)[0].ledger is ledger
    shown = np.asarray(layer(x.astype("float32")))
    assert shown.shape == x.shape and np.abs(shown.mean(0)).max() < 0.05
    flat = shown.reshape(-1, 3)
    assert np.abs(flat.T @ flat / len(flat) - np.eye(3)).max() < 0.1
    model = tf.keras.Sequential([tf.keras.Input((2, 3)), layer])
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(x[:9].astype("float32")), shown[:9], rtol=1e-5, atol=1e-5)
    assert loaded.layers[-1].ledger == ledger and loaded.layers[-1].power == 1.0
    (said,) = uncovered_statistics(loaded, PrivacyLedger())
    assert said.startswith("ε does not include all") and not list(uncovered_statistics(loaded, ledger))


def test_whitening_by_half_is_the_root_and_what_the_noise_hides_is_scaled_alike(exact):
    x = RNG.normal(size=(500, 4)) * [4.0, 1.0, 0.1, 0.001]
    half, whole, none = (preprocessing.Whitening(power=power) for power in (0.5, 1, 0))
    for layer in (half, whole, none):
        layer.adapt(x, l2_norm_clip=100.0, epsilon=1e6, delta=1e-6)
    square = np.asarray(half.matrix) @ np.asarray(half.matrix)
    assert np.allclose(square, np.asarray(whole.matrix), rtol=1e-3) and np.allclose(none.matrix, np.eye(4), atol=1e-5)
    assert np.allclose(np.asarray(none(x)), x - x.mean(0), atol=1e-4)
    # The noise that ε = 5 has would show variances of up to this in directions that have none.
    whole.adapt(x, l2_norm_clip=100.0, epsilon=5.0, delta=1e-6)
    deviation = math.sqrt(2) * gaussian_noise_multiplier(5.0, 1e-6) / 500
    least = deviation * math.sqrt(8) * 100**2
    variances = np.maximum(np.cov(x.T, bias=True) + np.eye(4) * deviation**2 * 100**2, 0)
    assert least > variances[0, 0] and np.allclose(whole.matrix, np.eye(4) / math.sqrt(least), rtol=1e-3, atol=1e-6)


def test_whitening_refuses_examples_without_features_and_arguments_out_of_range():
    with pytest.raises(ValueError, match="power must be a finite number of at least 0, got -1"):
        preprocessing.Whitening(power=-1)
    with pytest.raises(ValueError, match=r"l2_norm_clip must be a finite number above 0, got 0: give a usual length"):
        preprocessing.Whitening().adapt(np.zeros([9, 3]), l2_norm_clip=0, **COST)
    with pytest.raises(ValueError, match=r"Whitening needs examples of one known size, got the shape \[9\]"):
        preprocessing.Whitening().adapt(np.zeros(9), l2_norm_clip=1.0, **COST)
    with pytest.raises(ValueError, match=r"Whitening was made for examples of shape \[3\], got \[4\]"):
        layer = preprocessing.Whitening()
        layer.build((None, 3))
        layer.adapt(np.zeros([9, 4]), l2_norm_clip=1.0, **COST)


@pytest.mark.parametrize("features", [1, 3])
def test_an_example_moves_the_sums_by_no_more_than_the_noise_is_for(exact, features):
    corners = np.array(
        [[9.0] * features, [-9.0] * features, [np.nan] * features, [np.inf] * features, [1e300] * features]
    )
    rows = np.concatenate([RNG.normal(size=(40, features)), corners])
    words = [["a", "b", "c", "d"], ["a", "a", "a", "e"]] * 60
    adapts = {
        "Normalization": lambda x: preprocessing.Normalization().adapt(x, bounds=(-2, 2), **COST),
        "Discretization": lambda x: preprocessing.Discretization(num_bins=3).adapt(x, bounds=(-2, 2), **COST),
        "Whitening": lambda x: preprocessing.Whitening().adapt(x, l2_norm_clip=1e-9, **COST),
        "class_weights": lambda x: preprocessing.class_weights(np.arange(len(x)) % 3, num_classes=3, **COST),
    }
    for name, adapt in adapts.items():
        adapt(rows)
        (whole, sensitivity), moved = exact.pop(), []
        for i in (0, *range(len(rows) - len(corners), len(rows))):
            adapt(np.delete(rows, i, 0) if name != "class_weights" else rows[:-1])
            moved.append(np.linalg.norm(whole - exact.pop()[0]))
        assert 0.99 * sensitivity < max(moved) <= sensitivity + 1e-9, name
    layer = preprocessing.StringLookup()
    layer.adapt(words, max_tokens_per_example=2, **COST)
    (whole, sensitivity), _ = exact.pop(), exact.clear()
    layer.adapt(words[1:], max_tokens_per_example=2, **COST)
    assert np.linalg.norm(whole - exact.pop()[0]) == sensitivity == math.sqrt(2)


def test_the_noise_has_the_deviation_of_the_event_in_the_ledger():
    ledger = PrivacyLedger()
    release = preprocessing._Release("counts", 1.0, 1e-6, ledger, None, None)
    drawn = release.of(np.full(4000, 5.0), 3.0)
    (event,) = [row.event for row in ledger._rows]
    assert event == dp_accounting.GaussianDpEvent(release.noise_multiplier)
    assert price(event, 1e-6).epsilon == pytest.approx(1.0, rel=1e-3)
    statistic = (((drawn - 5) / (3 * release.noise_multiplier)) ** 2).sum()
    for wrong, accepted in ((1.0, True), (2 / 3, False), (1.5, False)):
        p = 2 * min(chi2.cdf(statistic / wrong**2, 4000), chi2.sf(statistic / wrong**2, 4000))
        assert (p > 1e-8) == accepted
    assert abs(drawn.mean() - 5) < 6 * 3 * release.noise_multiplier / math.sqrt(4000)


def test_discretization_learns_about_the_quantiles():
    x = RNG.exponential(size=(20_000, 1))
    layer = preprocessing.Discretization(num_bins=4)
    layer.adapt(x, bounds=(0, 8), **COST)
    assert np.abs(np.array(layer.bin_boundaries) - np.quantile(x, [0.25, 0.5, 0.75])).max() < 0.1
    again = preprocessing.Discretization.from_config(layer.get_config())
    assert np.array_equal(np.asarray(again(x[:50])), np.asarray(layer(x[:50])))


def test_a_vocabulary_has_what_many_examples_have_and_nothing_of_one_example_alone():
    texts = ["The cat sat", "the dog!", "a cat"] * 300 + [f"secret{i}" for i in range(50)]
    layer, ledger = preprocessing.TextVectorization(), PrivacyLedger()
    layer.adapt(texts, max_tokens_per_example=3, ledger=ledger, **COST)
    assert layer.get_vocabulary()[:2] == ["", "[UNK]"]
    assert set(layer.get_vocabulary()[2:4]) == {"the", "cat"} and set(layer.get_vocabulary()[2:]) == {
        "the", "cat", "sat", "dog", "a"
    }  # fmt: skip
    assert np.asarray(layer(["the dog secret1"])).min() == 1  # unknown
    assert 0.9 < ledger.epsilon(1e-6) <= 1.0
    lookup = preprocessing.StringLookup(max_tokens=2, num_oov_indices=1)
    lookup.adapt(np.array(["x"] * 300 + ["y"] * 90 + ["z"]), max_tokens_per_example=1, **COST)
    assert lookup.get_vocabulary() == ["[UNK]", "x"]
    with pytest.raises(PrivacyError, match="No token is in clearly more than"):
        lookup.adapt(np.array(["x", "y"]), max_tokens_per_example=1, **COST)


def test_a_token_of_one_example_passes_with_the_chance_that_delta_has_for_it(exact):
    for most in (1, 4):
        release = preprocessing._Release("counts", 1.0, 1e-2, None, None, None, thresholded=True)
        sigma = release.noise_multiplier * math.sqrt(most)
        threshold = 1 + sigma * norm.isf(release.chance / most)
        assert most * norm.sf((threshold - 1) / sigma) == pytest.approx(5e-3)
        exact.clear()
        below, above = ("a" if count < threshold else "b" for count in (threshold - 1, threshold + 1))
        assert (below, above) == ("a", "b")
        examples = [["many"]] * math.ceil(threshold + 1) + [["few"]] * math.floor(threshold - 1)
        assert preprocessing._vocabulary(examples, most, release, None, set()) == ["many"]


def test_a_threshold_costs_its_chance_next_to_the_noise():
    chance, z = 1e-5, 3.0
    event = thresholded(dp_accounting.GaussianDpEvent(z), chance)
    for epsilon in (0.5, 1.0):
        of_noise = norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z)
        found = price(event, chance + (1 - chance) * of_noise).epsilon
        assert epsilon - 1e-6 <= found < epsilon + 2e-3
    ledger = PrivacyLedger().add(event, 2)
    assert PrivacyLedger.from_dict(ledger.to_dict()) == ledger
    assert ledger.epsilon(2e-5) > ledger.epsilon(1e-4) and ledger.epsilon(1.9e-5) == math.inf


def test_class_weights_are_inverse_to_noisy_frequencies():
    y = np.repeat([0, 1, 2], [8000, 1000, 1000])
    weights = preprocessing.class_weights(y, num_classes=3, **COST)
    assert weights == pytest.approx({0: 10 / 24, 1: 10 / 3, 2: 10 / 3}, rel=0.05)
    with pytest.raises(ValueError, match=r"y\.argmax"):
        preprocessing.class_weights(np.eye(3), num_classes=3, **COST)
    with pytest.raises(ValueError, match="dtype <U3, and class_weights counts whole-number labels"):
        preprocessing.class_weights(["cat", "dog"], num_classes=2, **COST)


@pytest.mark.parametrize(
    ("adapt", "kind", "message"),
    [
        (lambda x: preprocessing.Normalization().adapt(x, **COST), ValueError, "bounds=None must be .low, high"),
        (lambda x: preprocessing.Normalization().adapt(x, bounds=(2, 1), **COST), ValueError, "low below high"),
        (lambda x: preprocessing.Normalization(axis=0).adapt(x, bounds=(0, 1), **COST), ValueError, "of the examples"),
        (lambda x: preprocessing.Normalization().adapt(x, bounds=(0, 1), epsilon=0, delta=1e-6), ValueError, "epsilon"),
        (lambda x: preprocessing.StringLookup().adapt(["a"], **COST), ValueError, "max_tokens_per_example is missing"),
        (lambda x: preprocessing.Discretization([1.0]).adapt(x, bounds=(0, 1), **COST), ValueError, "nothing to learn"),
        (lambda x: preprocessing.Normalization().adapt(x, bounds=(0, 1), adjacency="replace_one", **COST), PrivacyError,
         "has no known ε for these sums"),
        (lambda x: preprocessing.Normalization().promises(1e-5), PrivacyError, "was not adapted"),
    ],
)  # fmt: skip
def test_what_has_no_bound_or_no_price_is_refused(adapt, kind, message):
    with pytest.raises(kind, match=message):
        adapt(np.ones((5, 2)))


def copied(text):
    return tf.data.Dataset.from_tensors(text).repeat(99)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: tf.data.Dataset.from_tensor_slices([["a"] * 200, ["Ada"] * 200]), "batch"),
        (lambda: tf.data.Dataset.from_tensor_slices([["a"], ["b"]]).batch(2).unbatch(), "batch"),
        (lambda: tf.data.Dataset.from_tensor_slices(["a", "b"]).repeat(99).batch(9), "repeat"),
        (lambda: tf.data.Dataset.from_tensor_slices(["a", "b"]).flat_map(copied).batch(9), "makes copies"),
        (lambda: poisson_batches((["a", "b"], [0, 1]), 1.0, steps=99).map(lambda x, y: x), "several times"),
        (lambda: tf.data.Dataset.from_tensor_slices((["a", "b"], [0, 1])).batch(2), "one tensor"),
    ],
)
def test_a_data_set_whose_rows_may_not_be_one_example_each_is_refused(data, message):
    ledger = PrivacyLedger()
    with pytest.raises(ValueError, match=message):
        preprocessing.StringLookup().adapt(data(), max_tokens_per_example=1, ledger=ledger, **COST)
    assert not len(ledger)


def test_two_texts_of_an_example_do_not_count_as_two_examples():
    texts = tf.data.Dataset.from_tensor_slices([["Ada", "Ada"]] * 60).batch(10)
    with pytest.raises(ValueError, match="last shape dimension"):
        preprocessing.TextVectorization().adapt(texts, max_tokens_per_example=1, **COST)


def test_batches_of_texts_are_taken_in_whatever_way_they_were_read():
    texts = tf.data.Dataset.from_tensor_slices(["good", "bad film"] * 300).batch(64).map(tf.identity).prefetch(1)
    words = preprocessing.TextVectorization()
    words.adapt(texts, max_tokens_per_example=2, **COST)
    assert set(words.get_vocabulary()[2:]) == {"good", "bad", "film"}


def test_a_second_adapt_adds_to_the_ledger_of_the_first():
    layer = preprocessing.Normalization()
    for times in (1, 2):
        layer.adapt(np.zeros((5, 2)), bounds=(-1, 1), **COST)
        assert layer.ledger.steps == times


def test_a_layer_that_was_adapted_to_examples_is_not_in_an_epsilon_of_users():
    ledger, x, y = PrivacyLedger(), np.zeros((40, 2), "float32"), np.zeros(40)
    preprocessing.Normalization().adapt(x, bounds=(-1, 1), ledger=ledger, **COST)
    assert PrivacyLedger.from_dict(ledger.to_dict()) == ledger and ledger.unit == "example"
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(DPSGD(1.0, 2.0, learning_rate=0.1, expected_batch_size=2, rows_per_unit=4), loss="mse")
    users = poisson_batches((x, y), expected_batch_size=2, steps=2, user_ids=np.arange(40) // 4, examples_per_user=4)
    with pytest.raises(PrivacyError, match=r"different units .example and user.*ledger of its own"):
        model.fit(users, callbacks=[PrivacyBudget(delta=1e-5, ledger=ledger)], verbose=0)
    assert not int(model.optimizer.iterations)


@pytest.mark.both_stacks
@pytest.mark.parametrize(
    ("layer", "data"),
    [
        (lambda: preprocessing.StringLookup(), ["Ada", "Bob"]),
        (lambda: preprocessing.TextVectorization(), ["Ada has it"]),
        (lambda: preprocessing.Discretization(num_bins=2), [[1.0], [2.0]]),
        (lambda: preprocessing.Normalization(), [[1.0], [2.0]]),
        (lambda: preprocessing.Whitening(), [[1.0], [2.0]]),
    ],
)
def test_layers_learn_by_adapt_alone(layer, data):
    with pytest.raises(PrivacyError, match=rf"update_state would teach {type(layer()).__name__} exact statistics"):
        layer().update_state(tf.constant(data))


@pytest.mark.both_stacks
def test_another_ledger_cannot_lose_what_an_earlier_adapt_cost():
    layer, ledger = preprocessing.Normalization(), PrivacyLedger()
    adapt = lambda **more: layer.adapt(np.ones((50, 2)), bounds=(-4, 4), **COST, **more)
    adapt()
    with pytest.raises(PrivacyError, match="Normalization was adapted before, and ledger= does not hold"):
        adapt(ledger=ledger)
    assert not len(ledger) and layer.ledger.steps == 1
    adapt(ledger=ledger.merge(layer.ledger))
    assert layer.ledger is ledger and ledger.steps == 2
    adapt()
    assert ledger.steps == 3


def test_a_ledger_of_users_does_not_pay_for_sums_of_examples():
    ledger = PrivacyLedger().record(1.0, num_examples=10, batch_size=2, unit="user")
    with pytest.raises(PrivacyError, match="The ledger is of users"):
        preprocessing.class_weights([0, 1], num_classes=2, ledger=ledger, **COST)


def test_statistics_that_epsilon_does_not_cover_are_named():
    layers, x, words = tf.keras.layers, RNG.normal(size=(60, 2)).astype("float32"), np.array(["a", "b", "a"] * 60)
    bins, normalization = layers.Discretization(num_bins=3), layers.Normalization(name="scaled")
    lookup, texts = layers.StringLookup(), layers.TextVectorization(name="texts")
    public = layers.Normalization(mean=[0.0, 0.0], variance=[1.0, 1.0]), layers.StringLookup(vocabulary=["a"])
    for layer, data in [(bins, x), (normalization, x), (lookup, words), (texts, words)]:
        layer.adapt(data)
    named = lambda made, ledger=None: list(uncovered_statistics(held(*made), ledger or PrivacyLedger()))
    assert not named([*public, layers.Dense(1), layers.TextVectorization(vocabulary=["a"])])
    (said,) = named([normalization])
    assert "the statistics of 'scaled' (Normalization): they count as public" in said
    assert said.endswith("use tfdpfl.preprocessing.Normalization instead.")
    (said,) = named([bins, lookup, texts, *public])
    assert "(Discretization)" in said and "(StringLookup), 'texts' (TextVectorization): they" in said

    mine, theirs = preprocessing.Normalization(name="mine"), preprocessing.TextVectorization(name="theirs")
    mine.adapt(x, bounds=(-4, 4), **COST)
    theirs.adapt(words, max_tokens_per_example=1, **COST)
    (said,) = named([mine, theirs], PrivacyLedger().merge(mine.ledger))
    assert said.startswith("ε does not include all that the adapt of 'mine' (Normalization), 'theirs'")
    assert not named([mine, theirs], PrivacyLedger().merge(mine.ledger).merge(theirs.ledger))
    twice = preprocessing.Normalization()
    twice.adapt(x, bounds=(-4, 4), **COST)
    assert named([mine, twice], mine.ledger) and not named(
        [mine, twice], PrivacyLedger().merge(mine.ledger).merge(twice.ledger)
    )


def held(*layers):
    """A model that holds layers, of which it calls none."""
    model = tf.keras.Model()
    model.held = list(layers)
    return model


@pytest.mark.slow
def test_a_fit_warns_once_of_statistics_that_epsilon_does_not_cover():
    x, y = RNG.normal(size=(60, 2)).astype("float32"), np.zeros((60, 1), "float32")
    layer, budget = tf.keras.layers.Normalization(name="scaled"), PrivacyBudget(delta=1e-3)
    layer.adapt(x)
    model = tf.keras.Sequential([tf.keras.Input((2,)), layer, tf.keras.layers.Dense(1)])
    model.compile(DPSGD(1.0, 1.0, learning_rate=0.1), loss="mse")
    with pytest.warns(UserWarning, match="does not cover the statistics of 'scaled'") as caught:
        for _ in range(2):
            model.fit(x, y, batch_size=60, callbacks=[budget], verbose=0)
    assert sum("scaled" in str(warning.message) for warning in caught) == 1
    assert "does not cover the statistics of 'scaled'" in budget.report().statement()
