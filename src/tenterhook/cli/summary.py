"""Print the verdict on a run again."""

import argparse
import sys

from tenterhook.errors import TenterhookError
from tenterhook.say import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tenterhook summary`."""
    parser.add_argument("run", nargs="?", default=".tenterhook/latest", help="its folder (.tenterhook/latest)")
    parser.add_argument("--all", action="store_true", help="each finding by itself, and each rule with its state")
    parser.add_argument("--fail-on", choices=("note", "warn", "error"), help="exit with 3 if there is something of it")


def run(options: argparse.Namespace) -> int:
    """Print it; 2 where there is no such run."""
    from tenterhook.cli.run import say_verdict
    from tenterhook.report.flow import flow
    from tenterhook.store import open_run

    try:
        code = say_verdict(options.run, fail_on=options.fail_on, everything=options.all, stream=sys.stdout)
        for line in flow(open_run(options.run)):
            say(line, sys.stdout)
        return code
    except (TenterhookError, ImportError) as error:
        say(f"tenterhook summary: {error}")
        return 2
