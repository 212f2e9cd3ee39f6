"""Tests of random allocation, in which each example joins one step of an epoch: its price, its draws and `fit`."""

import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from scipy.special import ndtr
from scipy.stats import chi2

import tfdpfl
from tfdpfl.accounting import PrivacyLedger, allocation, compute_epsilon, compute_noise_multiplier, privacy_statement
from tfdpfl.accounting.calibration import compute_batch_size, compute_num_steps
from tfdpfl.callbacks import PrivacyBudget
from tfdpfl.data import declared_sampling, random_allocation
from tfdpfl.data.draws import Words
from tfdpfl.errors import PrivacyError

RUN = {"num_examples": 600, "batch_size": 60, "sampling": "random_allocation"}


def deltas(sigma, steps, epsilon):
    """δ at ε if the example is removed, and if it is added."""
    losses = allocation.losses(sigma, steps, 1e-3)
    return [pmf.get_delta_for_epsilon(epsilon) for pmf in (losses._pmf_remove, losses._pmf_add)]


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_one_step_costs_what_a_gaussian_costs(sigma):
    for epsilon in (0.0, 0.5 / sigma, 2 / sigma):
        exact = ndtr(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * ndtr(-0.5 / sigma - epsilon * sigma)
        for delta in deltas(sigma, 1, epsilon):
            assert exact <= delta <= 1.003 * exact + 1e-12


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 2), (0.7, 3), (2.0, 7), (1.0, 40)])
def test_a_few_steps_cost_what_samples_of_the_dominating_pair_cost(sigma, steps):
    noise = np.random.default_rng(7).standard_normal([100_000, steps])
    ratio = np.exp(noise / sigma - 0.5 / sigma**2).mean(axis=1)  # of the mixture of shifted noises to noise alone
    for epsilon in (0.0, 0.2):
        removed = np.maximum(ratio - math.exp(epsilon), 0)
        added = np.maximum(1 - math.exp(epsilon) * ratio, 0)
        for delta, sampled in zip(deltas(sigma, steps, epsilon), (removed, added), strict=True):
            error = 4 * sampled.std() / math.sqrt(len(sampled))
            assert sampled.mean() - error < delta < 1.002 * sampled.mean() + error + 1e-9


# σ, steps of an epoch, epochs; the bound of PLD-accounting 2.0 (Feldman & Shenfeld) on its finest grid that took less
# than a minute; Poisson sampling's ε. All at δ = 1e-5.
@pytest.mark.parametrize(
    ("sigma", "steps", "epochs", "published", "poisson"),
    [(2.0, 10, 1, 0.628, 0.798), (2.0, 60, 1, 0.234, 0.259), (6.33, 2, 40, 3.057, 3.002)],
)
def test_prices_are_no_higher_than_the_published_bounds_and_than_poisson(sigma, steps, epochs, published, poisson):
    found = compute_epsilon(
        num_examples=100 * steps, batch_size=100, noise_multiplier=sigma, num_epochs=epochs, delta=1e-5,
        sampling="random_allocation",
    )  # fmt: skip
    assert 0.96 * published < found < min(published, poisson)


def test_a_coarser_grid_gives_a_larger_epsilon(monkeypatch):
    fine = allocation.losses(4.0, 20, 1e-3).get_epsilon_for_delta(1e-5)
    for step in (0.1, 0.4):
        monkeypatch.setattr(allocation, "_STEP", step)
        coarse = allocation.losses(4.0, 20, 1e-3).get_epsilon_for_delta(1e-5)
        assert fine < coarse < 1.5 * fine
        fine = coarse


def test_more_steps_in_an_epoch_cost_less_and_the_mean_is_kept():
    last = math.inf
    for steps in (1, 2, 3, 5, 64):
        total = allocation._sum_of(0.5, steps)
        assert abs(total.probabilities.sum() + total.zero - 1) < 1e-11
        assert abs(total.probabilities @ total.values + total.lost - steps) < 1e-11 * steps
        epsilon = allocation.losses(2.0, steps, 1e-3).get_epsilon_for_delta(1e-5)
        assert epsilon < last
        last = epsilon


