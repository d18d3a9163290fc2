"""Run a training script as it is, record what happens inside its models, and say what is wrong with the numbers."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tenterhook.cli._options import add_options, settled, takes_value
from tenterhook.cli._program import Program, find_program, wait_for_threads
from tenterhook.cli._terminated import at_termination
from tenterhook.say import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tenterhook run`: ours before the script, the script's after it."""
    parser.usage = "tenterhook run [options] script.py [args…] | -m module [args…] | -c code [args…]"
    add_options(parser)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our words, and those of the program: from the script, `-m` or `-c` on. argparse would mix them up."""
    words = list(words)
    if words[:1] != ["run"]:
        return words, []
    i = 1
    while i < len(words) and words[i].startswith("-") and not words[i].startswith(("-m", "-c")):
        if words[i] == "--":
            return words[:i], words[i + 1 :]
        i += 2 if takes_value(words[i]) else 1
    return words[:i], words[i:]


def run(options: argparse.Namespace) -> int:
    """Run the program; what it raises passes through, and its exit code is ours."""
    try:
        program = find_program(options.program)
        ours = None if os.environ.get("TENTERHOOK") == "0" else settled(options)
    except (OSError, ValueError, ImportError) as error:
        say(f"tenterhook run: {error}")
        return 2
    if ours is None:
        program.run()
        return 0
    return _recorded(program, ours)


def _recorded(program: Program, ours: Any) -> int:
    try:
        recording = _begin(program, ours)
    except Exception as error:  # a read-only or full disk, no pyarrow …: the training matters more
        say(f"tenterhook: nothing is recorded: {error}")
        program.run()
        return 0
    ended = "exit 0"
    try:
        with at_termination(lambda: _end(recording, "SIGTERM", ours)):
            program.run()
    except SystemExit as stop:
        ended = f"exit {0 if stop.code is None else stop.code}"
        raise
    except BaseException as error:
        ended = type(error).__name__
        raise
    finally:
        if recording.is_mine():
            wait_for_threads()
            code = _end(recording, ended, ours)
            if code and ended == "exit 0":
                sys.exit(code)
    return 0


def _begin(program: Program, ours: Any) -> Any:
    from tenterhook.cli._folder import folder_for_run
    from tenterhook.record.watch import Recording

    folder = folder_for_run(Path(ours.out), program.name)
    recording = Recording(folder, ours.options, ours.rules, [sys.executable, *program.command])
    recording.recorder.install(discover=True)
    if recording.rank == 0 and not ours.quiet:
        every = ours.options.every
        often = "every step" if every == 1 else f"the first {ours.options.dense} steps, then one in {every}"
        said = f"tenterhook {_version()} · recording to {folder} · {often} · Ctrl-C is safe"
        say(said)
    if recording.rank == 0 and ours.view:
        from tenterhook.cli.view import start_beside

        start_beside(recording.folder)
    return recording


def _end(recording: Any, ended: str, ours: Any) -> int:
    """Write the rest and print the verdict; the exit code that --fail-on asks for, or 0."""
    from tenterhook.cli._folder import tidy, wait_for_ranks

    try:
        if not recording.close(ended) or recording.rank != 0:
            return 0
        tidy(recording.folder.parent)
        if ended == "exit 0":
            wait_for_ranks(recording.folder)
        return say_verdict(recording.folder, recording.shown, quiet=ours.quiet, fail_on=ours.fail_on)
    except Exception as error:
        say(f"tenterhook: no verdict: {type(error).__name__}: {error}")
        return 0


def say_verdict(
    folder: Path,
    shown: Path | None = None,
    *,
    quiet: bool = False,
    fail_on: str | None,
    everything: bool = False,
    stream: Any = None,
) -> int:
    """Print the verdict on a run, on stderr where nothing else is said; 3 where --fail-on says so."""
    import shutil

    from tenterhook.report.verdict import Verdict
    from tenterhook.store import open_run
    from tenterhook.store.schemas import SEVERITIES

    stream = stream or sys.stderr
    verdict = Verdict.of(open_run(folder), shown)
    if not quiet:
        width = min(110, shutil.get_terminal_size((100, 24)).columns)
        colour = stream.isatty() and "NO_COLOR" not in os.environ
        say(verdict.box(width, colour, everything), stream)
    levels: Sequence[str] = SEVERITIES
    bad = fail_on is not None and verdict.worst is not None
    return 3 if bad and levels.index(verdict.worst) >= levels.index(fail_on) else 0


def _version() -> str:
    from tenterhook import __version__

    return __version__
