import pytest

from tenterhook.view.page import FILE


@pytest.fixture(scope="session")
def built_page():
    if not FILE.exists():
        pytest.skip("the page is not built: `make web` builds it")
    return FILE
