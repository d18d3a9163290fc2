"""Look at a run in the browser, live while it is being recorded."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenterhook.errors import TenterhookError
from tenterhook.say import say

if TYPE_CHECKING:
    from tenterhook.view.serve import Server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tenterhook view`."""
    latest = [".tenterhook/latest"]
    parser.add_argument("run", nargs="*", default=latest, help="its folder (.tenterhook/latest), and others")
    parser.add_argument("--port", type=int, default=0, help="where to listen (any free one)")
    parser.add_argument("--host", default="127.0.0.1", help="on which address (127.0.0.1: this machine only)")
    parser.add_argument("--open", action="store_true", help="open a browser, too")
    parser.add_argument("--beside", type=int, help=argparse.SUPPRESS)  # a process with which it ends


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C; 2 where there is nothing to serve."""
    from tenterhook.store import open_run
    from tenterhook.view.serve import Server

    try:
        server = Server([open_run(run) for run in options.run], options.host, options.port)
    except (TenterhookError, ImportError) as error:
        say(f"tenterhook view: {error}")
        return 2
    say_where(server, sys.stderr if options.beside else sys.stdout)
    if options.beside:
        server.end_with(options.beside)
    if options.open:
        import webbrowser

        webbrowser.open(server.address)
    server.run()
    return 0


def start_beside(folder: Path) -> None:
    """Serve a run that this process is recording, from another one: a training has no threads of ours in it."""
    words = [sys.executable, "-m", "tenterhook", "view", str(folder), "--beside", str(os.getpid())]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    subprocess.Popen(words, start_new_session=True, env={**os.environ, "TENTERHOOK": "0"}, **quiet)  # type: ignore[call-overload]


def say_where(server: "Server", stream: Any = None) -> None:
    """Print the address, and how to get there from another machine."""
    from tenterhook.view.serve import tunnel

    say(f"tenterhook view · {server.address} · Ctrl-C ends it", stream)
    if line := tunnel(server.port):
        say(f"  from your machine: {line}", stream)
    if server.host not in ("127.0.0.1", "localhost", "::1"):
        say("  whoever reaches this address and has the token can read the run", stream)
