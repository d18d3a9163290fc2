"""A capture in a file: tensors as safetensors, each under its address, and the rest as JSON in the header.

What a structure was is written down, but no class is looked up by its name when it is read: that would run somebody's
code. So tuples, lists, dicts and plain values come back as they were; a namedtuple or a dataclass as a namedtuple with
its fields; other kinds of lists, tuples and dicts as plain ones. The report of what was loaded says so.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tenterhook.addresses.grammar import Address, parse
from tenterhook.addresses.graph import variable
from tenterhook.addresses.sites import Site
from tenterhook.errors import CaptureError
from tenterhook.values.tensor_file import TensorFile
from tenterhook.values.written import Reading, Writing, count, text
from tenterhook.verbs.captured import Captured
from tenterhook.verbs.keep import Entry
from tenterhook.verbs.past import Past, Variables

FILE = TensorFile("tenterhook.capture", "captured values", CaptureError, "`seen.save(...)`")
_VERSION = 1
_HINT = "; capture a part of it, or use reduce="
_KINDS = {"module", "parameter", "buffer", "inner", "node"}


def save(file: str | Path, past: Past) -> None:
    """Write what was captured."""
    writing, sites = Writing(CaptureError, _HINT), []
    for tap in past.taps:
        entries = []
        for entry in tap.kept:
            writing.begin(_namer(tap.site.address._replace(call=entry.call if tap.calls > 1 else None)))
            entries.append([entry.call, writing.of(entry.value)])
        site = {
            "address": str(tap.site),
            "kind": tap.site.kind,
            "calls": tap.calls,
            "fired": tap.fired,
            "asked": tap.asked,
        }
        sites.append({**site, "why": tap.why, "entries": entries})
    notes = [*past.notes(), *writing.notes()]
    is_of_function = any(tap.site.address.path == "" for tap in past.taps)
    content = {"version": _VERSION, "function": is_of_function, "notes": notes, "sites": sites}
    FILE.write(file, writing.tensors, content)


def load_capture(file: str | Path) -> Captured:
    """What `seen.save(file)` wrote, as it is after a `with capture(...)` block; its tensors are on the CPU.

        seen = load_capture("features.safetensors")
        seen["layer1"], list(seen), seen.report()

    The model is not needed. A file holds no code: dataclasses and the like come back as namedtuples of their fields.
    """
    content, tensors = FILE.read(file)
    try:
        if content["version"] != _VERSION:
            raise CaptureError(f"{file} is of version {content['version']}, this tenterhook reads {_VERSION}")
        past = _past(content, Reading(tensors))
    except CaptureError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise CaptureError(f"{file} cannot be read as {FILE.what}: {error!r}") from error
    return Captured(past, past.log)


def _past(content: dict[str, Any], reading: Reading) -> Past:
    """What is in a file, each thing checked for what it must be."""
    function = Variables() if content["function"] is True else None
    past = Past([], [text(note) for note in content["notes"]], lambda: function)
    for site in content["sites"]:
        kept = [Entry(count(call), reading.of(value), ()) for call, value in site["entries"]]
        calls, fired = count(site["calls"]), count(site["fired"])
        asked = [count(call) for call in site.get("asked", ())]
        past.add(_site(site, function), calls, fired, kept, asked, text(site["why"]))
    return past


def _site(described: dict[str, Any], function: Variables | None) -> Site:
    address, kind = text(described["address"]), described["kind"]
    if kind not in _KINDS:
        raise ValueError(f"there is no site of the kind {kind!r}")
    if function is not None:
        return variable(address, function)
    return Site(parse(address), _Nobody(), kind, "*" in address)


def _namer(address: Address) -> Callable[[tuple[Any, ...]], str]:
    return lambda path: str(address._replace(leaf=(*address.leaf, *path)))


class _Nobody:
    """Whose site it was: nothing that is still there."""
