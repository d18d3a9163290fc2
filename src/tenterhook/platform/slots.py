"""The attributes of an object that are in slots and not in its `__dict__`.

Relies on: `copyreg._slotnames`, which pickle and copy use to find the slots of a class and of its bases.
"""

import copyreg
from typing import Any


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that are in slots, by name; none for one that is not set."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}
