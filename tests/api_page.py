"""docs/api.md, made from the docstrings.

    python -m tests.api_page    writes the page

Every name of `tenterhook` and of `tenterhook.changes`: its signature without types, and its docstring; of a class, its
public methods and properties too.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Never

import tenterhook
from tenterhook import changes

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
INTRODUCTION = """# API

Made from the docstrings by `python -m tests.api_page`. [Recipes](recipes.md) has examples by task,
[Addresses](addresses.md) what a selector can be, [Editing](editing.md) what a change can be.
"""
GIVEN = (
    "Captured",
    "Run",
    "Site",
    "Report",
    "Change",
    "Birth",
    "Comparison",
    "RunComparison",
)  # nobody makes them by calling the class
CALLED = {"Captured": "seen", "edit": "edits", "observe": "observed", "watch": "run"}  # in the examples
CALLED |= {"Comparison": "found", "RunComparison": "found"}


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *_room("tenterhook", tenterhook, tenterhook._HOMES)]
    parts += _room("tenterhook.changes", changes, sorted(changes.__all__))
    return "\n".join(parts)


def _room(title: str, module: Any, names: Any) -> Iterator[str]:
    names = list(names)
    yield f"## {title}\n"
    yield " · ".join(f"[{name}](#{name.lower()})" for name in names) + "\n"
    for name in names:
        thing = getattr(module, name)
        yield f"### {name}\n"
        yield from _entry(name, thing)
        if isinstance(thing, type):
            yield from _members(name, thing)


def _entry(name: str, thing: Any) -> Iterator[str]:
    if not (isinstance(thing, type) and (issubclass(thing, Exception) or name in GIVEN)):
        yield f"```py\n{name}{signature(thing)}\n```\n"
    yield f"{_document(thing)}\n"


def _members(name: str, kind: type) -> Iterator[str]:
    """What a class of ours has, without what it only overrides of another library's class."""
    for member, thing in vars(kind).items():
        made = thing.__func__ if isinstance(thing, (staticmethod, classmethod)) else thing
        if member.startswith("_") or not inspect.getdoc(made) or not (callable(made) or isinstance(made, property)):
            continue
        call = "" if isinstance(made, property) else signature(made, skip=made is thing)
        owner = name if isinstance(thing, staticmethod) else CALLED.get(name, name.lower())
        yield f"**`{owner}.{member}{call}`**\n\n{_document(made)}\n"


def signature(thing: Any, *, skip: bool = False) -> str:
    """The parameters and their defaults, without types. `skip`: the first, which is `self`."""
    whole = inspect.signature(thing)
    listed = [p for p in whole.parameters.values() if p.annotation is not Never and p.name[0] != "_"][skip:]
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in listed]
    text = str(whole.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r"=<[^>]*>", "=...", text)  # an object without a text of its own, such as a mark for "not given"


def _document(thing: Any) -> str:
    """The docstring; its examples, which are indented, are code in Markdown as they stand."""
    text = inspect.getdoc(thing) or ""
    return "\n".join(line.rstrip() for line in text.splitlines())


if __name__ == "__main__":
    PAGE.write_text(page())
