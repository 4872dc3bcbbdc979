"""Which clusters are joined, and which are refused before anything is sent."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from preimage.cluster import Cluster, joining
from preimage.errors import ClusterError, OptionError
from support.refusing import refused


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:99999", "ray://h:1", "h:1x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    error = refused(OptionError, lambda: joining.parse_address(address))
    assert error.message == f"The cluster {address!r} is none."


@pytest.mark.parametrize(
    ("host", "ours"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("192.0.2.1", False)]
)
def test_this_machine_is_the_loopback(host: str, ours: bool) -> None:
    assert joining.is_this_machine(host) == ours


@pytest.mark.parametrize("mode", [None, "disabled", "token"])
def test_another_machine_is_refused_without_a_token_and_nothing_is_sent(
    mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any, **named: Any) -> None:
        raise AssertionError(given)

    monkeypatch.setattr(socket, "create_connection", never)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if mode == "disabled":
        monkeypatch.setenv("RAY_AUTH_TOKEN", "there, and not asked for")

    def open_it() -> None:
        with Cluster("192.0.2.1:6379"):
            pass

    error = refused(ClusterError, open_it)
    assert "192.0.2.1 is another machine, and no token was given" in error.message
    assert "RAY_AUTH_TOKEN" in error.hint


def test_a_port_where_nobody_answers_is_refused_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def open_it() -> None:
        with Cluster(f"127.0.0.1:{port}"):
            pass

    error = refused(ClusterError, open_it)
    assert error.message.startswith(f"No cluster answers at 127.0.0.1:{port}: ")


def test_no_workers_are_refused() -> None:
    assert refused(OptionError, lambda: Cluster("local", workers=0)).message == "workers is 0."
