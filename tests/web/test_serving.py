"""The command: where it listens, what it refuses before, and how it ends (W3, W6)."""

import http.client
import json
import socket
import time
from pathlib import Path

import pytest

from support.commands import process
from support.serving import JSON, Server


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7"])
def test_another_address_without_a_token_is_refused_before_the_port_opens(host: str) -> None:  # W3
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a port that could not be opened: it is not tried
        port = taken.getsockname()[1]
        done = process("serve", "--host", host, "--port", port, "--model", "/nothing/here")
    assert done.returncode == 2
    assert "no token was given" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_in_use_is_one_line(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = process("serve", "--model", model_folder, "--port", port)
    assert done.returncode == 2
    assert done.stderr == (
        f"preimage: Port {port} of 127.0.0.1 is in use. "
        "Give another with --port, or --port 0 for any that is free.\n"
    )
    assert done.stdout == ""


def test_an_unknown_model_and_a_missing_folder_are_refused_at_once(tmp_path: Path) -> None:
    assert process("serve", "--model", tmp_path / "none").returncode == 2
    done = process("serve", "--runs", tmp_path / "none", "--json")
    assert done.returncode == 2
    assert "is no folder" in json.loads(done.stdout)["error"]["message"]


def test_it_listens_on_this_machine_alone(server: Server) -> None:  # W3
    assert server.url.startswith("http://127.0.0.1:")
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    here = [
        line.split()[1] for line in listening.splitlines() if f":{server.port:04X} " in line.split("0A")[0]
    ]
    assert {address for address in here if address.endswith(f":{server.port:04X}")} == {
        f"0100007F:{server.port:04X}"
    }


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET / HTTP/1.0\r\n\r\n", 400),
        (b"TRACE / HTTP/1.1\r\nHost: HERE\r\n\r\n", 405),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: HERE\r\n\r\n", 404),
        (b"GET /runs/..%2f..%2fetc/report.html HTTP/1.1\r\nHost: HERE\r\n\r\n", 404),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: HERE\r\n\r\n", 404),
        (b"GET /%00 HTTP/1.1\r\nHost: HERE\r\n\r\n", 404),
        (b"GET / HTTP/1.1\r\nHost: HERE\r\nX: " + b"x" * 400_000, 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"nonsense\r\n\r\n", 400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_raw_requests(server: Server, sent: bytes, status: int) -> None:  # W4, W5, W6
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as wire:
        wire.sendall(sent.replace(b"HERE", f"127.0.0.1:{server.port}".encode()))
        answer = wire.recv(65536)
    assert answer.split()[1] == str(status).encode(), answer
    assert b"Traceback" not in answer


def test_a_job_is_told_event_by_event(server: Server) -> None:
    events = server.events({"kind": "prompt", "prompt": "the cat", "layer": "2"})
    kinds = [event["type"] for event in events]
    assert kinds[-1] == "end"
    assert "settled" in kinds
    (result,) = [event for event in events if event["type"] == "result"]
    assert result["status"] == "recovered"
    assert result["exact"] is True
    assert "".join(token["text"] for token in result["tokens"]) == "<s>the cat"
    assert result["tokens"][0]["id"] == 1


def test_prompts_that_the_model_cannot_take_are_refused_in_words(server: Server) -> None:
    for prompt, words in {"\ud800": "surrogate", "a " * 3000: "tokens"}.items():
        last = server.events({"kind": "prompt", "prompt": prompt})[-2]
        assert last["type"] == "error"
        assert words in last["message"]
    last = server.events({"kind": "prompt", "prompt": "x", "layer": "99"})[-2]
    assert last["code"] == "bad_layer"


def test_ctrl_c_ends_it_at_once_with_its_jobs(model_folder: Path) -> None:
    with Server("--model", model_folder, "--token", "correct-horse-battery") as one:
        assert one.ask("GET", "/").status == 401
        bearer = {"authorization": "Bearer correct-horse-battery"}
        asked = {"kind": "prompt", "prompt": "the cat sat on a mat" * 4, "layer": "final",
                 "sipit": "published", "sipit_seconds": 120}  # fmt: skip
        answer = one.ask("POST", "/api/jobs", JSON | bearer, json.dumps(asked).encode())
        name = answer.document["id"]
        wire = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
        wire.request("GET", f"/api/jobs/{name}/events", headers=bearer)
        stream = wire.getresponse()
        while b"sipit" not in stream.readline():
            pass
        began = time.monotonic()
        code, stderr = one.stop()
        took = time.monotonic() - began
        stream.read()
        wire.close()
    assert code == 0
    assert "Traceback" not in stderr
    assert took < 30, "it takes three seconds on a machine that does nothing else"
    with pytest.raises(ConnectionRefusedError, match="refused"):
        socket.create_connection(("127.0.0.1", one.port), timeout=2)
