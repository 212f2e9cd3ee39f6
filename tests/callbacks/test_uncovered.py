"""What ε does not cover is named: callbacks that decide by figures which Keras measures without noise."""

import conftest as c
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.callbacks import PrivacyBudget, PrivateMetrics
from tfdpfl.callbacks._uncovered import choices_by_public_figures, uncovered_choices

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
def test_what_is_decided_by_figures_without_noise_is_named(made, fit, warned, noted):
    call = {"callbacks": callbacks.CallbackList(made()), **fit}
    assert [said[: said.index(" Keras") + 6] for said in uncovered_choices(call)] == (
        [UNCOVERED.format(warned)] if warned else []
    )
    assert list(choices_by_public_figures(call)) == ([IF_PUBLIC.format(noted)] if noted else [])


@pytest.mark.slow
def test_a_fit_warns_of_what_is_decided_without_noise_and_only_notes_what_public_figures_decide(recwarn):
    model, budget = c.compiled(tfdpfl.DPSGD(1.0, 1.0)), PrivacyBudget(delta=1e-3)
    decide = [callbacks.EarlyStopping("val_loss"), callbacks.ReduceLROnPlateau("loss")]
    model.fit(X, Y, batch_size=6, verbose=0, callbacks=[*decide, budget], **PUBLIC)
    notes, said = " ".join(budget.report().notes), " ".join(str(w.message) for w in recwarn)
    uncovered, public = UNCOVERED.format("ReduceLROnPlateau (by 'loss')"), "EarlyStopping (by 'val_loss')"
    assert uncovered in said and uncovered in notes
    assert IF_PUBLIC.format(public) in notes and public not in said


@pytest.mark.parametrize("best_only", [True, False])
def test_a_checkpoint_decides_where_it_saves_the_best_alone(best_only, tmp_path):
    saves = callbacks.ModelCheckpoint(str(tmp_path / "model.keras"), "loss", save_best_only=best_only)
    found = list(uncovered_choices({"callbacks": callbacks.CallbackList([saves])}))
    assert len(found) == best_only and all(UNCOVERED.format("ModelCheckpoint (by 'loss')") in said for said in found)
