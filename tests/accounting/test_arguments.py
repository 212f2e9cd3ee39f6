"""Tests of the arguments of a run, which stand once and are shown by every function that accepts them."""

import inspect
import typing
import warnings

import pytest

from tfdpfl.accounting import (
    PrivacyLedger,
    Run,
    arguments,
    compute_batch_size,
    compute_epsilon,
    compute_noise_multiplier,
    compute_num_steps,
    privacy_report,
    privacy_statement,
)

RUN = (
    "num_examples batch_size noise_multiplier delta num_epochs num_steps sampling num_microbatches accountant "
    "adjacency max_examples_per_user truncated_batch_size unit secure_noise"
).split()
SOUGHT = {
    compute_noise_multiplier: {"noise_multiplier"},
    compute_num_steps: {"num_epochs", "num_steps"},
    compute_batch_size: {"batch_size", "num_microbatches"},
}
FUNCTIONS = [compute_epsilon, privacy_report, privacy_statement, *SOUGHT]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_signature_shows_every_argument_with_its_default_and_type(function):
    shown = inspect.signature(function).parameters
    assert set(shown) == set(RUN) - SOUGHT.get(function, set()) | ({"target_epsilon"} if function in SOUGHT else set())
    assert {p.kind for p in shown.values()} == {inspect.Parameter.KEYWORD_ONLY}
    of_run = inspect.signature(Run).parameters
    for name, parameter in shown.items():
        if name in of_run and name not in ("num_examples", "batch_size"):
            assert (parameter.default, parameter.annotation) == (of_run[name].default, of_run[name].annotation)
    assert typing.get_type_hints(function)["num_examples"] is int


def test_the_shared_arguments_have_the_types_of_the_run():
    hints, of_run = typing.get_type_hints(arguments.RunArguments), typing.get_type_hints(Run)
    assert {name: of_run[name] for name in hints} == hints


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrong", ["clip", "discrete", "starts_mid_epoch", "uneven_batches"])
def test_what_no_signature_shows_is_refused_by_name(function, wrong):
    given = {"num_examples": 100, "batch_size": 10, "noise_multiplier": 1.0, "delta": 1e-3, "target_epsilon": 1.0}
    given = {name: value for name, value in given.items() if name in inspect.signature(function).parameters}
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\).*'{wrong}'"):
        function(**given, **{wrong: 1})
    del given["delta"]
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\).*'delta'"):
        function(**given)


def test_an_argument_that_a_search_finds_is_refused():
    for function, names in SOUGHT.items():
        given = dict.fromkeys(inspect.signature(function).parameters, 1)
        for name in names:
            with pytest.raises(TypeError, match=name):
                function(**given, **{name: 1})


def test_secure_noise_is_priced_as_discrete_noise():
    given = {"num_examples": 100, "batch_size": 10, "noise_multiplier": 2.0, "num_steps": 10, "delta": 1e-3}
    assert compute_epsilon(**given, secure_noise=True) > compute_epsilon(**given)


def test_a_ledger_accepts_the_same_arguments():
    shown = inspect.signature(PrivacyLedger.record).parameters
    assert list(shown)[:3] == ["self", "noise_multiplier", "num_steps"]
    assert set(arguments.LedgerArguments.__annotations__) <= set(shown)
    with pytest.raises(TypeError, match=r"record\(\).*'num_steps'"):
        PrivacyLedger().record(1.0, 3, num_examples=10, batch_size=2, num_steps=4)


def test_a_ledger_accepts_the_names_that_arguments_had_before():
    data, passes = {"num_examples": 100, "batch_size": 10}, {"sampling": "shuffle", "new_pass": True}
    now = PrivacyLedger().record(2.0, 3, secure_noise=True, **data).record(1.0, num_epochs=2, **passes, **data)
    with pytest.warns(DeprecationWarning, match="steps= has a new name: write num_steps="):
        before = PrivacyLedger().record(2.0, steps=3, discrete=True, **data).record(1.0, epochs=2, **passes, **data)
    assert before == now and PrivacyLedger.from_dict(now.to_dict()) == now
    assert PrivacyLedger().count("a", 1.0, steps=3, **data) == PrivacyLedger().count("a", 1.0, num_steps=3, **data)
    assert "steps" not in inspect.signature(PrivacyLedger.record).parameters
    with pytest.raises(TypeError, match=r"record\(\).*'steps'"):
        PrivacyLedger().record(1.0, steps=3, num_steps=3, **data)


def test_steps_of_which_only_the_noise_is_known_are_priced_as_if_every_example_were_in_each():
    counted = PrivacyLedger().count("a", 2.0, 3)
    every = compute_epsilon(
        num_examples=1,
        batch_size=1,
        noise_multiplier=2.0,
        num_steps=3,
        sampling="none",
        adjacency="zero_out",
        delta=1e-5,
    )
    assert counted.epsilon(1e-5) == every and counted.unknown_steps == 3 and counted.adjacency == "zero_out"


def test_a_warning_names_the_line_of_the_caller():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compute_epsilon(num_examples=10, batch_size=10, noise_multiplier=5.0, num_steps=1, delta=0.2)
    assert [w.filename for w in caught] == [__file__]
