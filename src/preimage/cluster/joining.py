"""A Ray cluster started on this machine, or joined: addresses, tokens, and what Ray is told on purpose."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from preimage.errors import ClusterError, MissingExtraError, OptionError, first_line

LOCAL = "local"
_SECONDS = 3.0  # in which a cluster's port must answer
_STORE_BYTES = 256 << 20  # of memory for objects on a cluster of our own: states are in files
# Nothing is sent to anybody, and nothing of what a worker may write is shown among our own lines.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a worker without a GPU sees none
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # workers do the work: 15 would have them wait for whatever else runs
}


def import_ray() -> Any:
    """Ray, or the error that names the extra."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("A cluster needs Ray.", "pip install 'preimage[ray]'") from error
    return ray


@contextmanager
def started(cpus: int, gpus: int | None) -> Iterator[Any]:
    """A cluster of this machine alone, on the loopback, with a token of its own; it ends with this."""
    with _environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
        ray = import_ray()
        _init(
            ray, LOCAL, num_cpus=cpus, num_gpus=gpus, object_store_memory=_STORE_BYTES,
            _node_ip_address="127.0.0.1",
        )  # fmt: skip
        try:
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def joined(address: str) -> Iterator[Any]:
    """A cluster that runs already, by the host and port of its head node; it goes on after this."""
    host, port = parse_address(address)
    elsewhere = not is_this_machine(host)
    if elsewhere and (os.environ.get("RAY_AUTH_MODE", "token") != "token" or not _token_is_there()):
        raise ClusterError(
            f"{host} is another machine, and no token was given for its cluster.",
            "Start the cluster with RAY_AUTH_MODE=token and give its token: RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH.",
        )
    ray = import_ray()
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"No cluster answers at {address}: {error.strerror or error}.",
            "Start one there with `ray start --head`, or use --cluster local.",
        ) from error
    with _environment({"RAY_AUTH_MODE": "token"} if elsewhere else {}):
        _init(ray, f"{host}:{port}")
        try:
            yield ray
        finally:
            ray.shutdown()


def parse_address(address: str) -> tuple[str, int]:
    """Host and port."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or "://" in address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise OptionError(
            f"The cluster {address[:80]!r} is none.",
            "Give local, or HOST:PORT of its head node (6379 mostly).",
        )
    return host.strip("[]"), int(port)


def is_this_machine(host: str) -> bool:
    """Whether every address of a host is one that this machine can be reached by from itself alone."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(one).partition("%")[0]).is_loopback for one in found)


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """What Ray reads of its surroundings, while a cluster is open; Ray looks only when it is told to."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    _look_again()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        _look_again()


def _look_again() -> None:
    if "ray" not in sys.modules:
        return  # it will, when it is imported
    with suppress(ImportError, AttributeError):  # names of its own, as its own code calls them
        import ray._raylet

        inner: Any = ray._raylet
        inner.Config.initialize("")
        inner.AuthenticationTokenLoader.instance().reset_cache()


def _token_is_there() -> bool:
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    files = [Path(path)] if path else [Path.home() / ".ray" / "auth_token"]
    return bool(os.environ.get("RAY_AUTH_TOKEN", "").strip()) or any(file.is_file() for file in files)


def _init(ray: Any, address: str, **more: Any) -> None:
    if ray.is_initialized():
        raise ClusterError(
            "This process has a Ray cluster already.", "Leave that one first (ray.shutdown())."
        )
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False,
            include_dashboard=False if address == LOCAL else None, **more,
        )  # fmt: skip
    except Exception as error:  # Ray raises many kinds
        raise ClusterError(
            f"The cluster at {address} cannot be used: {first_line(error)}",
            "Check its address, its token and that it runs the same version of Ray.",
        ) from error
