"""``serve``: the port opened, the model loaded behind it, requests answered until somebody ends it."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import uvicorn

from preimage.errors import OptionError, first_line, shown
from preimage.preparation import Preparation
from preimage.web.app import make_app
from preimage.web.guard import Door, Guard
from preimage.web.options import ServeOptions
from preimage.web.queue import JobQueue
from preimage.web.uploads import Uploads
from preimage.web.work import Bench

_LEAVING = 1  # seconds for answers that are under way when the server is ended
_JOB_ENDS = 1.5  # the same for the job that runs, which ends with its block
_BACKLOG = 64


class Served(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"


def serve(prepared: Preparation, options: ServeOptions, listening: Callable[[Served], None]) -> bool:
    """Serve the page until Ctrl-C or a signal to end; ``listening`` is told where, once the port is open.

    The model is loaded behind it, with its state on the page. One job runs at a time. When the server is
    ended jobs are cancelled, and what was uploaded is removed. False where work goes on that cannot be ended
    so soon, as loading a model: whoever asked should then leave without waiting for it.
    """
    opened = _open(options)
    port = int(opened.getsockname()[1])
    uploads = Uploads(options.limits)
    try:
        bench = Bench(prepared, uploads, options.limits)
        limits = options.limits
        queue = JobQueue(
            bench.load, bench.work, waiting=limits.waiting, seconds=limits.seconds, unwatched=limits.unwatched
        )
        app = make_app(options, bench, queue, uploads)
        guard = Guard(app, Door(options.host, port, options.token))
        server = _Server(
            _config(guard, limits.connections), queue, lambda: listening(Served(options.host, port))
        )
        queue.start()
        try:
            server.run(sockets=[opened])
        except KeyboardInterrupt:  # uvicorn hands on what it was ended by
            pass
        finally:
            queue.close()
            ended = queue.join(_JOB_ENDS)
        return ended
    finally:
        opened.close()
        uploads.close()


class _Server(uvicorn.Server):
    """Uvicorn's, which ends jobs as soon as it is to end: streams that follow them would hold it up."""

    def __init__(self, config: uvicorn.Config, queue: JobQueue, began: Callable[[], None]) -> None:
        super().__init__(config)
        self._queue, self._began = queue, began

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so: from here on a signal ends it in order."""
        await super().startup(sockets)
        self._began()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._queue.close()
        super().handle_exit(sig, frame)


def _config(app: Guard, connections: int) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return uvicorn.Config(
        app,
        loop="asyncio", http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
        proxy_headers=False, server_header=False, date_header=False, limit_concurrency=connections,
        timeout_keep_alive=15, timeout_graceful_shutdown=_LEAVING, h11_max_incomplete_event_size=64 << 10,
    )  # fmt: skip


def _open(options: ServeOptions) -> socket.socket:
    """The port, listening; one that is taken, or a host that is not here, is one short error."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"Port {options.port} of {shown(options.host)} is in use."
            raise OptionError(
                message, "Give another with --port, or --port 0 for any that is free."
            ) from error
        reason = error.strerror or first_line(error)
        raise OptionError(
            f"{shown(options.host)}, port {options.port}, cannot be opened: {reason}.", "Give another."
        ) from error
