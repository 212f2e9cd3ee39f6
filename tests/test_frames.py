"""The arguments of a running `fit` are found among the callers, the innermost first, and of no other function."""

import gc
import types
import weakref

from tfdpfl import _frames


def running(names=("batch", "x")):
    return [{k: v for k, v in fit.items() if k in names} for fit in _frames.running_fits()]


def test_running_fits_are_found_from_the_innermost_out():
    def fit(x, inner):
        batch = 2 * x
        return train(batch, inner)

    def train(batch, inner):
        return inner()

    found = fit(1, lambda: fit(10, running))
    assert found == [{"x": 10, "batch": 20}, {"x": 1, "batch": 2}]
    assert running() == [] and train(3, running) == []


def test_callers_begin_with_the_caller_of_the_function_that_asks():
    def asks():
        names = []
        for frame in _frames.callers():
            names.append(frame.f_code.co_name)  # a list comprehension is a function of its own up to Python 3.11
        return names[:1]

    assert asks() == ["test_callers_begin_with_the_caller_of_the_function_that_asks"]


def test_who_looks_among_the_callers_keeps_nothing_alive():
    class Data:
        pass

    def asks():
        data = Data()
        for frame in _frames.callers():
            if frame.f_locals.get("self") is None:
                return weakref.ref(data)

    gc.disable()
    try:
        assert asks()() is None
    finally:
        gc.enable()


def test_an_optimizer_is_found_inside_its_loss_scaling_and_callbacks_inside_keras_list():
    own, made = object(), types.SimpleNamespace
    assert _frames.optimizer_of(made(optimizer=own)) is own
    assert _frames.optimizer_of(made(optimizer=made(inner_optimizer=own))) is own
    assert _frames.optimizer_of(None) is None
    for given in ([own], made(callbacks=[own])):
        assert _frames.callbacks_of({"callbacks": given}) == [own]
    assert _frames.callbacks_of({}) == _frames.callbacks_of({"callbacks": None}) == []
