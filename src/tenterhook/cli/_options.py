"""The options of `run`: on the command line, else in the environment, else in pyproject.toml, else as they are."""

import argparse
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# name: (default, metavar, help)
_SWITCHES = ("capsule", "quiet", "view")
_OPTIONS: dict[str, tuple[Any, str, str]] = {
    "every": (None, "N", "sample every N-th step (10, within the budget)"),
    "dense": ("20", "N", "sample every one of the first N steps (20)"),
    "sites": ("", "GLOBS", "only these addresses, e.g. 'encoder.**<Linear>', several with commas"),
    "what": ("", "KINDS", "of input, output, output_grad, parameter, parameter_grad, update; several with commas"),
    "budget": (None, "SHARE", "the most that recording may cost, e.g. 3%% (3%% unless --every is given)"),
    "snapshots": ("0", "N", "keep pictures of feature maps and attention maps, of N steps over the training"),
    "rules": ("", "FILE.py:CLASS", "further rules of your own, several with commas"),
    "out": (".tenterhook", "FOLDER", "where runs are written (.tenterhook)"),
    "fail-on": (None, "LEVEL", "exit with 3 if something of this level is found: note, warn or error"),
}


@dataclass(frozen=True)
class Settled:
    """The options with their values."""

    options: Any
    out: str
    rules: Any
    fail_on: str | None
    quiet: bool
    view: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser."""
    for name, (_, metavar, text) in _OPTIONS.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    saves = "save the first step that is not finite, for `tenterhook replay`; on a GPU each step is waited for"
    parser.add_argument("--capsule", action="store_true", default=None, help=saves)
    parser.add_argument("-q", "--quiet", action="store_true", default=None, help="say nothing, just record")
    parser.add_argument(
        "--view", action="store_true", default=None, help="look at it meanwhile: tenterhook view beside it"
    )


def takes_value(word: str) -> bool:
    """True if the next word belongs to this one."""
    return word.startswith("--") and word[2:] in _OPTIONS


def settled(given: argparse.Namespace) -> Settled:
    """Their values; ValueError where one makes no sense."""
    table = _from_pyproject()
    values = {name: _value(given, name, table, default) for name, (default, _, _) in _OPTIONS.items()}
    from tenterhook.record.places import KINDS
    from tenterhook.record.watch import Options

    every, budget = values["every"], values["budget"]
    options = Options(
        every=_whole("every", every) if every is not None else 10,
        dense=_whole("dense", values["dense"]),
        budget=_share(budget) if budget is not None else (0.03 if every is None else None),
        what=_listed(values["what"]) or KINDS,
        sites=_listed(values["sites"]),
        snapshots=_whole("snapshots", values["snapshots"]),
        capsule=_is_on(given, "capsule", table),
    )
    fail_on = values["fail-on"]
    if fail_on not in (None, "note", "warn", "error"):
        raise ValueError(f"--fail-on {fail_on}: it is note, warn or error")
    quiet, view = (_is_on(given, name, table) for name in ("quiet", "view"))
    return Settled(options, values["out"], _rules(_listed(values["rules"])), fail_on, quiet, view)


def _is_on(given: argparse.Namespace, name: str, table: dict[str, Any]) -> bool:
    return str(_value(given, name, table, "0")).lower() in ("1", "true", "yes")


def _value(given: argparse.Namespace, name: str, table: dict[str, Any], default: Any) -> Any:
    key = name.replace("-", "_")
    value = getattr(given, key)
    if value is None:
        value = os.environ.get(f"TENTERHOOK_{key.upper()}")
    if value is None:
        value = table.get(name, table.get(key))
    return default if value is None else value


def _from_pyproject() -> dict[str, Any]:
    """`[tool.tenterhook]` of the nearest pyproject.toml."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            try:
                table = tomllib.loads(file.read_text()).get("tool", {}).get("tenterhook", {})
            except tomllib.TOMLDecodeError as error:
                raise ValueError(f"{file} cannot be read: {error}") from error
            known = {*_OPTIONS, *(name.replace("-", "_") for name in _OPTIONS), *_SWITCHES}
            if unknown := sorted(table.keys() - known):
                what = f"[tool.tenterhook] in {file} has no option {', '.join(unknown)}"
                raise ValueError(f"{what}; there are {', '.join((*_OPTIONS, *_SWITCHES))}")
            return table
    return {}


def _whole(name: str, text: Any) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--{name} {text}: a whole number is needed") from None


def _share(text: Any) -> float | None:
    words = str(text).strip()
    try:
        value = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"--budget {text}: a share such as 3% or 0.03 is needed") from None
    return value or None


def _listed(value: Any) -> tuple[str, ...]:
    words = re.split(r",(?![^{}]*\})", value) if isinstance(value, str) else list(value)  # h.{0,3} is one
    return tuple(word.strip() for word in words if word.strip())


def _rules(specs: tuple[str, ...]) -> Any:
    if not specs:
        return None
    from tenterhook.cli.sites import LoadError, load
    from tenterhook.record.rules import all_rules

    try:
        return [*all_rules(), *(load(spec) for spec in specs)]
    except LoadError as error:
        raise ValueError(f"--rules: {error}") from error
