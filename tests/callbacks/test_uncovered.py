"""What ε does not cover is named: callbacks that decide by figures which Keras measures without noise."""

import conftest as c
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.callbacks import PrivacyBudget, PrivateMetrics

callbacks = tf.keras.callbacks
X, Y = c.examples(12)
PUBLIC = {"validation_data": (X, Y)}
UNCOVERED = "ε does not cover the decisions of {}, because Keras"
IF_PUBLIC = "ε holds if the validation data are public. They have a say in the decisions of {}."


@pytest.mark.parametrize(("made", "fit", "warned", "noted"), [
    (lambda: [callbacks.EarlyStopping("loss")], {}, "EarlyStopping (by 'loss')", None),
    (lambda: [callbacks.ReduceLROnPlateau("loss")], {}, "ReduceLROnPlateau (by 'loss')", None),
    (lambda: [callbacks.EarlyStopping("val_loss")], {"validation_split": 0.5}, "EarlyStopping (by 'val_loss')",
     None),
    (lambda: [callbacks.EarlyStopping("val_loss"), callbacks.ReduceLROnPlateau("loss")], PUBLIC,
     "ReduceLROnPlateau (by 'loss')", "EarlyStopping (by 'val_loss')"),
    (lambda: [PrivateMetrics(), callbacks.EarlyStopping("loss")], {}, None, None),
    (lambda: [PrivateMetrics(keep=["loss"]), callbacks.EarlyStopping("loss")], {}, "EarlyStopping (by 'loss')",
     None),
    (lambda: [callbacks.EarlyStopping("epsilon", mode="min")], {}, None, None),
    (lambda: [callbacks.TerminateOnNaN()], {}, "TerminateOnNaN (by 'loss')", None),
    (lambda: [PrivateMetrics(), callbacks.TerminateOnNaN()], {}, None, None),
    (lambda: [callbacks.LearningRateScheduler(lambda epoch: 0.1)], {}, None, None),
])  # fmt: skip
def test_what_is_decided_by_figures_without_noise_is_named(made, fit, warned, noted, recwarn):
    model = c.compiled(tfdpfl.DPSGD(1.0, 1.0))
    budget = PrivacyBudget(delta=1e-3)
    model.fit(X, Y, batch_size=6, verbose=0, callbacks=[*made(), budget], **fit)
    notes = " ".join(budget.report().notes)
    said = " ".join(str(w.message) for w in recwarn)
    assert ("does not cover" in said) == ("does not cover" in notes) == bool(warned)
    assert ("the validation data are public" in notes) == bool(noted)
    if warned:
        assert UNCOVERED.format(warned) in said and UNCOVERED.format(warned) in notes
    if noted:
        assert IF_PUBLIC.format(noted) in notes and noted not in said


@pytest.mark.parametrize("best_only", [True, False])
def test_a_checkpoint_decides_where_it_saves_the_best_alone(best_only, tmp_path):
    model = c.compiled(tfdpfl.DPSGD(1.0, 1.0))
    path = str(tmp_path / ("{epoch}.weights.h5" if c.keras3() else "{epoch}"))
    saves = callbacks.ModelCheckpoint(path, "loss", save_best_only=best_only, save_weights_only=True)
    budget = PrivacyBudget(delta=1e-3)
    model.fit(X, Y, batch_size=6, verbose=0, callbacks=[saves, budget])
    notes = " ".join(budget.report().notes)
    assert (UNCOVERED.format("ModelCheckpoint (by 'loss')") in notes) == best_only
