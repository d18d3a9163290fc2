"""Look at a run in the browser, live while it is being recorded."""

import argparse
import sys

from tenterhook.errors import TenterhookError
from tenterhook.say import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tenterhook view`."""
    parser.add_argument("run", nargs="?", default=".tenterhook/latest", help="its folder (.tenterhook/latest)")
    parser.add_argument("--port", type=int, default=0, help="where to listen (any free one)")
    parser.add_argument("--host", default="127.0.0.1", help="on which address (127.0.0.1: this machine only)")
    parser.add_argument("--open", action="store_true", help="open a browser, too")


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C; 2 where there is nothing to serve."""
    from tenterhook.store import open_run
    from tenterhook.view.serve import Server

    try:
        server = Server(open_run(options.run), options.host, options.port)
    except (TenterhookError, ImportError) as error:
        say(f"tenterhook view: {error}")
        return 2
    say_where(server, sys.stdout)
    if options.open:
        import webbrowser

        webbrowser.open(server.address)
    server.run()
    return 0


def say_where(server: object, stream: object = None) -> None:
    """Print the address, and how to get there from another machine."""
    from tenterhook.view.serve import Server, tunnel

    assert isinstance(server, Server)
    say(f"tenterhook view · {server.address} · Ctrl-C ends it", stream)
    if line := tunnel(server.port):
        say(f"  from your machine: {line}", stream)
    if server.host not in ("127.0.0.1", "localhost", "::1"):
        say("  whoever reaches this address and has the token can read the run", stream)
