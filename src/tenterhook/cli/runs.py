"""List the recorded runs, and remove old ones."""

import argparse
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tenterhook.errors import TenterhookError
from tenterhook.say import say

_LATELY = 3600.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tenterhook runs`."""
    parser.add_argument("folder", nargs="?", default=".tenterhook", help="where the runs are (.tenterhook)")
    parser.add_argument("--keep", type=_many, metavar="N", help="remove all but the newest N that have ended")
    parser.add_argument("--yes", action="store_true", help="remove without asking")


def run(options: argparse.Namespace) -> int:
    """List them; 2 where there are none."""
    from tenterhook.tables import Table

    folder = Path(options.folder)
    found = sorted((f.parent for f in folder.glob("*/run.json") if not f.parent.is_symlink()), reverse=True)
    if not found:
        say(f"tenterhook runs: there are no runs in {folder}; record one with `tenterhook run train.py`")
        return 2
    if options.keep is not None:
        return _remove(found[options.keep :], options.yes)
    rows = [_row(one) for one in found]
    header = ("run", "when", "steps", "ended", "findings", "size")
    say(str(Table(header, rows, right=("steps", "size"))), sys.stdout)
    return 0


def _row(folder: Path) -> list[str]:
    from tenterhook.report.causes import worst_of
    from tenterhook.store import open_run

    size = _megabytes(folder)
    try:
        run = open_run(folder)
        info, findings = run.rank_info(0), run.findings().to_pylist()
    except (TenterhookError, ImportError, ValueError) as error:
        return [folder.name, "", "", "", f"cannot be read: {str(error)[:40]}", size]
    found = f"{len(findings)}, worst: {worst_of(findings)}" if findings else "none"
    ended = str(info.get("ended") or ("still running" if _is_alive(folder, info, run.info) else "killed"))
    return [folder.name, _when(run.info.get("started")), f"{info.get('steps', 0):,}", ended, found, size]


def _remove(runs: list[Path], sure: bool) -> int:
    from tenterhook.store import open_run

    going = []
    for folder in runs:
        try:
            run = open_run(folder)
            alive = not run.rank_info(0).get("ended") and _is_alive(folder, run.rank_info(0), run.info)
        except TenterhookError:
            alive = False  # a damaged one may go
        if not alive:
            going.append(folder)
    if not going:
        say("nothing to remove", sys.stdout)
        return 0
    say("\n".join(f"{folder.name}  {_megabytes(folder)}" for folder in going), sys.stdout)
    if not sure and not _agreed(len(going)):
        say("nothing was removed")
        return 1
    for folder in going:
        shutil.rmtree(folder)
    latest = going[0].parent / "latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink()
    return 0


def _agreed(many: int) -> bool:
    if not sys.stdin.isatty():
        say("tenterhook runs: to remove them without being asked, add --yes")
        return False
    return input(f"remove {'this run' if many == 1 else f'these {many} runs'}? [y/N] ").strip().lower() in ("y", "yes")


def _is_alive(folder: Path, info: dict[str, Any], run: dict[str, Any]) -> bool:
    """Whether its process is there; of another machine, as far as one can tell: something was written lately."""
    pid = info.get("pid")
    if run.get("host") != socket.gethostname() or not isinstance(pid, int):
        return any(time.time() - file.stat().st_mtime < _LATELY for file in folder.glob("rank-*/*"))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _when(started: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if isinstance(started, int | float) else ""


def _megabytes(folder: Path) -> str:
    return f"{sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 1e6:,.1f} MB"


def _many(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: a whole number of runs is needed")
    return int(text)
