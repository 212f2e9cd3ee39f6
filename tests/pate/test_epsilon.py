"""A data-dependent ε says so wherever it is printed."""

import json
import pickle

import numpy as np
from pate_cases import random_votes

from tfdpfl.pate import Epsilon, GNMax, as_counts, pysyft_analysis

LABEL = "not to be published"


def test_a_data_dependent_epsilon_says_so_wherever_it_is_printed():
    votes = as_counts(random_votes(20), 10)
    epsilon = GNMax(20).epsilon(votes, 1e-5)
    for text in (repr(epsilon), str(epsilon), f"{epsilon}", f"{epsilon:.2f}", f"{epsilon:>9.3g}", "%s" % epsilon):  # noqa: UP031
        assert LABEL in text
    assert LABEL in json.dumps(epsilon.to_dict()) and LABEL in repr(pickle.loads(pickle.dumps(epsilon)))
    assert LABEL in str(round(epsilon, 2)) and round(epsilon, 2) == round(float(epsilon), 2)
    assert LABEL in repr([epsilon]) and LABEL in str(pysyft_analysis(random_votes(9)))
    public = GNMax(20).epsilon(votes, 1e-5, data_dependent=False)
    assert LABEL not in f"{public} {public!r} {public:.2f}" and public.to_dict()["warning"] is None


def test_the_label_stays_where_the_votes_save_nothing():
    tied = np.tile([5, 5], (50, 1))
    epsilon, independent = (GNMax(2).epsilon(tied, 1e-5, data_dependent=d) for d in (True, False))
    assert epsilon == independent and LABEL in str(epsilon)


def test_epsilon_is_a_float():
    assert isinstance(Epsilon(1.5, 1e-5), float) and Epsilon(1.5, 1e-5) + 1 == 2.5
