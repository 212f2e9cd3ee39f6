"""The strategies that wrap Flower's: what a client can do to a round, what is drawn, paid, and lost in a crash."""

import inspect
import math
import os

import numpy as np
import pytest

pytest.importorskip("flwr")
from flower_fakes import FakeGrid, arrays_in, flat, model, moved, reply
from flwr.app import ArrayRecord
from flwr.serverapp import strategy as flower
from scipy.stats import norm as gauss
from strategy_cases import CLIENTS, LARGE, bad, clipped, config, fixed, looks_like, one_round, same, updates

from tfdpfl import AdaptiveClip, PrivacyError
from tfdpfl.federated import NoisedMetrics
from tfdpfl.flower import DifferentialPrivacyAdaptiveClipping as Adaptive
from tfdpfl.flower import DifferentialPrivacyFixedClipping as Fixed
from tfdpfl.flower import NbAFLStrategy, local_dp_mod, nbafl_mod


def test_the_mean_is_of_clipped_updates_without_weights_over_a_fixed_number():
    def answer(message, number):
        got = moved(updates)(message, number)
        got.content["metrics"]["num-examples"] = 10**number  # FedAvg alone would weight by it
        return got

    start = model(w=np.full((3, 2), 2.0, np.float32))
    result, _ = one_round(fixed(clients_per_round=8), answer, start)
    expected = flat(start) + sum(clipped(updates(i)) for i in range(CLIENTS)) / 8
    np.testing.assert_allclose(flat(result.arrays), expected, rtol=1e-6, atol=1e-7)
    assert result.arrays["w"].numpy().dtype == np.float32


@pytest.mark.parametrize("clip", [0.3, 2.0])
@pytest.mark.parametrize("kind", ["giant", "giant float64", "integers", "half", "twice", "silent", "fortran", "zero"])
def test_no_client_moves_the_sum_by_more_than_the_clip(kind, clip):
    def odd(message):
        sent = arrays_in(message)
        good = {k: v + 3 for k, v in sent.items()}
        return {
            "giant": lambda: reply(message, {k: np.full_like(v, 3e37) for k, v in sent.items()}),
            "giant float64": lambda: reply(message, {k: np.full(v.shape, 1e150) for k, v in sent.items()}),
            "integers": lambda: reply(message, {k: np.full(v.shape, 99, np.int64) for k, v in sent.items()}),
            "half": lambda: reply(message, {k: v.astype(np.float16) for k, v in good.items()}),
            "twice": lambda: [reply(message, good), reply(message, {k: -v for k, v in good.items()})],
            "silent": lambda: None,
            "fortran": lambda: reply(message, {k: np.asfortranarray(v) for k, v in good.items()}),
            "zero": lambda: reply(message, sent),
        }[kind]()

    ends = []
    for first in (odd, lambda message: None):
        answer = lambda message, number, first=first: first(message) if number == 0 else moved(updates)(message, number)
        result, _ = one_round(fixed(l2_norm_clip=clip), answer)
        ends.append(flat(result.arrays) * CLIENTS)
    distance = np.linalg.norm(ends[0] - ends[1])
    assert np.isfinite(ends[0]).all()
    assert distance <= clip * (1 + 1e-5)
    if kind not in ("silent", "zero"):
        assert distance > clip * (1 - 1e-3)  # it does count


def test_what_is_not_floating_point_stays_as_the_server_has_it():
    start = model(counter=np.array(7, np.int64), mask=np.array([True, False]))

    def answer(message, number):
        got = {**arrays_in(moved(updates)(message, number)), "counter": np.array(10**6), "mask": np.array([False] * 2)}
        return reply(message, got)

    result, _ = one_round(fixed(noise_multiplier=1.0), answer, start)
    assert result.arrays["counter"].numpy() == 7 and result.arrays["counter"].numpy().dtype == np.int64
    assert result.arrays["mask"].numpy().tolist() == [True, False]
    with pytest.raises(PrivacyError, match="no floating-point arrays"):
        one_round(fixed(), answer, ArrayRecord([np.arange(3)]))


