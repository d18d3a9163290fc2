"""Write a run as one HTML file, which opens anywhere and needs no network."""

import argparse
import sys
from pathlib import Path

from tenterhook.errors import TenterhookError
from tenterhook.say import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tenterhook report`."""
    latest = [".tenterhook/latest"]
    parser.add_argument("run", nargs="*", default=latest, help="its folder (.tenterhook/latest), and others")
    parser.add_argument("--ranks", metavar="N,N", type=_ranks, help="only these ranks (all, of more than 8 the first)")
    parser.add_argument("-o", "--out", default="report.html", help="the file (report.html); its folder is made")


def run(options: argparse.Namespace) -> int:
    """Write it; 2 where there is no such run, or the file cannot be written."""
    from tenterhook.store import open_run
    from tenterhook.view.report import ranks_of, write_report

    try:
        runs = [open_run(run) for run in options.run]
        path = write_report(runs[0], Path(options.out), *runs[1:], ranks=options.ranks)
    except (TenterhookError, ImportError, OSError) as error:
        say(f"tenterhook report: {error}")
        return 2
    for run in runs:
        if (chosen := len(ranks_of(run, options.ranks))) < len(run.ranks):
            say(
                f"{run.folder.name}: {chosen} of its {len(run.ranks)} ranks are in it; --ranks chooses them", sys.stdout
            )
    say(f"{path} · {path.stat().st_size / 1e6:.1f} MB · open it in a browser: {path.resolve().as_uri()}", sys.stdout)
    return 0


def _ranks(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no ranks; numbers with commas between are, e.g. 0,3") from None