def test_an_epoch_that_was_begun_costs_as_much_as_a_whole_one():
    whole = compute_epsilon(**RUN, noise_multiplier=2.0, num_epochs=2, delta=1e-5)
    for steps in (11, 20):
        assert compute_epsilon(**RUN, noise_multiplier=2.0, num_steps=steps, delta=1e-5) == whole
    assert compute_epsilon(**RUN, noise_multiplier=2.0, num_steps=21, delta=1e-5) > whole
    # All examples in each step: no sampling.
    everyone = {**RUN, "batch_size": 600, "noise_multiplier": 2.0, "num_epochs": 1, "delta": 1e-5}
    assert compute_epsilon(**everyone) == compute_epsilon(**{**everyone, "sampling": "none"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "named"),
    [({"sampling": "random_allocation"}, "sampling='random_allocation'"), ({"truncated_batch_size": 20}, "truncated")],
)
def test_rdp_says_that_it_has_no_answer(more, named):
    run = dict(num_examples=100, batch_size=10, noise_multiplier=1.0, num_epochs=1, delta=1e-4, **more)
    with pytest.warns(UserWarning, match=f"accountant='rdp' has no ε for {named}.*Leave accountant out") as caught:
        asked = tfdpfl.compute_epsilon(**run, accountant="rdp")
    assert caught[0].filename == __file__ and asked == tfdpfl.compute_epsilon(**run)


