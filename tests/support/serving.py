"""The server of the page: as a process of its own, and as an application that is called without a port."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from preimage.web.guard import App
from support.surroundings import PYTHON

JSON = {"content-type": "application/json"}
BYTES = {"content-type": "application/octet-stream"}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found

    @property
    def message(self) -> str:
        return str(self.document["error"]["message"])


class Server:
    """``preimage serve`` as somebody starts it, on any free port, until the end of a with block."""

    def __init__(self, *argv: object) -> None:
        command = [*PYTHON, "-m", "preimage", "serve", "--port", "0", "--json", *map(str, argv)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
        )

    def __enter__(self) -> Server:
        assert self.process.stdout
        said = ""
        while not said.endswith("\n}\n"):
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            said += line
        self.url: str = json.loads(said)["url"]
        self.port = urlsplit(self.url).port or 0
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()

    def stop(self) -> tuple[int, str]:
        """Ctrl-C; the exit code and what stderr has."""
        self.process.send_signal(signal.SIGINT)
        try:
            _, stderr = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, stderr

    def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def events(self, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Everything that a job says, to its end."""
        answer = self.ask("POST", "/api/jobs", JSON, json.dumps(asked).encode())
        assert answer.status == 200, answer.body
        stream = self.ask("GET", f"/api/jobs/{answer.document['id']}/events").body.decode()
        lines = (line[6:] for line in stream.splitlines() if line.startswith("data: "))
        return [json.loads(line) for line in lines]

    def upload(self, name: str, content: bytes, to: str = "") -> Answer:
        more = f"&to={to}" if to else ""
        return self.ask("POST", f"/api/uploads?name={name}{more}", BYTES, content)


def asked(
    app: App,
    method: str,
    path: str,
    headers: Sequence[tuple[str, str]] = (("host", "127.0.0.1:8765"),),
    body: bytes | Sequence[bytes | None] = b"",
    query: str = "",
) -> Answer:
    """An answer of an application, called as a server calls it; of a body in pieces None never comes."""
    parts = [body] if isinstance(body, bytes) else list(body)
    said: list[dict[str, Any]] = []
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "http_version": "1.1",
        "query_string": query.encode(), "scheme": "http", "server": ("127.0.0.1", 8765), "root_path": "",
        "client": ("127.0.0.1", 50000),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        piece = parts.pop(0) if parts else None
        if piece is not None:
            return {"type": "http.request", "body": piece, "more_body": bool(parts)}
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        said.append(dict(message))

    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    headers_ = {name.decode().lower(): value.decode() for name, value in said[0]["headers"]}
    return Answer(said[0]["status"], headers_, b"".join(part.get("body", b"") for part in said[1:]))
