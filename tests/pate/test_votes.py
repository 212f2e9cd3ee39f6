"""Votes are counted as a loop would count them, and malformed ones are refused."""

import numpy as np
import pytest
from pate_cases import random_votes

from tfdpfl.pate import GNMax, as_counts, rdp_data_dependent


def test_a_class_that_no_one_votes_for_is_a_column_of_zeros():
    counts = as_counts([[0, 1], [0, 1], [0, 0]], num_classes=4)
    assert counts.tolist() == [[3, 0, 0, 0], [1, 2, 0, 0]]
    assert GNMax(0.01, seed=0).aggregate(counts).labels.tolist() == [0, 1]


@pytest.mark.parametrize(("teachers", "classes"), [(7, 10), (300, 3), (5, 100)])
def test_predictions_are_counted_as_a_loop_would(teachers, classes):
    predictions = random_votes(30, teachers, classes)
    counts = as_counts(predictions, classes)
    assert all((np.bincount(predictions[:, i], minlength=classes) == counts[i]).all() for i in range(30))


@pytest.mark.parametrize(
    ("votes", "options", "message"),
    [
        ([[3, 2], [3, 3]], {}, "row 1 sums to 6"),
        ([[3, 2], [3, 2]], {"num_teachers": 6}, "number of teachers, 6"),
        ([[3, 2]], {"num_teachers": 0}, "num_teachers must be a whole number of at least 1"),
        ([[3, 2]], {"num_teachers": 1.5}, "num_teachers must be a whole number"),
        ([[-1, 3]], {}, "not be negative, got -1"),
        ([[0.5, 3]], {}, "whole numbers"),
        ([[np.nan, 3]], {}, "NaN"),
        ([[0.0, np.nan]], {"num_classes": 2}, "NaN"),
        ([[5], [5]], {}, "at least 2 classes"),
        ([[0, 0]], {}, "at least one teacher"),
        (np.zeros((0, 5)), {"num_classes": 3}, "at least one teacher"),
        (np.zeros((0, 5)), {}, "at least one query"),
        (np.zeros((4, 0)), {"num_classes": 3}, "at least one query"),
        (np.zeros((2, 2, 2)), {}, r"shape \(2, 2, 2\)"),
        ([["a", "b"]], {}, "must be numbers"),
        ([[0, 3]], {"num_classes": 3}, "below num_classes=3, got 3"),
        ([[0, 0]], {"num_classes": 1}, "num_classes must be a whole number of at least 2"),
    ],
)
def test_malformed_votes_are_refused(votes, options, message):
    with pytest.raises(ValueError, match=message):
        GNMax(1).aggregate(votes, **options)
    with pytest.raises(ValueError, match=message):
        rdp_data_dependent(GNMax(1), votes, [2], **options)
