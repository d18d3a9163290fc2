"""Ways of measuring, as fixtures."""

import pytest

from tenterhook.stats import native


@pytest.fixture(params=["compiled", "NumPy"])
def way(request, monkeypatch):
    """Each way of measuring on a CPU; the first where there is a C compiler."""
    if request.param == "NumPy":
        monkeypatch.setattr(native, "_compiled", lambda: None)
    elif native._compiled() is None:
        pytest.skip("there is no C compiler here, so NumPy measures")


@pytest.fixture
def sheet():
    if not native.is_native():
        pytest.skip("there is no C compiler here, so no other core takes part")
    return native.Sheet(6_000)
