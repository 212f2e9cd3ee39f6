"""A file of a newer release is refused in a sentence, and a field that is new breaks no file of before it."""

import dataclasses
import json
import math

import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl import _formats
from tfdpfl.accounting import PrivacyLedger, Run, ledger
from tfdpfl.clips import AdaptiveClip
from tfdpfl.errors import PrivacyError
from tfdpfl.federated.clip import NoisedMetrics
from tfdpfl.federated.guarantees import ClientLevel, CorrelatedLevel, TreeLevel
from tfdpfl.federated.privacy import Participation
from tfdpfl.flower.journal import Journal
from tfdpfl.noise import Tree
from tfdpfl.optimizers import _step_table
from tfdpfl.reports import read

REFUSED = r"version 2, written by tfdpfl 9\.1\.0, but tfdpfl .* upgrade with pip install --upgrade tfdpfl"
NEWER = {"version": 2, "written_by": "tfdpfl 9.1.0"}
NEWER_JOURNAL, REFUSED_JOURNAL = {**NEWER, "version": 3}, REFUSED.replace("version 2", "version 3", 1)
HOW = dict(num_examples=60, batch_size=20)


def saved_by_a_newer_release(saved):
    return {**saved, **NEWER}


def test_a_ledger_of_a_newer_version_is_refused(tmp_path):
    saved = saved_by_a_newer_release(PrivacyLedger().record(1.0, 2, **HOW).to_dict())
    with pytest.raises(PrivacyError, match=f"^The saved ledger is of format {REFUSED}"):
        PrivacyLedger.from_dict(saved)
    file = tmp_path / "ledger.json"
    file.write_text(json.dumps(saved))
    with pytest.raises(PrivacyError, match=rf"ledger\.json: The saved ledger is of format {REFUSED}"):
        read([file])
    with pytest.raises(PrivacyError, match="of format version 3, but tfdpfl"):
        PrivacyLedger.from_dict({"version": 3, "rows": []})
    for version in (0, True, "1", None):
        with pytest.raises(ValueError, match="which is no version"):
            PrivacyLedger.from_dict({"version": version, "rows": []})


def test_a_journal_of_a_newer_version_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps({**NEWER_JOURNAL, "header": {}}) + "\n")
    with pytest.raises(PrivacyError, match=rf"ledger_path='.*ledger\.jsonl' is of format {REFUSED_JOURNAL}"):
        Journal(path, {})
    path.write_text(
        json.dumps({"header": {}}) + "\n" + json.dumps(NEWER_JOURNAL) + "\n" + json.dumps({"new": 1}) + "\n"
    )
    with pytest.raises(PrivacyError, match=REFUSED_JOURNAL):  # a newer release went on in a file of this one
        Journal(path, {})


def test_a_config_of_a_newer_version_is_refused():
    config = tfdpfl.DPSGD(1.0, 1.0).get_config()
    with pytest.raises(PrivacyError, match=f"The config of DPSGD is of format {REFUSED}"):
        tfdpfl.DPSGD.from_config({**config, "saved_by": NEWER, "new_argument": 1})


def trained():
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(tfdpfl.DPSGD(1.0, 1.0, learning_rate=0.1), loss="mse")
    model.fit(np.ones((4, 2), "float32"), np.ones(4, "float32"), batch_size=4, verbose=0)
    return model.optimizer


def stored(optimizer):
    variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return {str(i): np.array(variable) for i, variable in enumerate(variables)}


def place_of_the_table(store):
    return next(name for name, value in store.items() if value.shape == (_step_table.ROWS, len(_step_table.COLUMNS)))


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_table_of_steps_of_a_newer_version_is_refused():
    optimizer = trained()
    store = stored(optimizer)
    place = place_of_the_table(store)
    newer = np.pad(store[place], ((0, 0), (0, 2)))
    newer[-1, :4] = [newer[-1, 0] - 1, 9, 1, 0]
    for table in (newer, newer[:, : len(_step_table.COLUMNS)]):
        with pytest.raises(PrivacyError, match=f"saved table of steps is of format {REFUSED}"):
            tfdpfl.DPSGD(1.0, 1.0).load_own_variables({**store, place: table})
    optimizer._dp_ledger.assign(newer[:, : len(_step_table.COLUMNS)])  # as a checkpoint of TensorFlow does
    with pytest.raises(PrivacyError, match=REFUSED):
        optimizer.ledger  # noqa: B018
    strange = store[place].copy()
    strange[0, _step_table.SAMPLING] = 8 * _step_table.DISCRETE
    with pytest.raises(PrivacyError, match=r"with the sampling of number \d+, .* upgrade with pip"):
        tfdpfl.DPSGD(1.0, 1.0).load_own_variables({**store, place: strange})


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_table_that_lacks_a_new_column_is_read_with_zeros(monkeypatch):
    store = stored(trained())
    place = place_of_the_table(store)
    monkeypatch.setattr(_step_table, "COLUMNS", (*_step_table.COLUMNS, "new"))
    wider = _step_table.with_all_columns(store[place])
    assert wider.shape == (_step_table.ROWS, 10) and wider[:, -1].sum() == 0
    np.testing.assert_array_equal(wider[:, :-1], store[place])
    other = np.full([_step_table.ROWS, 5], -np.inf)  # of another optimizer
    assert _step_table.with_all_columns(other) is other


