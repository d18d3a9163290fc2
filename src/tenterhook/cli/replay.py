"""Run a step again that `tenterhook run --capsule` has saved, and say where a value that is not finite was made."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tenterhook.cli.sites import LoadError, argv, load
from tenterhook.errors import RunError, TenterhookError
from tenterhook.store import open_run

_NOT_IN_IT = "The loss and other code behind the model is not in a capsule: gradients here are those of a sum."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tenterhook replay`; what follows the factory is the script's."""
    parser.usage = "tenterhook replay CAPSULE FILE.py:FACTORY [args…]"
    parser.add_argument("capsule", metavar="CAPSULE", help="what was saved: a run, or rank-0/capsule.safetensors in it")
    parser.add_argument(
        "model", metavar="FILE.py:FACTORY", help="a function that returns the model, or a tuple or dict of several"
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our words, and those of the script: all after the factory."""
    words = list(words)
    ours = 3 if len(words) > 2 and not any(word.startswith("-") for word in words[1:3]) else len(words)
    rest = words[ours:]
    return words[:ours], rest[1:] if rest[:1] == ["--"] else rest


def run(options: argparse.Namespace) -> int:
    """Print the birth; 1 where all is finite this time, 2 with a message where it could not be run."""
    from tenterhook.birth.capsule import Capsule

    try:
        capsule = Capsule.read(_file(Path(options.capsule)))
        with argv([options.model.rpartition(":")[0], *options.program]):
            model = load(options.model)
        birth = _replayed(capsule, model)
    except (TenterhookError, LoadError, OSError, ImportError) as error:
        print(f"tenterhook replay: {error}", file=sys.stderr)
        return 2
    for line in (*_changed(capsule.versions), *(f"not in it: {one}" for one in capsule.left_out)):
        print(line)
    print(birth if birth is not None else f"All is finite here. {_NOT_IN_IT} In the run it was:\n{capsule.birth}")
    return 0 if birth is not None else 1


def _file(path: Path) -> Path:
    """The capsule that is meant: of a run, that of its first rank that has one."""
    if not path.is_dir():
        return path
    run = open_run(path)
    saved = [file for rank in run.ranks if (file := run.folder / f"rank-{rank}" / "capsule.safetensors").exists()]
    if not saved:
        what = f"no step was saved in {run.folder}"
        raise RunError(f"{what}: `tenterhook run --capsule` saves the first one that is not finite, if there is one")
    return saved[0]


def _replayed(capsule: Any, model: Any) -> Any:
    try:
        return capsule.replay(model)
    except TenterhookError:
        raise
    except Exception as error:
        raise LoadError(f"the model raised {type(error).__name__} when it was run again: {error}") from error


def _changed(then: dict[str, str]) -> list[str]:
    from tenterhook.record.surroundings import versions

    now = versions()
    return [f"saved with {name} {then.get(name)}, run with {now[name]}" for name in now if then.get(name) != now[name]]
