"""Fixtures of the tests of verbs."""

import pytest

from tests.verbs.models import Net


@pytest.fixture
def net():
    return Net().eval()