def test_a_table_keeps_its_version_until_it_is_full():
    table, counter = tf.Variable(_step_table.empty_table()), _step_table.Counter()
    row = np.zeros(len(_step_table.COLUMNS))
    row[[_step_table.ORIGIN, _step_table.MULTIPLIER, _step_table.STEPS]] = 7.0, 1.0, 2.0
    counter.merge(row[None], table)
    assert len(_step_table._marks(table.numpy())) == 1
    counter.merge(np.stack([row * [1, 1, 1, 1, 1, 1, 1 + i, 1, 1] for i in range(_step_table.ROWS)]), table)
    assert len(_step_table._marks(table.numpy())) == 0 and (table.numpy()[:, _step_table.STEPS] > 0).all()


# -- fields that are new -------------------------------------------------------------------------------------


def with_a_field(made, **new):
    """An object like this one, of a release in which its class has a field more."""
    cls = dataclasses.make_dataclass(
        type(made).__name__,
        [("new", int, dataclasses.field(default=0))],
        bases=(type(made),),
        frozen=True,
        kw_only=True,
    )
    return cls(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)}, **new)


SETTINGS = [
    ClientLevel(noise_multiplier=1.5),
    TreeLevel(noise_multiplier=1.5, restart_every=3),
    CorrelatedLevel(noise=Tree(), noise_multiplier=1.0),
    Participation(sampling="poisson", population=8, clients_per_round=2.5),
    AdaptiveClip(initial=0.5),
    NoisedMetrics(noise_multiplier=3.0, bound={"loss": 6.0}),
]


@pytest.mark.parametrize("made", SETTINGS, ids=[type(made).__name__ for made in SETTINGS])
def test_settings_agree_with_what_was_saved_of_them_in_either_way(made):
    saved = json.loads(json.dumps(_formats.describe(made)))
    for of_a_file in (saved, repr(made)):
        assert _formats.agrees(of_a_file, made)
        assert _formats.agrees(of_a_file, with_a_field(made))
        assert not _formats.agrees(of_a_file, with_a_field(made, new=1))
        for name in ("noise_multiplier", "population", "target_quantile"):
            if hasattr(made, name):
                other = dataclasses.replace(made, **{name: getattr(made, name) / 2 if name != "population" else 9})
                assert not _formats.agrees(of_a_file, other)
    newer = json.loads(json.dumps(_formats.describe(with_a_field(made, new=1))))
    assert not _formats.agrees(newer, made)


@pytest.mark.parametrize("value", [None, 0.5, math.inf, "poisson", 3, {"a": 1, "b": None}, [1.0, 2.0], (1, 2)])
def test_plain_values_agree_with_themselves_alone(value):
    saved = json.loads(json.dumps(_formats.describe(value)))
    assert _formats.agrees(saved, value) and _formats.agrees(repr(value), value)
    for other in (
        0.25,
        -math.inf,
        "shuffle",
        {"a": 2},
        {"a": 1, "c": 0},
        [1.0],
        [2.0, 1.0],
        ClientLevel(noise_multiplier=1.0),
    ):
        assert not _formats.agrees(saved, other) and not _formats.agrees(repr(value), other)


def test_a_journal_goes_on_where_an_option_is_new_and_at_its_default(tmp_path):
    path, header = tmp_path / "ledger.jsonl", {"privacy": [SETTINGS[0]], "clip": 0.5}
    Journal(path, header).close()
    Journal(path, {**header, "privacy": [with_a_field(SETTINGS[0])], "min_replies": None}).close()
    with pytest.raises(PrivacyError, match="another min_replies, None, not 2"):
        Journal(path, {**header, "min_replies": 2})
    path.write_text(json.dumps({"header": {"evaluations": None}}) + "\n")  # as exact evaluations were saved
    with pytest.raises(PrivacyError, match="another evaluations, unprotected, not None"):
        Journal(path, {"evaluations": None})
    Journal(path, {"evaluations": "unprotected"}).close()
    path.write_text(json.dumps({"header": {"evaluations": "None"}}) + "\n")
    with pytest.raises(PrivacyError, match="another evaluations, None, not unprotected"):
        Journal(path, {"evaluations": "unprotected"})
    Journal(path, {"evaluations": None}).close()


def test_a_journal_compares_its_settings(tmp_path):
    path, header = tmp_path / "ledger.jsonl", {"privacy": [SETTINGS[0]], "clip": 0.5}
    Journal(path, header).close()
    with pytest.raises(PrivacyError, match=r"another clip, 0\.5, not None"):
        Journal(path, {"privacy": header["privacy"]})


def test_every_field_of_a_run_is_in_a_version_of_the_saved_ledger(monkeypatch):
    newest = ledger._RUN_FIELDS[max(ledger._RUN_FIELDS)]
    assert newest == {ledger.SAVED_AS.get(f.name, f.name) for f in dataclasses.fields(Run)}, (
        "add a version to _RUN_FIELDS, with golden files"
    )
    run = Run(noise_multiplier=1.0, num_steps=2, **HOW)
    assert "new" not in ledger._saved_run(with_a_field(run))
    assert ledger._saved_run(with_a_field(run, new=1))["new"] == 1
    with pytest.raises(AssertionError, match=r"\['new'\]: add one to _RUN_FIELDS"):
        ledger._version_of([{"new": 1}])
    monkeypatch.setitem(ledger._RUN_FIELDS, 2, newest | {"new"})
    assert ledger._version_of([{"new": 1}]) == 2 and ledger._version_of([{"unit": "user"}]) == 1
