"""Run a training script as it is, record what happens inside its models, and say what is wrong with the numbers."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tenterhook.cli._options import add_options, settled
from tenterhook.cli._program import Program, find_program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tenterhook run`: ours before the script, the script's after it."""
    parser.usage = "tenterhook run [options] script.py [args…] | -m module [args…] | -c code [args…]"
    add_options(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    parser.add_argument("-c", dest="code", nargs=argparse.REMAINDER, help="run code, as python -c does")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")


def run(options: argparse.Namespace) -> int:
    """Run the program; what it raises passes through, and its exit code is ours."""
    try:
        program = find_program(options.script, options.module, options.code)
        if os.environ.get("TENTERHOOK") == "0":
            program.run()
            return 0
        ours = settled(options)
    except (OSError, ValueError, ImportError) as error:
        print(f"tenterhook run: {error}", file=sys.stderr)
        return 2
    return _recorded(program, ours)


def _recorded(program: Program, ours: Any) -> int:
    try:
        recording = _begin(program, ours)
    except Exception as error:  # a read-only or full disk, no pyarrow …: the training matters more
        print(f"tenterhook: nothing is recorded: {error}", file=sys.stderr, flush=True)
        program.run()
        return 0
    ended = "exit 0"
    try:
        program.run()
    except SystemExit as stop:
        ended = f"exit {stop.code if isinstance(stop.code, int) else (0 if stop.code is None else 1)}"
        raise
    except BaseException as error:
        ended = type(error).__name__
        raise
    finally:
        code = _end(recording, ended, ours)
        if code and ended == "exit 0":
            sys.exit(code)
    return 0


def _begin(program: Program, ours: Any) -> Any:
    from tenterhook.cli._folder import folder_for_run
    from tenterhook.record._watch import Recording

    folder = folder_for_run(Path(ours.out), program.name)
    recording = Recording(folder, ours.options, ours.rules, [sys.executable, *program.command])
    recording.recorder.install(discover=True)
    if recording.rank == 0 and not ours.quiet:
        every = ours.options.every
        often = "every step" if every == 1 else f"the first {ours.options.dense} steps, then every {every}th"
        said = f"tenterhook {_version()} · recording to {folder} · {often} · Ctrl-C is safe"
        print(said, file=sys.stderr, flush=True)
    return recording


def _end(recording: Any, ended: str, ours: Any) -> int:
    """Write the rest and print the verdict; the exit code that --fail-on asks for, or 0."""
    try:
        if not recording.close(ended) or recording.rank != 0:
            return 0
        return say_verdict(recording.folder, quiet=ours.quiet, fail_on=ours.fail_on)
    except Exception as error:
        print(f"tenterhook: no verdict: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 0


def say_verdict(folder: Path, *, quiet: bool, fail_on: str | None, stream: Any = None) -> int:
    """Print the verdict on a run, on stderr where nothing else is said; 3 where --fail-on says so."""
    import shutil

    from tenterhook.record._rule import SEVERITIES
    from tenterhook.record._verdict import Verdict
    from tenterhook.store import open_run

    stream = stream or sys.stderr
    verdict = Verdict.of(open_run(folder))
    if not quiet:
        width = min(110, shutil.get_terminal_size((100, 24)).columns)
        colour = stream.isatty() and "NO_COLOR" not in os.environ
        print(verdict.box(width, colour), file=stream, flush=True)
    levels: Sequence[str] = SEVERITIES
    bad = fail_on is not None and verdict.worst is not None
    return 3 if bad and levels.index(verdict.worst) >= levels.index(fail_on) else 0


def _version() -> str:
    from tenterhook import __version__

    return __version__
