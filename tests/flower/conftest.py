"""What tests of Flower share: its log, as caplog sees it."""

import logging

import pytest


@pytest.fixture(autouse=True)
def heard():
    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("flwr").propagate = True