def test_the_noise_is_that_of_the_clip_and_the_denominator():
    strategy = fixed(noise_multiplier=1.3, l2_norm_clip=0.7)
    result, _ = one_round(strategy, same, model(**LARGE))
    noise = result.arrays["w"].numpy().ravel()
    right = 1.3 * 0.7 / CLIENTS
    assert looks_like(noise, right) and not looks_like(noise, right * 2 / 3) and not looks_like(noise, right * 3 / 2)
    assert abs(noise.mean()) < 6 * right / math.sqrt(len(noise))
    again, _ = one_round(fixed(noise_multiplier=1.3, l2_norm_clip=0.7), same, model(**LARGE))
    assert np.abs(np.corrcoef(noise, again.arrays["w"].numpy().ravel())[0, 1]) < 0.05


def test_the_noise_of_a_round_is_that_of_the_clip_it_applied_which_moves_afterwards():
    clip = AdaptiveClip(initial=2.0, learning_rate=3.0)  # every client is within: it falls by a factor of 4.5
    strategy = Adaptive(flower.FedAvg(), noise_multiplier=1.0, l2_norm_clip=clip, clients_per_round=CLIENTS, delta=1e-5)
    of_updates, _ = clip.split(1.0, CLIENTS)
    result, grid = one_round(strategy, same, model(**LARGE))
    assert looks_like(result.arrays["w"].numpy().ravel(), of_updates * 2.0 / CLIENTS)
    assert result.train_metrics_clientapp[1]["clip"] == 2.0
    assert 2.0 * math.exp(-1.5) - 1e-9 <= strategy.current_clip != 2.0
    second = strategy.current_clip
    result = strategy.start(grid, model(**LARGE), num_rounds=1)
    assert looks_like(result.arrays["w"].numpy().ravel(), of_updates * second / CLIENTS)


@pytest.mark.parametrize(("length", "end"), [(0.0, "1e-08"), (1e15, r"1e\+10")])
def test_an_adaptive_clip_at_its_end_is_named_and_its_round_costs_nothing(length, end):
    clip = AdaptiveClip(initial=1.0, learning_rate=1e4)
    strategy = Adaptive(flower.FedAvg(), noise_multiplier=1.0, l2_norm_clip=clip, clients_per_round=CLIENTS, delta=1e-5)
    with pytest.raises(PrivacyError, match=f"The adaptive clip is {end}: "):
        strategy.start(FakeGrid(CLIENTS, moved(lambda number: length * np.eye(10)[0])), model(), num_rounds=2)
    assert strategy.rounds_charged == 1


@pytest.mark.parametrize("initial", [0.1, 100])
@pytest.mark.slow
def test_the_adaptive_clip_finds_the_median_norm(initial):
    norms = np.exp(0.5 * gauss.ppf((np.arange(31) + 0.5) / 31))
    clip = AdaptiveClip(initial=initial)
    strategy = Adaptive(
        flower.FedAvg(), noise_multiplier=0.3, l2_norm_clip=clip, clients_per_round=31, delta=1e-5, seed=1
    )
    grid = FakeGrid(31, moved(lambda number: norms[number] * np.eye(10)[0]))
    seen = [m["clip"] for m in strategy.start(grid, model(), num_rounds=80).train_metrics_clientapp.values()]
    assert np.mean(seen[65:]) == pytest.approx(np.median(norms), rel=0.1)


def test_one_client_moves_the_adaptive_count_by_a_half():
    """The same round with and without client 0: the clips differ by exp(lr / 2 / K), whatever it sends."""
    for kind in ("nan", "good", "giant"):
        ends = []
        for there in (True, False):
            strategy = Adaptive(
                flower.FedAvg(),
                noise_multiplier=0.0,
                l2_norm_clip=AdaptiveClip(initial=1.0),
                clients_per_round=8,
                delta=1e-5,
            )

            def answer(message, number, there=there, kind=kind):
                if number == 0 and not there:
                    return None
                if number == 0 and kind == "nan":
                    return bad(message, "nan")
                return moved(lambda n: 1e6 * updates(n) if n == 0 and kind == "giant" else updates(n))(message, number)

            one_round(strategy, answer)
            ends.append(math.log(strategy.current_clip))
        assert abs(ends[0] - ends[1]) == pytest.approx(0.2 * 0.5 / 8, rel=1e-6)


