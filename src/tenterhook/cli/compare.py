"""Say where two recorded runs, or two files of captured values, first part."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tenterhook.errors import TenterhookError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tenterhook compare`."""
    parser.add_argument("a", metavar="A", help="the folder of a run, or a .safetensors file of captured values")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--spread", metavar="RUN", help="a run like A but for its seed: what differs by itself")
    parser.add_argument("--all", action="store_true", help="of two files: every row of the table")


def run(options: argparse.Namespace) -> int:
    """Print it; 0 where they agree, 1 where they differ, 2 where they cannot be read."""
    try:
        if Path(options.a).is_file():
            found: Any = _files(options)
            agree = found.agree
        else:
            from tenterhook.comparing.runs import compare_runs

            found = compare_runs(options.a, options.b, options.spread)
            agree = found.first is None
    except (TenterhookError, ImportError, OSError, TypeError) as error:
        print(f"tenterhook compare: {error}", file=sys.stderr)
        return 2
    print(found, flush=True)
    return 0 if agree else 1


def _files(options: argparse.Namespace) -> Any:
    from tenterhook.comparing.compare import compare
    from tenterhook.comparing.saved import values_in

    found = compare(values_in(options.a), values_in(options.b))
    if options.all:
        print(found.table(everything=True))
    return found
