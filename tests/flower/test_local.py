"""Noise on a client's own update: its size, its price, and what leaves when an app fails."""

import logging
import math
import pickle

import numpy as np
import pytest

pytest.importorskip("flwr")
import cloudpickle
from client_cases import PLAN, SECRET, Clients, message, plain, replace_one, shifted
from flower_fakes import FakeGrid, flat, model, reply
from flwr.app import ArrayRecord, Error, Message

from tfdpfl.flower import (
    local_dp_mod,
    nbafl_mod,
)


def raises(kind):
    def app(message, context):
        raise kind(SECRET)

    return app


def answers_an_error(message, context):
    return Message(Error(code=300, reason=SECRET), reply_to=message)


def names_its_arrays_after_a_patient(message, context):
    return reply(message, {}, {"loss": 1.0}, **{"patient 17": ArrayRecord([np.ones(3)])})


MODS = {
    "local": lambda: local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5),
    "nbafl": lambda: nbafl_mod(**PLAN),
}


def test_replacing_an_update_moves_what_is_sent_by_at_most_two_clips():
    ends = [
        flat(
            Clients(shifted(by), [local_dp_mod(l2_norm_clip=0.5, noise_multiplier=1e-12, delta=1e-5)])(
                message(), 0
            ).content["arrays"]
        )
        for by in (100.0, -100.0, np.nan, 1e-3)
    ]
    assert np.linalg.norm(ends[0] - ends[1]) == pytest.approx(1.0, rel=1e-5)
    assert np.linalg.norm(ends[2]) < 1e-9  # no number is no update
    assert np.linalg.norm(ends[3]) == pytest.approx(1e-3 * math.sqrt(10), rel=1e-4)


def test_local_noise_has_its_size_and_settings_may_come_from_the_run_config():
    mod = local_dp_mod(l2_norm_clip="the-clip", noise_multiplier="z", delta=1e-5)
    large = model(w=np.zeros((200, 100), np.float32))
    clients = Clients(shifted(0.0), [mod], {"the-clip": 0.5, "z": 3.0})
    noise = clients(message(large), 0).content["arrays"]["w"].numpy()
    assert np.std(noise) == pytest.approx(1.5, rel=0.04)
    for wrong in ({"the-clip": 0.5}, {"the-clip": 0.5, "z": -1.0}):
        with pytest.raises(ValueError, match=r"'z'|noise_multiplier must"):
            Clients(shifted(0.0), [mod], wrong)(message(), 0)
    for wrong in (dict(l2_norm_clip=0), dict(noise_multiplier=-1), dict(delta=0), dict(target_epsilon=-1)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            local_dp_mod(**{**dict(l2_norm_clip=1.0, noise_multiplier=1.0, delta=1e-5), **wrong})


def test_a_client_stops_at_its_own_budget_and_the_others_go_on():
    mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5, target_epsilon=replace_one(2.0, 3) + 1e-6)
    clients, strategy = Clients(shifted(1.0), [mod]), plain()
    strategy.start(FakeGrid(3, clients), model(), num_rounds=5)
    assert {r["steps"] for r in strategy.client_reports.values()} == {3}
    assert [r["epsilon"] for r in strategy.client_reports.values()] == [pytest.approx(replace_one(2.0, 3))] * 3
    last = clients(message(), 0)
    assert last.has_error() and "target_epsilon" in last.error.reason


@pytest.mark.parametrize("kind", MODS)
def test_whatever_goes_wrong_in_an_app_the_server_gets_a_noisy_update_and_no_word_of_it(kind, caplog):
    """Every reply, of a client that failed as of one that did not, has the same records, but for the noise."""

    def seen(app):
        got = Clients(app, [MODS[kind]()])(message(), 0)
        assert not got.has_error()
        records = {name: {**record} for name, record in got.content.items()}
        arrays = {name: (array.shape, array.dtype) for name, array in records.pop("arrays").items()}
        assert flat(got.content["arrays"]).std() > 0
        return records, arrays

    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("flwr").propagate = True
    failing = [
        raises(ValueError), raises(SystemExit), answers_an_error, shifted(np.nan), names_its_arrays_after_a_patient,
        lambda message, context: None, lambda message, context: reply(message, {"w": np.array(["HIV"])}),
    ]  # fmt: skip
    right = seen(shifted(1.0))
    for app in failing:
        assert seen(app) == right
    assert SECRET in caplog.text  # at home


def test_an_app_that_fails_is_sent_as_no_update():
    quiet = dict(l2_norm_clip=1.0, noise_multiplier=1e-9, delta=1e-5)
    start = model(b=np.full(4, 0.5, np.float32))
    got = Clients(raises(ValueError), [local_dp_mod(**quiet)])(message(start), 0)
    np.testing.assert_allclose(flat(got.content["arrays"]), flat(start), atol=1e-6)
    plan = {**PLAN, "min_dataset_size": 1e9, "calibration": "published"}  # next to no noise
    got = Clients(raises(ValueError), [nbafl_mod(**plan)])(message(start), 0)
    np.testing.assert_allclose(flat(got.content["arrays"]), flat(start), atol=1e-4)


def test_a_model_that_is_not_finite_is_refused_before_an_app_sees_it():
    for make in MODS.values():
        with pytest.raises(ValueError, match=r"'b' holds numbers that are not finite|not finite, or too large"):
            Clients(raises(AssertionError), [make()])(message(model(b=np.full(4, np.nan, np.float32))), 0)


def test_a_mod_that_is_shipped_draws_other_noise():
    mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=1.0, delta=1e-5)
    first = Clients(shifted(1.0), [mod])(message(), 0)
    copies = [pickle.loads(cloudpickle.dumps(mod)) for _ in range(2)]
    noises = [flat(Clients(shifted(1.0), [m])(message(), 0).content["arrays"]) for m in copies]
    assert np.abs(noises[0] - noises[1]).min() > 0 and np.abs(noises[0] - flat(first.content["arrays"])).min() > 0