# Who is asked.


# What is paid.


@pytest.mark.parametrize("how", [dict(), dict(sampling_rate=0.4)])
def test_the_budget_ends_the_training_with_its_result(how):
    strategy = fixed(noise_multiplier=2.0, target_epsilon=3.0, **how)
    result, grid = one_round(strategy, moved(updates), rounds=500)
    ran = strategy.rounds_charged
    assert 0 < ran < 500 and strategy.stopped_by == "target_epsilon"
    assert len(result.train_metrics_clientapp) == ran == len(grid.sent) / 2 and result.arrays
    assert strategy.epsilon <= 3.0 < strategy._ledger_of(ran + 1).epsilon(1e-5)
    # A loop of one's own, too, is not served beyond it.
    assert strategy.configure_train(ran + 1, model(), config(), grid) == []
    assert strategy.aggregate_train(ran + 1, []) == (None, None)
    assert strategy.rounds_charged == ran
    more = strategy.start(grid, result.arrays, num_rounds=3)
    assert strategy.rounds_charged == ran and flat(more.arrays) == pytest.approx(flat(result.arrays))


def test_a_target_without_room_for_one_round_is_refused_before_anything_is_sent():
    grid = FakeGrid(CLIENTS, moved(updates))
    for z in (0.0, 0.5):
        with pytest.raises(PrivacyError, match="no room for one round"):
            fixed(noise_multiplier=z, target_epsilon=0.1).start(grid, model())
    assert grid.sent == []


# Metrics.


# The wrapped strategy.


def test_the_wrapped_strategy_sees_one_reply_and_what_it_makes_of_it_is_post_processing():
    seen = []

    class Watching(flower.FedAdam):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            seen.append([flat(next(iter(r.content.array_records.values()))) for r in replies])
            return super().aggregate_train(server_round, replies)

    result, _ = one_round(fixed(Watching(eta=0.1, tau=1e-3), noise_multiplier=1.0), moved(updates), rounds=3)
    m = v = weights = np.zeros(10)
    for number, (mean,) in enumerate(seen, 1):  # Reddi et al. 2020, algorithm 2, with Flower's rate of Adam
        delta = mean - weights
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        rate = 0.1 * math.sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1))
        weights = weights + rate * m / (np.sqrt(v) + 1e-3)
    np.testing.assert_allclose(flat(result.arrays), weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["FedAvg", "FedAvgM", "FedProx", "FedAdam", "FedAdagrad", "FedYogi"])
def test_strategies_that_take_a_mean_are_wrapped(name):
    extra = dict(proximal_mu=0.1) if name == "FedProx" else {}
    result, _ = one_round(fixed(getattr(flower, name)(**extra), noise_multiplier=1.0), moved(updates), rounds=2)
    assert np.isfinite(flat(result.arrays)).all() and flat(result.arrays).any()


