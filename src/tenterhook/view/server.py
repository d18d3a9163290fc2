"""The page, live: a small server for one folder of runs. Every answer is one of `answers.py`."""

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from tenterhook.errors import TenterhookError
from tenterhook.store.run import Run, open_run
from tenterhook.view.answers import Answers, NoAnswer
from tenterhook.view.guard import Guard
from tenterhook.view.page import page, policy

_OPEN_AT_ONCE = 6  # runs and ranks whose levels are kept
_LOOK_EVERY = 0.5  # seconds
_JSON = "application/json"


class Runs:
    """The runs that may be looked at: the one that was asked for, and those in the same folder."""

    def __init__(self, run: Run) -> None:
        self.first = run.folder.resolve()
        self._open: OrderedDict[tuple[str, int], tuple[Answers, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Their names, newest first."""
        beside = {file.parent.name for file in self.first.parent.glob("*/run.json") if not file.parent.is_symlink()}
        return sorted({*beside, self.first.name}, reverse=True)

    def folder(self, name: str) -> Path:
        """The folder of a run by its name; only a name that is in the list is one."""
        if name and name not in self.names():
            raise NoAnswer(f"there is no run {name!r} beside {self.first.name}")
        return self.first.parent / name if name else self.first

    def answer(self, run: str, rank: int, name: str, window: dict[str, str]) -> bytes:
        """An answer about one of them."""
        folder = self.folder(run)
        with self._lock:
            key = (folder.name, rank)
            if key not in self._open:
                self._open[key] = Answers(open_run(folder), rank), threading.Lock()
            self._open.move_to_end(key)
            while len(self._open) > _OPEN_AT_ONCE:
                self._open.popitem(last=False)
            answers, lock = self._open[key]
        with lock:
            return answers.answer(name, window)

    def revision(self, run: str) -> int:
        """Another number whenever something was written."""
        files = [*self.folder(run).glob("rank-*/*"), *self.folder(run).glob("rank-*/snapshots/*.json")]
        found = 0
        for file in files:
            try:
                found += file.stat().st_size + file.stat().st_mtime_ns % 1_000_003
            except OSError:
                continue
        return found


def app_for(run: Run, token: str, hosts: frozenset[str]) -> Starlette:
    """The application: the page, its answers, and word of what is new."""
    runs, html = Runs(run), page()
    headers = {"content-security-policy": policy(html, "'self'")}

    async def show_page(_: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    async def show_runs(_: Request) -> Response:
        names = await run_in_threadpool(runs.names)
        return Response(json.dumps({"first": runs.first.name, "names": names}), media_type=_JSON)

    async def show_answer(request: Request) -> Response:
        query = request.query_params
        try:
            rank = query.get("rank", "0")
            if not (rank.isascii() and rank.isdecimal() and len(rank) < 8):
                raise NoAnswer(f"a rank is a number, and not {rank!r}")
            name, window = request.path_params["name"], dict(query)
            data = await run_in_threadpool(runs.answer, query.get("run", ""), int(rank), name, window)
        except NoAnswer as error:
            return _error(404, str(error))
        except TenterhookError as error:
            return _error(422, str(error))
        except Exception as error:  # a file that somebody has damaged or made up: the page says so, and goes on
            return _error(422, f"the run cannot be read: {type(error).__name__}: {error}")
        return Response(
            data, media_type="application/octet-stream" if name.startswith(("matrix/", "picture/")) else _JSON
        )

    async def tell(request: Request) -> Response:
        run_name = request.query_params.get("run", "")
        try:
            runs.folder(run_name)
        except NoAnswer as error:
            return _error(404, str(error))
        return StreamingResponse(_changes(runs, run_name, request), media_type="text/event-stream")

    routes = [
        Route("/", show_page),
        Route("/api/runs", show_runs),
        Route("/api/events", tell),
        Route("/api/answer/{name:path}", show_answer),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token, hosts=hosts)])


def _error(status: int, text: str) -> Response:
    return Response(json.dumps({"error": text}), status, media_type=_JSON)


async def _changes(runs: Runs, run: str, request: Request) -> AsyncIterator[str]:
    """A line whenever something was written, and a comment now and then, by which a closed page is noticed."""
    known: Any = None
    quiet = 0
    is_over = getattr(request.app.state, "is_over", lambda: False)
    while not is_over() and not await request.is_disconnected():
        revision = await run_in_threadpool(runs.revision, run)
        quiet += 1
        if revision != known:
            yield f"data: {revision}\n\n"
            known, quiet = revision, 0
        elif quiet * _LOOK_EVERY >= 15:
            yield ": still here\n\n"
            quiet = 0
        await asyncio.sleep(_LOOK_EVERY)
