"""Print the addresses of a model: name, class, parameters and their shapes."""

import argparse
import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tenterhook.errors import TenterhookError, close_matches

_WITH_VALUE = ("--inputs", "--match")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tenterhook sites`; what else follows the script is the script's."""
    parser.usage = "tenterhook sites [--inputs FILE.py:EXAMPLE] [--match GLOB] FILE.py:FACTORY [args…]"
    parser.add_argument(
        "model", metavar="FILE.py:FACTORY", help="a function that returns the model, or the model itself"
    )
    parser.add_argument(
        "--inputs",
        metavar="FILE.py:EXAMPLE",
        help="run the model once on what this function returns (its argument, a tuple of arguments, or a dict of "
        "keyword arguments), and list the values inside the forwards too",
    )
    parser.add_argument("--match", metavar="GLOB", default="**", help="only these, e.g. 'encoder.**<Linear>'")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our words, and those of the script: what follows its name and is none of ours, and all after `--`."""
    ours, program, has_target = list(words[:1]), list[str](), False
    rest = iter(words[1:])
    for word in rest:
        if word == "--":
            program += rest
        elif word in _WITH_VALUE:
            ours += [word, *itertools.islice(rest, 1)]
        elif not has_target or word.partition("=")[0] in _WITH_VALUE:
            ours.append(word)
            has_target = has_target or not word.startswith("-")
        else:
            program.append(word)
    return ours, program


def run(options: argparse.Namespace) -> int:
    """Print the table; 0, or 2 with a message where that cannot be done."""
    from tenterhook.verbs.sites import sites  # torch takes a second: only once the arguments are known to be right

    try:
        with argv([options.model.rpartition(":")[0], *options.program]):
            model = load(options.model)
            inputs = load(options.inputs) if options.inputs else ()
        print(_listed(sites, model, inputs if isinstance(inputs, tuple) else (inputs,), options.match), flush=True)
    except (TenterhookError, LoadError, TypeError) as error:
        print(f"tenterhook sites: {error}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def argv(words: list[str]) -> Iterator[None]:
    """What the script sees as its command line."""
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


def _listed(sites: Any, model: Any, inputs: tuple[Any, ...], match: str) -> Any:
    try:
        return sites(model, *inputs, match=match)
    except (TenterhookError, TypeError):
        raise
    except Exception as error:
        what = f"the model raised {type(error).__name__} on these inputs: {error}"
        raise LoadError(what) from error


class LoadError(Exception):
    """FILE.py:FACTORY could not be turned into an object; the message says at which step."""


def load(spec: str) -> Any:
    """The object that `FILE.py:name` means; a function (not a module) is called without arguments."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file or not name:
        raise LoadError(f"{spec!r} is not FILE.py:FACTORY, for example model.py:build")
    path = Path(file)
    if not path.is_file():
        raise LoadError(f"there is no file {file}")
    module = _import(path)
    return _made(module, name, file)


def _made(module: Any, name: str, file: str) -> Any:
    if not hasattr(module, name):
        near = close_matches(name, [n for n in vars(module) if not n.startswith("_")])
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise LoadError(f"{file} has no {name!r}{hint}")
    thing = getattr(module, name)
    if callable(thing) and not hasattr(thing, "_modules"):
        try:
            return thing()
        except (Exception, SystemExit) as error:
            raise LoadError(f"{name}() in {file} raised {type(error).__name__}: {error}") from error
    return thing


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE.py` would have it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # argparse's, where the script wants other arguments
        raise LoadError(f"{path} raised {type(error).__name__} on import: {error}") from error
    return module