def test_strategies_that_compare_clients_are_refused():
    for inner in (flower.Krum(), flower.FedMedian(), fixed()):
        with pytest.raises(ValueError, match="single clients"):
            fixed(inner)
    with pytest.raises(ValueError, match=r"flwr\.serverapp\.strategy"):
        fixed(object())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(noise_multiplier=-1), "noise_multiplier must be"),
        (dict(l2_norm_clip=0), "clip must be"),
        (dict(l2_norm_clip=AdaptiveClip()), "clip must be"),
        (dict(l2_norm_clip=None), "clip must be"),
        (dict(delta=1), "delta must be"),
        (dict(clients_per_round=0), "clients_per_round must be"),
        (dict(sampling_rate=1.5), "sampling_rate must be"),
        (dict(sampling_rate=0.5, clients_per_round=3), "Give one of"),
        (dict(clients_per_round=None), "Give one of"),
        (dict(sampling_rate=0.5, max_participations=3), "keeps to no limit"),
        (dict(max_participations=0), "max_participations must be"),
        (dict(population=2), "population must be"),
        (dict(target_epsilon=0), "target_epsilon must be"),
        (dict(accountant="magic"), "accountant must be"),
        (dict(train_metrics=True), "train_metrics must be"),
        (dict(evaluate_metrics=NoisedMetrics(noise_multiplier=1.0)), "names the metrics"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        fixed(**arguments)


# What a crash costs.


class Killed(BaseException):
    """Stands for SIGKILL: nothing may handle it."""


def crash_at(monkeypatch, step):
    """Ends the process, as it were, before its step-th touch of the disk."""
    left = [step]

    def counted(real):
        def touch(*arguments, **named):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return real(*arguments, **named)

        return touch

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return left


def test_killed_anywhere_and_resumed_every_release_is_counted_and_no_noise_comes_twice(tmp_path, monkeypatch):
    sums = [sum(clipped(updates(i)) for i in range(CLIENTS)), np.zeros(10)]  # of the first process, and of the second
    shown, steps = set(), 0
    while True:
        path, models, noises = tmp_path / str(steps) / "ledger.jsonl", [], []

        def run(life, path=path, models=models, noises=noises):
            strategy = fixed(noise_multiplier=1.0, ledger_path=path)
            last = [None]

            def watch(number, arrays):
                now = flat(arrays)
                if last[0] is not None:
                    models.append(now)
                    noises.append(CLIENTS * (now - last[0]) - sums[life])
                last[0] = now

            try:
                grid = FakeGrid(CLIENTS, moved(updates) if life == 0 else same)
                strategy.start(grid, model(), num_rounds=3, evaluate_fn=watch)
            finally:
                strategy._journal.close()  # as the end of a process does
            return strategy

        with monkeypatch.context() as patch:
            crash_at(patch, steps)
            try:
                run(0)
                break
            except Killed:
                shown.add(len(models))
        strategy = run(1)
        assert 3 <= strategy.rounds_charged <= 4  # at most the round that it died in is paid twice
        assert len(models) <= strategy.rounds_charged  # what was shown is charged
        apart = [np.abs(a - b).max() for i, a in enumerate(noises) for b in noises[:i]]
        assert min(apart, default=1.0) > 1e-3
        steps += 1
    assert steps > 15 and shown >= {0, 1, 2}


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_model_that_is_not_finite_is_refused_before_a_round_is_paid(bad):
    strategy = fixed(noise_multiplier=1.0)
    grid = FakeGrid(CLIENTS, moved(updates))
    with pytest.raises(PrivacyError, match="'b' holds numbers that are not finite"):
        strategy.start(grid, model(b=np.array([0, bad, 0, 0], np.float32)))
    assert grid.sent == [] and strategy.rounds_charged == 0


def test_a_strategy_that_raises_after_the_charge_loses_no_round(tmp_path):
    class Fragile(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            raise KeyError("loss")

    for attempt in (1, 2):
        strategy = fixed(Fragile(), noise_multiplier=0.0, ledger_path=tmp_path / "ledger")
        with pytest.raises(KeyError):
            one_round(strategy, moved(updates), rounds=3)
        strategy._journal.close()
        assert strategy.rounds_charged == attempt
    strategy = fixed(noise_multiplier=0.0, ledger_path=tmp_path / "ledger")
    result, _ = one_round(strategy, same, rounds=3)
    each = sum(clipped(updates(i)) for i in range(CLIENTS)) / CLIENTS
    np.testing.assert_allclose(flat(result.arrays), 2 * each, rtol=1e-5, atol=1e-6)  # both rounds are in the model


def test_an_editor_can_show_every_argument_and_the_old_name_of_the_clip_still_works():
    for made in (Fixed, Adaptive, NbAFLStrategy, local_dp_mod, nbafl_mod):
        shown = inspect.signature(made).parameters
        assert not [p for p in shown.values() if p.kind is p.VAR_KEYWORD] and "l2_norm_clip" in shown
    how = dict(noise_multiplier=1.0, clients_per_round=2, delta=1e-5)
    with pytest.warns(DeprecationWarning, match="clip= has a new name: write l2_norm_clip="):
        assert Fixed(flower.FedAvg(), clip=0.5, **how).current_clip == 0.5
    with pytest.raises(ValueError, match=r"AdaptiveClip\(initial=0.5\), or use DifferentialPrivacyFixedClipping"):
        Adaptive(flower.FedAvg(), l2_norm_clip=0.5, **how)
