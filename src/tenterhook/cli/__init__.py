"""The command line: one file per command, each with `add_arguments(parser)` and `run(options) -> int`."""

import argparse
import os
import sys
from collections.abc import Sequence

from tenterhook import __version__
from tenterhook.cli import report, run, runs, sites, summary, view

_COMMANDS = {"run": run, "summary": summary, "runs": runs, "view": view, "report": report, "sites": sites}


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
    words, program = run.split(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(words)
    if options.command == "run":  # whatever its program raises is the program's
        return run.run(options, program)
    try:
        return _COMMANDS[options.command].run(options)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
