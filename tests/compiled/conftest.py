"""Each test of compiled code begins with nothing compiled."""

import pytest
import torch
import torch._dynamo


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
