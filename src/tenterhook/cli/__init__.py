"""The command line: one file per command, each with `add_arguments(parser)` and `run(options) -> int`.

A command that takes a program with arguments of its own has a `split(words)`, too; they are `options.program`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from tenterhook import __version__
from tenterhook.cli import compare, replay, report, run, runs, sites, summary, view

_COMMANDS: dict[str, Any] = {
    "run": run,
    "summary": summary,
    "runs": runs,
    "view": view,
    "report": report,
    "replay": replay,
    "sites": sites,
    "compare": compare,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code."""
    parser = argparse.ArgumentParser(
        prog="tenterhook",
        description="See any value or gradient inside any PyTorch model, without touching its code.",
    )
    parser.add_argument("--version", action="version", version=f"tenterhook {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        help_line = (command.__doc__ or "").partition("\n")[0]
        sub = commands.add_parser(name, help=help_line, description=help_line, allow_abbrev=False)
        command.add_arguments(sub)
    words = list(sys.argv[1:] if argv is None else argv)
    asked: Any = _COMMANDS.get(words[0]) if words else None
    words, program = asked.split(words) if hasattr(asked, "split") else (words, [])
    options = parser.parse_args(words, argparse.Namespace(program=program))
    if options.command == "run":  # whatever its program raises is the program's
        return run.run(options)
    try:
        return _COMMANDS[options.command].run(options)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
