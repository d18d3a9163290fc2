"""What every test of a recording needs."""

import gc

import pytest

from tenterhook.record.guard import Guard


@pytest.fixture(autouse=True)
def nothing_is_left_of_others():
    """An optimizer of another test that waits for the garbage collector would be watched, too."""
    gc.collect()


@pytest.fixture(autouse=True)
def errors_of_ours(monkeypatch):
    """Fails a test in which an error of ours has ended a recording; one that plants such an error clears the list."""
    found = []
    plain = Guard.fail

    def fail(guard, error):
        found.append(error)
        plain(guard, error)

    monkeypatch.setattr(Guard, "fail", fail)
    yield found
    assert not found
