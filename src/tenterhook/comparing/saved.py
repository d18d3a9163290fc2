"""Values that were kept by address: in a session, or in a file, here or on another machine.

Two sets of them are compared address by address, in the order of the first. What was made at a place cannot be told
there from what was passed on: for that, b has to run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenterhook.addresses.grammar import parse
from tenterhook.comparing.align import Alignment
from tenterhook.comparing.apart import SAME, apart
from tenterhook.comparing.comparison import Comparison, First, Row
from tenterhook.comparing.leaves import partners, tensors_of
from tenterhook.comparing.source import Key
from tenterhook.comparing.tolerance import is_rounding
from tenterhook.errors import AddressError
from tenterhook.values.tree import describe
from tenterhook.verbs.capture_file import FILE, load_capture


def is_kept(value: Any) -> bool:
    """Whether it is values by address: a mapping, such as what `capture` gives."""
    return isinstance(value, Mapping)


def values_in(path: str | Path) -> Mapping[str, Any]:
    """What `seen.save(path)` wrote, or the tensors of another safetensors file by name. Nothing in it is executed."""
    if Path(path).suffix != ".safetensors":
        raise TypeError(f"{path} is no .safetensors file")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError('files of values need safetensors: pip install "tenterhook[safetensors]"') from None
    try:
        with safe_open(path, framework="pt") as file:
            if FILE.key in (file.metadata() or {}):
                return load_capture(path)
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise TypeError(f"{path} cannot be read: {error}") from error


def compare_kept(a: Any, b: Any) -> Comparison:
    """Two sets of values."""
    mine, theirs = _by_place(a), _by_place(b)
    rows: list[Row] = []
    first = None
    for address, value in theirs.items():
        if address not in mine:
            continue
        pairs = partners(tensors_of(mine[address]), tensors_of(value))[0]
        others = tensors_of(value)
        measured = [apart(x, others[path]) for path, (_, x) in pairs.items()]
        found = max(measured, key=lambda one: one.order, default=SAME)
        lengths = [max(tensor.shape, default=1) for tensor in others.values()]
        verdict = "equal" if found.is_equal else "within rounding"
        if not is_rounding(found, max(lengths, default=1)):
            verdict = "first" if first is None else "grown"
            first = first or First(address, address, address, found)
        rows.append(Row(address, address, "", describe(value), found, verdict, note=found.what))
    notes = ["of values alone: the first that differs; what makes it, compare(saved, model, inputs) can tell"]
    only_a = [address for address in mine if address not in theirs]
    only_b = [address for address in theirs if address not in mine]
    return Comparison(rows, first, only_a=only_a, only_b=only_b, notes=notes if first is not None else [])


def _by_place(values: Any) -> dict[str, Any]:
    """Each value by its address, those of several calls with the call."""
    found = {}
    for address in values:
        calls = values.calls(address) if hasattr(values, "calls") else [values[address]]
        for k, value in enumerate(calls):
            found[address if len(calls) == 1 else f"{address}@{k}"] = value
    return found


def keys_of(saved: Any, alignment: Alignment) -> tuple[dict[Key, Any], list[str]]:
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
