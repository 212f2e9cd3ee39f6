"""What tests of processes share: TFF's runtime on this machine."""

import pytest


@pytest.fixture(scope="module")
def runtime():
    from tfdpfl.federated import local_runtime

    with local_runtime():
        yield
