"""Fixtures of the tests of the command line."""

import pytest

from tests.cli.processes import Zygote


@pytest.fixture(scope="session")
def zygote():
    made = Zygote()
    yield made
    made.process.stdin.close()
    made.process.wait(10)
    made.process.stdout.close()
