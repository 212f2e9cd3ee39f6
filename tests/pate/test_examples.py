"""Examples and labels in every form that Keras takes are the same rows, by NumPy."""

import numpy as np
import pytest

from tfdpfl.pate import _examples

A, B = np.arange(12.0).reshape(6, 2), np.arange(6) * 10
FORMS = {"array": lambda at: A[at], "tuple": lambda at: (A[at], B[at]), "dict": lambda at: {"a": A[at], "b": B[at]}}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_every_form_are_numpys_and_joined_again_the_whole(form):
    given = _examples.as_inputs(FORMS[form](slice(None)))
    assert _examples.size(given) == 6
    parts = [_examples.rows(given, which) for which in ([0, 1], slice(2, 5), np.arange(6) == 5)]
    for part, which in zip([*parts, _examples.joined(parts)], ([0, 1], [2, 3, 4], [5], range(6)), strict=True):
        wanted = _examples.arrays(_examples.as_inputs(FORMS[form](list(which))))
        assert all(np.array_equal(*pair) for pair in zip(_examples.arrays(part), wanted, strict=True))


def test_a_list_is_several_inputs_only_for_a_model_of_several():
    assert _examples.as_inputs([[1, 2], [3, 4]]).shape == (2, 2)
    assert [len(each) for each in _examples.as_inputs([A, B], inputs=2)] == [6, 6]
    with pytest.raises(ValueError, match=r"as many examples in each input, got \[6, 5\]"):
        _examples.as_inputs([A, B[:-1]], inputs=2)


def test_labels_become_whole_numbers_whatever_their_form():
    for y, columns in ((np.eye(3)[[2, 0, 1]], 3), ([2, 0, 1], None), (np.array([[2], [0], [1]], np.uint8), None)):
        classes, found = _examples.as_classes(y, 3)
        assert classes.tolist() == [2, 0, 1] and classes.dtype == np.int64 and found == columns
    for wrong in ([[1, 1, 0]] * 3, [0.0, 1.0, 2.0], [0, -1, 1], [0, 1], np.zeros((3, 2, 2))):
        with pytest.raises(ValueError, match="y"):
            _examples.as_classes(wrong, 3)
