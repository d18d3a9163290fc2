"""A run that leaves no trace: random states and buffers are as before."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def as_before(*places: Any) -> Iterator[None]:
    """Leave random states, and the buffers of some models, as they are."""
    buffers = [
        (buffer, buffer.clone())
        for place in places
        for module in place.modules()
        for buffer in module.buffers(recurse=False)
    ]
    numpy, state = sys.modules.get("numpy"), random.getstate()
    arrays = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(arrays)
            for buffer, before in buffers:
                if buffer.shape == before.shape and not torch.equal(buffer, before):
                    buffer.copy_(before)
