"""The command line: one file per command, each with `add_arguments(parser)` and `run(options) -> int`."""

import argparse
import os
import sys
from collections.abc import Sequence

from tenterhook import __version__
from tenterhook.cli import replay, run, sites, summary

_COMMANDS = {"run": run, "summary": summary, "sites": sites, "replay": replay}


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
    words, program = (_COMMANDS[words[0]] if words[:1] in (["sites"], ["replay"]) else run).split(words)
    options = parser.parse_args(words)
    if options.command == "run":  # whatever its program raises is the program's
        return run.run(options, program)
    try:
        if options.command == "summary":
            return summary.run(options)
        return (sites if options.command == "sites" else replay).run(options, program)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
