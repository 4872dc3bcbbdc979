"""A real S3 server on this machine, and the way to it, which can be closed.

Server (moto) and client (s3fs) are in a folder of their own: see s3.txt beside this file.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HOME = Path(sys.prefix) / "s3"
_SECONDS = 60.0  # in which the server must answer
_SERVE = "import sys; from moto.server import main; main(sys.argv[1:])"
# Nothing of the user's own is read, and nobody is asked for credentials.
_NOBODYS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",
    "NO_PROXY": "127.0.0.1",
}


def importable() -> None:
    """Have s3fs found by this process; whoever it starts is told by ``settings``."""
    assert (HOME / "s3fs").is_dir(), "s3fs is not there; run `make setup`"
    if str(HOME) not in sys.path:
        sys.path.append(str(HOME))


def settings(port: int) -> dict[str, str]:
    """The environment of a process that talks to the server, and to no other."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HOME)]))
    return _NOBODYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "PYTHONPATH": path}


@contextmanager
def serving(**environment: str) -> Iterator[int]:
    """A server with nothing in it; its port."""
    importable()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _SERVE, "-H", "127.0.0.1", "-p", str(port)]
    env = os.environ | settings(port) | environment
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(port, server)
            yield port
        finally:
            _forget_clients()
            server.kill()


def _forget_clients() -> None:
    """Else the next who asks gets a client that knows another port; what they leave open is closed."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def make_bucket(port: int, name: str) -> None:
    """By the protocol itself: nothing of a client is kept."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    _without_proxy().open(asked, timeout=_SECONDS).close()


def _without_proxy() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + _SECONDS
    while time.monotonic() < limit:
        assert server.poll() is None, "the S3 server has ended"
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.05)
    raise AssertionError(f"no S3 server after {_SECONDS} s")


class Gate:
    """A port in front of a server's. While it is closed nobody answers there."""

    def __init__(self, port: int) -> None:
        self._behind = port
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._listening: socket.socket | None = None
        self._open: list[socket.socket] = []
        self.open()

    def open(self) -> None:
        """Let everybody through."""
        self._listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def close(self) -> None:
        """Nobody comes through, and who is inside is thrown out."""
        listening, self._listening = self._listening, None
        for one in (listening, *self._open):
            if one is not None:
                _close(one)
        self._open.clear()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                here, _ = listening.accept()
                there = socket.create_connection(("127.0.0.1", self._behind))
                self._open = [one for one in self._open if one.fileno() >= 0] + [here, there]
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=_pump, args=pair, daemon=True).start()


def _close(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(1 << 16):
            target.sendall(content)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
    _close(source)


class Bucket:
    """A bucket, looked at by a client of its own, which remembers nothing."""

    def __init__(self, port: int, name: str) -> None:
        importable()
        import s3fs

        make_bucket(port, name)
        self.name = name
        self._system: Any = s3fs.S3FileSystem(
            key="tests", secret="tests", endpoint_url=f"http://127.0.0.1:{port}", use_listings_cache=False
        )

    def address(self, path: str) -> str:
        return f"s3://{self.name}/{path}"

    def files(self, path: str = "") -> dict[str, bytes]:
        """Every object below a path, by its name from there."""
        below = f"{self.name}/{path}".rstrip("/") + "/"
        found = self._system.find(below)
        return {name.removeprefix(below): self._system.cat_file(name) for name in found}

    def write(self, path: str, content: bytes) -> None:
        self._system.pipe_file(f"{self.name}/{path}", content)

    def remove(self, path: str) -> None:
        self._system.rm_file(f"{self.name}/{path}")
