"""Functions that Dynamo calls as they are.

Relies on: a function with `_torchdynamo_disable` is not traced; the graph breaks at its call, and it gets real values.
Where it may not break, as with fullgraph=True, the error has `_torchdynamo_disable_msg`.
"""

from collections.abc import Callable
from typing import Any


def never_trace(function: Callable[..., Any], why: str) -> None:
    """Have torch.compile call a function in place of tracing it. Needs no torch."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
