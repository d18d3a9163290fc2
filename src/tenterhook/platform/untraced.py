"""Functions that Dynamo calls as they are.

Relies on: a function with `_torchdynamo_disable` is not traced; the graph breaks at its call, and it gets real values.
"""

from collections.abc import Callable
from typing import Any


def never_trace(function: Callable[..., Any]) -> None:
    """Have torch.compile call a function in place of tracing it. Needs no torch."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
