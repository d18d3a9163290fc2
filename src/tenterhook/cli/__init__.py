"""The command line: one file per command, each with `add_arguments(parser)` and `run(options) -> int`."""

import argparse
from collections.abc import Sequence

from tenterhook.cli import sites

_COMMANDS = {"sites": sites}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code."""
    parser = argparse.ArgumentParser(
        prog="tenterhook",
        description="See any value or gradient inside any PyTorch model, without touching its code.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        help_line = (command.__doc__ or "").partition("\n")[0]
        sub = commands.add_parser(name, help=help_line, description=help_line)
        command.add_arguments(sub)
    options = parser.parse_args(argv)
    return _COMMANDS[options.command].run(options)
