"""The page of combinations is what the optimizers accept and refuse."""

import combinations
import pytest


def test_the_page_shows_what_is_accepted_and_what_is_refused():
    assert combinations.PAGE.read_text("utf-8") == combinations.page()  # `python tests/combinations.py`


@pytest.mark.parametrize("pair", [("`BLT` noise", "users, copies"), ("`Tree` noise", "schedule of clips")])
@pytest.mark.slow
def test_pairs_that_the_page_shows_take_steps(pair):
    combinations.step(*pair)