@pytest.mark.slow
def test_noise_steps_and_batch_size_are_found_for_a_target():
    given = {**RUN, "target_epsilon": 1.0, "delta": 1e-5}
    sigma = compute_noise_multiplier(**given, num_epochs=1)
    assert 0.999 < compute_epsilon(**RUN, delta=1e-5, noise_multiplier=sigma, num_epochs=1) <= 1
    assert compute_num_steps(**given, noise_multiplier=sigma) == 10
    sizeless = {"sampling": "random_allocation", "num_examples": 20, "noise_multiplier": sigma, "num_epochs": 1}
    size = compute_batch_size(**sizeless, target_epsilon=1.0, delta=1e-5)
    assert -(-20 // size) == 10


def test_a_ledger_composes_epochs_with_other_mechanisms_and_is_saved():
    ledger = PrivacyLedger()
    for _ in range(20):
        ledger.record(2.0, **RUN)
    assert len(ledger) == 1
    alone = ledger.epsilon(1e-5)
    assert alone == compute_epsilon(**RUN, noise_multiplier=2.0, num_epochs=2, delta=1e-5)
    assert PrivacyLedger.from_dict(ledger.to_dict()) == ledger
    ledger.add(dp_accounting.GaussianDpEvent(5.0))
    assert alone < ledger.epsilon(1e-5) < alone + 1
    assert ledger.epsilon(1e-5, "rdp") == ledger.epsilon(1e-5)  # which Rényi DP does not price


def test_the_statement_says_what_is_assumed():
    text = privacy_statement(**RUN, noise_multiplier=2.0, num_epochs=3, delta=1e-5)
    for part in ("adjacency: add_or_remove_one", "joins one step of every epoch", "can touch 3 of the steps",
                 "expected batch size 60", "shuffled batches do not qualify"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("changes", [{"adjacency": "replace_one"}, {"max_examples_per_user": 2}])
def test_what_has_no_proof_is_refused(changes):
    with pytest.raises(PrivacyError, match="random_allocation"):
        compute_epsilon(**RUN, noise_multiplier=1.0, num_epochs=1, delta=1e-5, **changes)


def test_the_price_takes_an_epoch_to_have_as_many_steps_as_the_batches_have():
    for number in (7, 61):
        for size in (1, 1.5, 6.9):
            declared = declared_sampling(random_allocation(np.arange(number), expected_batch_size=size))
            whole = math.ceil(declared.expected_batch_size - 1e-9)  # what the step table holds
            run = tfdpfl.accounting.Run(
                num_examples=number, batch_size=whole, noise_multiplier=1.0, num_epochs=1, sampling="random_allocation"
            )
            assert run.steps == run.steps_per_pass == declared.steps
            if whole < number:
                assert run.dp_event.event.steps == declared.steps


# -- draws -----------------------------------------------------------------------------------------------------


def joined(dataset, number):
    """[batches, number] of how often each example is in each batch of a pass."""
    return np.array([np.bincount(batch, minlength=number) for batch in dataset.as_numpy_iterator()])


@pytest.mark.parametrize("each", [1, 3])
def test_each_example_is_in_so_many_batches_of_every_pass(each):
    dataset = random_allocation(np.arange(50), expected_batch_size=9, num_selected=each)
    declared = declared_sampling(dataset)
    assert (declared.kind, declared.num_selected, declared.steps, len(dataset)) == (
        "random_allocation", each, 6 * each, 6 * each,
    )  # fmt: skip
    assert declared.expected_batch_size == pytest.approx(50 / 6) and declared.seed is None
    one, other = joined(dataset, 50), joined(dataset, 50)
    for matrix in (one, other):
        assert (matrix.sum(0) == each).all() and matrix.max() == 1
    assert (one != other).any()  # chosen anew


def evenness(steps_of, steps):
    """Two-sided p-value of the χ² of how many choose each step; [passes, number] in, where each pass counts alone."""
    passes, number = steps_of.shape
    counts = np.array([np.bincount(row, minlength=steps) for row in steps_of])
    statistic = ((counts - number / steps) ** 2 / (number / steps)).sum()
    return 2 * min(chi2.cdf(statistic, passes * (steps - 1)), chi2.sf(statistic, passes * (steps - 1)))


def test_steps_are_chosen_evenly_and_independently():
    number, steps, passes = 60, 6, 400
    rows = []
    for seed in range(passes):
        units = Words(seed).allocated(number, steps, 1)
        step = np.repeat(np.arange(steps), [len(u) for u in units])
        rows.append(step[np.argsort(np.concatenate(units))])
    rows = np.array(rows)
    assert evenness(rows, steps) > 1e-4 and evenness(rows.T, steps) > 1e-4  # of each pass, and of each example
    together = rows[:, :-1] * steps + rows[:, 1:]  # the steps of two neighbours in one pass, and of one in two passes
    again = rows[:-1] * steps + rows[1:]
    assert evenness(together[:, ::2], steps**2) > 1e-4 and evenness(again[::2].T, steps**2) > 1e-4
    # The test rejects what is not so: batches of one size, and examples that choose together.
    rng = np.random.default_rng(0)
    equal = np.array([rng.permutation(np.arange(number) % steps) for _ in range(passes)])
    assert evenness(equal, steps) < 1e-9 and evenness(np.repeat(rows[:, ::2], 2, axis=1), steps) < 1e-9


def test_several_steps_of_an_example_are_an_even_subset():
    subsets = [np.flatnonzero([0 in units for units in Words(seed).allocated(1, 4, 2)]) for seed in range(1200)]
    found = np.array([4 * a + b for a, b in subsets])
    counts = np.unique(found, return_counts=True)[1]
    assert len(counts) == 6 and chi2.sf(((counts - 200) ** 2 / 200).sum(), 5) > 1e-4


def test_an_example_more_moves_no_other_one():
    for seed in range(5):
        with_it, without = (Words(seed).allocated(n, 7, 1) for n in (31, 30))
        assert sum(30 in units for units in with_it) == 1
        assert [units[units < 30].tolist() for units in with_it] == [units.tolist() for units in without]


def test_users_copies_and_physical_batches_are_drawn_as_poisson_batches_draws_them():
    users = np.arange(60) // 3
    dataset = random_allocation(
        np.arange(60), expected_batch_size=4, user_ids=users, examples_per_user=2, physical_batch_size=5, copies=2
    )
    declared = declared_sampling(dataset)
    assert (declared.unit, declared.num_examples, declared.steps, declared.rows_per_unit) == ("user", 20, 5, 4)
    assert declared.physical_batches == 4 and len(dataset) == 20  # 16 rows in 4 batches of about 5
    rows = np.concatenate(list(dataset.as_numpy_iterator())).reshape(-1, 4)
    assert (rows[:, 0] == rows[:, 1]).all() and (rows[:, 2] == rows[:, 3]).all()  # copies, one after the other
    assert sorted(rows[:, 0] // 3) == list(range(20)) and (rows[:, 0] // 3 == rows[:, 2] // 3).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expected_batch_size": 0}, r"expected_batch_size must be in \(0, 20\]"),
        ({"num_selected": 0}, "num_selected must be a whole number"),
        ({"empty_batches": "drop"}, "empty_batches must be one of"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        random_allocation(np.arange(20), **{"expected_batch_size": 5, **changes})


# -- fit -------------------------------------------------------------------------------------------------------

N, DELTA = 60, 1e-4
X, Y = np.random.default_rng(0).normal(size=(N, 4)).astype("float32"), np.arange(N) % 3


def compiled(**kwargs):
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
    optimizer = tfdpfl.DPSGD(1.0, 4.0, learning_rate=0.1, **{"expected_batch_size": 12, **kwargs})
    model.compile(optimizer, loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def price(epochs, **kwargs):
    return compute_epsilon(
        num_epochs=epochs, noise_multiplier=4.0, delta=DELTA, sampling="random_allocation",
        **{"num_examples": N, "batch_size": 12, **kwargs},
    )  # fmt: skip


@pytest.mark.slow
def test_a_training_costs_its_epochs_and_stops_before_the_one_that_passes_the_target():
    model, budget = compiled(), PrivacyBudget(delta=DELTA, target_epsilon=price(2) * 1.0001)
    batches = random_allocation((X, Y), expected_batch_size=12)
    log = model.fit(batches, epochs=5, callbacks=[budget], verbose=0)
    assert log.history["epsilon"] == pytest.approx([price(1), price(2)])
    assert budget.report().sampling == "random_allocation" and budget.report().steps == 10
    assert model.optimizer.ledger.epsilon(DELTA) == price(2)
    with pytest.raises(PrivacyError, match="leaves no room for another epoch"):
        model.fit(batches, callbacks=[budget], verbose=0)
    model.fit(batches, verbose=0)  # a fit without the callback is known, too
    assert model.optimizer.ledger.epsilon(DELTA) == price(3)


@pytest.mark.slow
def test_several_uses_a_pass_of_users_in_physical_batches_are_all_priced():
    batches = random_allocation(
        (X, Y), expected_batch_size=10, num_selected=2, user_ids=np.arange(N) // 2, examples_per_user=1,
        physical_batch_size=5,
    )  # fmt: skip
    model = compiled(expected_batch_size=10, gradient_accumulation_steps=2)
    budget = PrivacyBudget(delta=DELTA)
    log = model.fit(batches, epochs=2, callbacks=[budget], verbose=0)
    want = [price(epochs, num_examples=30, batch_size=10, unit="user") for epochs in (2, 4)]
    assert log.history["epsilon"] == pytest.approx(want)
    assert budget.report().steps == 12 and budget.report().unit == "user"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "fit", "message"),
    [
        ({"expected_batch_size": None}, {}, "the size of a batch is private"),
        ({}, {"steps_per_epoch": 3}, "the end of a pass is not visible"),
        ({"gradient_accumulation_steps": 2}, {}, "one update from 2"),
        ({"num_microbatches": 4}, {}, "regroups the microbatches"),
    ],
)
def test_what_is_not_priced_is_refused(optimizer, fit, message):
    model = compiled(**optimizer)
    with pytest.raises(PrivacyError, match=message):
        model.fit(random_allocation((X, Y), expected_batch_size=12), callbacks=[PrivacyBudget(delta=DELTA)], **fit)


def own(batches):
    """A data set that says nothing of itself, with as many batches."""
    parts = [(X[i::batches], Y[i::batches]) for i in range(batches)]
    signature = (tf.TensorSpec([None, *X.shape[1:]], X.dtype), tf.TensorSpec([None], Y.dtype))
    return tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=signature)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: own(2), "an unknown number"),
        (lambda: own(2).apply(tf.data.experimental.assert_cardinality(2)), "5 batches in a pass.*has 2 batches"),
        (lambda: random_allocation((X, Y), expected_batch_size=12).concatenate(own(1)), "several data sets"),
        (lambda: random_allocation((X, Y), expected_batch_size=12).take(2), "has 2 batches"),
        (lambda: random_allocation((X, Y), expected_batch_size=12).unbatch().batch(60), "put into other batches"),
    ],
)
def test_a_pass_of_another_number_of_batches_than_is_priced_is_refused(data, message):
    budget = PrivacyBudget(delta=DELTA, sampling="random_allocation", num_examples=N, batch_size=12)
    model = compiled()
    with pytest.raises(PrivacyError, match=message):
        model.fit(data(), callbacks=[budget], verbose=0)


def test_secure_noise_is_refused_before_the_first_step():
    model = compiled(secure_noise=True)
    with pytest.raises(PrivacyError, match="no ε is known for discrete noise"):
        model.fit(random_allocation((X, Y), expected_batch_size=12), callbacks=[PrivacyBudget(delta=DELTA)], verbose=0)
    assert not int(model.optimizer.iterations)
