"""The application: what each address gives. All checks of who asks come before it (``guard``)."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import StarletteHTTPException
from fastapi.requests import Request
from fastapi.responses import HTMLResponse, Response, StreamingResponse

from preimage.errors import PreimageError, StatesError
from preimage.storage import parse_json
from preimage.web.asking import parse_ask
from preimage.web.guard import RequestError
from preimage.web.options import Limits, ServeOptions
from preimage.web.queue import Job, JobQueue, told
from preimage.web.runs import POLICY, list_runs, run_page
from preimage.web.uploads import Uploads
from preimage.web.work import Bench

log = logging.getLogger(__name__)

STATIC = {
    **dict.fromkeys(("report.css", "page.css"), "text/css"),
    **dict.fromkeys(
        ("page.js", "job.js", "tokens.js", "charts.js", "files.js", "runs.js"), "text/javascript"
    ),
}
_POLL, _ALIVE = 0.03, 10.0  # seconds between two looks at a job, and between two signs of life
_TITLES = {404: "There is nothing here.", 405: "This method is not allowed here."}


def make_app(options: ServeOptions, bench: Bench, queue: JobQueue, uploads: Uploads) -> FastAPI:
    """The application behind the guard."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_pages(app)
    _add_jobs(app, options.limits, queue)
    _add_uploads(app, options.limits, uploads)
    _add_runs(app, options)
    limits = {
        "letters": options.limits.letters,
        "tokens": options.limits.tokens,
        "upload": options.limits.upload,
    }

    def state() -> Response:
        jobs = [{"id": job.id, "kind": job.kind, "state": job.state} for job in queue.open()]
        return _json({"model": bench.about, "jobs": jobs, "limits": limits})

    app.get("/api/state")(state)
    app.exception_handler(PreimageError)(_refused)
    app.exception_handler(StarletteHTTPException)(_not_found)
    app.exception_handler(Exception)(_failed)
    return app


def _add_pages(app: FastAPI) -> None:
    def page() -> HTMLResponse:
        return HTMLResponse(_resource("page.html"))

    def static(name: str) -> Response:
        if name not in STATIC:
            raise RequestError(_TITLES[404], status=404)
        return Response(_resource(name), media_type=STATIC[name])

    app.get("/", response_model=None)(page)
    app.get("/static/{name}", response_model=None)(static)


def _add_jobs(app: FastAPI, limits: Limits, queue: JobQueue) -> None:
    async def add(request: Request) -> Response:
        _require_type(request, "application/json")
        body = await _body(request, limits.request, limits.body_seconds)
        try:
            given = await run_in_threadpool(parse_json, bytes(body))
        except ValueError as error:
            raise RequestError("The request is no json.", "Send one json object.") from error
        ask = parse_ask(given, limits)
        return _json({"id": queue.add(ask.kind, ask).id})

    async def events(request: Request, name: str) -> Response:
        job = queue.get(name)
        last = request.headers.get("last-event-id", "")
        start = int(last) + 1 if last.isdecimal() and len(last) < 10 else 0
        stream = _events(queue, job, start)
        return StreamingResponse(stream, media_type="text/event-stream")

    def cancel(name: str) -> Response:
        queue.cancel(name)
        return _json({"id": name})

    app.post("/api/jobs", response_model=None)(add)
    app.get("/api/jobs/{name}/events", response_model=None)(events)
    app.delete("/api/jobs/{name}", response_model=None)(cancel)


async def _events(queue: JobQueue, job: Job, sent: int) -> AsyncIterator[str]:
    """What a job says, as it says it (server-sent events); how many jobs are before it while it waits."""
    before, alive = -1, time.monotonic()
    while not queue.closed:
        fresh, over = job.since(sent)
        for event in fresh:
            yield f"id: {sent}\ndata: {json.dumps(event, allow_nan=False)}\n\n"
            sent += 1
        if over:
            return
        now = queue.before(job) if job.state == "waiting" else 0
        if now != before:
            before = now
            yield f"data: {json.dumps({'type': 'before', 'jobs': now})}\n\n"
        if time.monotonic() - alive > _ALIVE:
            alive = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(_POLL)


def _add_uploads(app: FastAPI, limits: Limits, uploads: Uploads) -> None:
    async def upload(request: Request) -> Response:
        _require_type(request, "application/octet-stream")
        name = request.query_params.get("name", "")
        beside = request.query_params.get("to")
        uploads.check_name(name)
        body = await _body(request, uploads.room(beside), limits.body_seconds)
        if not body:
            raise StatesError("The file is empty.", "Drop another.")
        return _json({"upload": await run_in_threadpool(uploads.add, beside, name, body)})

    app.post("/api/uploads", response_model=None)(upload)


def _add_runs(app: FastAPI, options: ServeOptions) -> None:
    def listed() -> Response:
        runs = [] if options.runs is None else list_runs(options.runs)
        return _json({"shown": options.runs is not None, "runs": runs})

    def page(name: str, page: str) -> Response:
        if options.runs is None:
            raise RequestError(_TITLES[404], status=404)
        content = run_page(options.runs, name, page)
        headers = {"content-security-policy": POLICY, "cross-origin-opener-policy": "unsafe-none"}
        return Response(content, media_type="text/html; charset=utf-8", headers=headers)

    app.get("/api/runs", response_model=None)(listed)
    app.get("/runs/{name}/{page}", response_model=None)(page)


async def _body(request: Request, most: int, seconds: float) -> bytearray:
    """The body, refused as soon as it is longer than it may be, and where it does not come."""
    said = request.headers.get("content-length", "0")
    too_long = RequestError(
        f"More than {most / 2**20:,.0f} MiB were sent.",
        "Use the command line, which takes any size.",
        status=413,
    )
    if not said.isdecimal() or len(said) > 15 or int(said) > most:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_long
    except TimeoutError as error:
        raise RequestError("The body did not come in time.", "Send it again.", status=408) from error
    return body


def _require_type(request: Request, kind: str) -> None:
    """Only our own scripts send these; a form of another page cannot."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise RequestError("The type of the request is another.", f"Send {kind}.", status=415)


def _json(document: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(document, allow_nan=False), status, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, PreimageError)
    status = error.status if isinstance(error, RequestError) else 400
    return _json({"error": told(error)}, status)


async def _not_found(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, StarletteHTTPException) else 500
    title = _TITLES.get(status, "This cannot be done.")
    return _json({"error": {"code": "bad_request", "message": title, "hint": "Open /."}}, status)


async def _failed(request: Request, error: Exception) -> Response:
    message = "The server met an error of its own."
    return _json({"error": {"code": "internal", "message": message, "hint": "The terminal says which."}}, 500)


@cache
def _resource(name: str) -> str:
    if name == "report.css":  # colours, letters and tables are those of reports
        return files("preimage.report").joinpath("page.css").read_text(encoding="utf-8")
    return files("preimage.web").joinpath("page", name).read_text(encoding="utf-8")
