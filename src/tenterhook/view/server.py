"""The page, live: a small server for one folder of runs. Every answer is one of `answers.py`."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pyarrow.compute  # noqa: F401 (now, so that the first answer does not wait for it)
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from tenterhook.errors import TenterhookError
from tenterhook.store.run import Run
from tenterhook.view.answers import NoAnswer
from tenterhook.view.guard import Guard
from tenterhook.view.page import page, policy
from tenterhook.view.runs import Runs

_LOOK_EVERY = 0.5  # seconds
_JSON = "application/json"


def app_for(given: Sequence[Run], token: str, hosts: frozenset[str]) -> Starlette:
    """The application: the page, its answers, and word of what is new."""
    runs, html = Runs(given), page()
    headers = {"content-security-policy": policy(html, "'self'")}

    async def show_page(_: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    async def show_runs(_: Request) -> Response:
        names = await run_in_threadpool(runs.names)
        return Response(json.dumps({"first": runs.first, "names": names}), media_type=_JSON)

    async def show_answer(request: Request) -> Response:
        query = request.query_params
        try:
            name, window = request.path_params["name"], dict(query)
            asked = query.get("run", ""), _rank(query.get("rank"))
            other = (query["with"], _rank(query.get("with_rank"))) if "with" in query else None
            data = await run_in_threadpool(runs.answer, asked, name, window, other)
        except NoAnswer as error:
            return _error(404, str(error))
        except TenterhookError as error:
            return _error(422, str(error))
        except Exception as error:  # a file that somebody has damaged or made up: the page says so, and goes on
            return _error(422, f"the run cannot be read: {type(error).__name__}: {error}")
        has_bytes = name.startswith(("matrix/", "picture/", "differences/"))
        return Response(data, media_type="application/octet-stream" if has_bytes else _JSON)

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
    errors: Any = {HTTPException: lambda _, error: _error(error.status_code, error.detail)}
    return Starlette(routes=routes, exception_handlers=errors, middleware=[Middleware(Guard, token=token, hosts=hosts)])


def _rank(text: str | None) -> int | None:
    if text is not None and not (text.isascii() and text.isdecimal() and len(text) < 8):
        raise NoAnswer(f"a rank is a number, and not {text!r}")
    return None if text is None else int(text)


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
