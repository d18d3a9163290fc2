"""Start the server: in this process until it is interrupted, or in a thread beside a training."""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from tenterhook.errors import TenterhookError
from tenterhook.store.run import Run
from tenterhook.view.runs import named


class NoServer(TenterhookError, RuntimeError):
    """What the server needs is not installed, or its port is taken."""


class Server:
    """A server for a folder of runs, or several runs: bound when it is made, so that its address is known."""

    def __init__(
        self, run: Run | Sequence[Run], host: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> None:
        try:
            import uvicorn

            from tenterhook.view.guard import names_of
            from tenterhook.view.server import app_for
        except ImportError as error:
            what = f"looking at runs in a browser needs Starlette and uvicorn ({error})"
            raise NoServer(f'{what}; pip install "tenterhook[view]"') from error
        self.token = token or secrets.token_urlsafe(18)
        self.host = host
        self._runs = [run] if isinstance(run, Run) else list(run)
        app = app_for(self._runs, self.token, names_of(host))
        self._socket = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        quiet = {"log_config": None, "log_level": "critical", "timeout_graceful_shutdown": 2, "lifespan": "off"}
        self._server: Any = uvicorn.Server(uvicorn.Config(app, server_header=False, **quiet))  # type: ignore[arg-type]
        app.state.is_over = lambda: self._server.should_exit  # for pages that wait for news

    @property
    def address(self) -> str:
        """What to open in a browser."""
        name = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        beside = [f"#with={quote(name)}" for name in named(self._runs)][1:2]
        return f"http://{f'[{name}]' if ':' in name else name}:{self.port}/?token={quote(self.token)}{''.join(beside)}"

    def run(self) -> None:
        """Serve until Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])

    def end_with(self, process: int) -> None:
        """End when this process, which has started ours, is over."""

        def look() -> None:
            while os.getppid() == process:
                time.sleep(0.5)
            self._server.should_exit = True

        threading.Thread(target=look, daemon=True).start()

    @contextlib.contextmanager
    def beside(self) -> Iterator["Server"]:
        """Serve in a thread while the block runs; signals are left to the program."""
        import asyncio

        serve = lambda: asyncio.run(self._server.serve([self._socket]))  # noqa: E731
        thread = threading.Thread(target=serve, name="tenterhook view", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.should_exit = True
            thread.join(3)


def tunnel(port: int) -> str | None:
    """The line for one's own machine, where this one is reached over ssh."""
    here = os.environ.get("SSH_CONNECTION", "").split()
    if len(here) != 4:
        return None
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or ""
    at = "" if here[3] == "22" else f" -p {here[3]}"
    return f"ssh -L {port}:127.0.0.1:{port}{at} {f'{user}@' * bool(user)}{here[2]}"


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(128)  # who asks before the server is up waits
    except (OSError, OverflowError) as error:
        found.close()
        raise NoServer(f"{host}:{port} cannot be listened on ({error}); give another --port, or none") from error
    return found
