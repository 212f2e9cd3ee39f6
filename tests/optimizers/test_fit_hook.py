"""Keras tells of each fit once, however many optimizers ask for it."""

from tfdpfl.optimizers._fit_hook import watch


def test_a_fit_is_told_of_once_and_goes_on(monkeypatch):
    told = []

    class CallbackList:
        def on_train_begin(self, logs=None):
            told.append(logs)

    monkeypatch.setattr("tfdpfl.callbacks._watch.join", lambda callbacks: told.append("joined"))
    watch(CallbackList)
    watch(CallbackList)
    CallbackList().on_train_begin({"loss": 1.0})
    assert told == ["joined", {"loss": 1.0}]
