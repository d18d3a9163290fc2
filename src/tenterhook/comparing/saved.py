"""Values that were kept by address, as places to compare at."""

from collections.abc import Mapping
from typing import Any

from tenterhook.addresses.grammar import parse
from tenterhook.comparing.align import Alignment
from tenterhook.comparing.source import Key
from tenterhook.errors import AddressError


def keys_of(saved: Mapping[str, Any], alignment: Alignment) -> tuple[dict[Key, Any], list[str]]:
    """The whole outputs and inputs among some values, by place; and notes on those that are left out."""
    names = {b: a for a, b in alignment.pairs.items()}
    kept: dict[Key, Any] = {}
    notes = []
    for text in saved:
        try:
            address = parse(text)
        except AddressError:
            notes.append(f"{text}: no address")
            continue
        if address.grad or address.leaf or address.inner:
            notes.append(f"{text}: only whole inputs and outputs are compared with a model")
        elif address.name not in names:
            notes.append(f"{text}: b has no such module")
        else:
            for call, value in _calls(saved, text, address.call):
                kept[Key(names[address.name], address.role, call)] = value
    return kept, notes


def _calls(saved: Any, text: str, call: Any) -> list[tuple[int, Any]]:
    """The values at an address, each with its call."""
    if isinstance(call, int):
        return [(call, saved[text])]
    values = saved.calls(text) if hasattr(saved, "calls") else [saved[text]]
    return list(enumerate(values))
