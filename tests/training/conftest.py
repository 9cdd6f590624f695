"""The short training that many tests look at."""

import pytest
from training.short_fits import trained


@pytest.fixture(scope="session")
def finished(tiny_prepared, tmp_path_factory):
    """A run whose first expert is finished. Not to be changed: copy it."""
    return trained(tiny_prepared, tmp_path_factory.mktemp("finished"))
