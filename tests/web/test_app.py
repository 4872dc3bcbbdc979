"""What addresses give, and what is refused before any work is done (W5, W6)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from preimage.storage import write_json, write_text
from preimage.web.app import make_app
from preimage.web.guard import RequestError
from preimage.web.options import Limits, ServeOptions
from preimage.web.queue import JobQueue
from preimage.web.uploads import Uploads
from support.hostile import HOSTILE
from support.serving import BYTES, JSON, Answer, asked

LIMITS = Limits(letters=200, waiting=2, upload=1000, uploads=2, request=5000, body_seconds=0.2)


class _Bench:
    """No model: what is asked for here never comes so far."""

    def __init__(self) -> None:
        self.about = {"state": "loading", "name": "none", "problem": {}}


class Served:
    def __init__(self, runs: Path) -> None:
        self.uploads = Uploads(LIMITS)
        self.queue = JobQueue(lambda: None, {}, waiting=2, seconds=1, unwatched=1)  # which is never started
        options = ServeOptions(runs=runs, limits=LIMITS)
        self.app: FastAPI = make_app(options, _Bench(), self.queue, self.uploads)  # type: ignore[arg-type]

    def ask(self, method: str, path: str, body: Any = b"", kind: Any = None, query: str = "") -> Answer:
        headers = list((kind or {}).items())
        return asked(self.app, method, path, headers, body, query)

    def job(self, **fields: Any) -> Answer:
        return self.ask("POST", "/api/jobs", json.dumps(fields).encode(), JSON)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "runs").mkdir()
    one = Served(tmp_path / "runs")
    yield one
    one.uploads.close()


def refused(answer: Answer, status: int, words: str) -> None:
    assert answer.status == status, answer.body
    error = answer.document["error"]
    assert words in f"{error['message']} {error['hint']}"
    assert "Traceback" not in answer.body.decode()
    assert len(answer.body) < 2000


# --- addresses ----------------------------------------------------------------------------------


def test_the_page_and_its_parts_are_there(served: Served) -> None:
    page = served.ask("GET", "/")
    assert page.status == 200
    assert b"<script>" not in page.body
    assert b"style=" not in page.body
    for name in (
        "page.js",
        "job.js",
        "tokens.js",
        "charts.js",
        "files.js",
        "runs.js",
        "page.css",
        "report.css",
    ):
        answer = served.ask("GET", f"/static/{name}")
        assert answer.status == 200, name
        kind = "text/css" if name.endswith("css") else "text/javascript"
        assert answer.headers["content-type"].startswith(kind)
        assert b"http:" not in answer.body.replace(b"http://www.w3.org/2000/svg", b""), "no remote asset"
        assert b"https:" not in answer.body


@pytest.mark.parametrize(
    "path", ["/docs", "/redoc", "/openapi.json", "/static/", "/static/app.py", "/nothing", "//"]
)
def test_other_addresses_are_not(served: Served, path: str) -> None:
    assert served.ask("GET", path).status == 404


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_methods_that_an_address_has_not(served: Served, method: str) -> None:
    refused(served.ask(method, "/"), 405, "not allowed")


# --- jobs ---------------------------------------------------------------------------------------


def test_a_job_is_taken(served: Served) -> None:
    answer = served.job(kind="prompt", prompt="x", layer="1")
    assert answer.status == 200
    assert [job.id for job in served.queue.open()] == [answer.document["id"]]
    assert served.ask("GET", "/api/state").document["jobs"][0]["kind"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "kind of job"), ({"kind": "rm"}, "kind of job"), ({"kind": "prompt"}, "no prompt"),
        ({"kind": "prompt", "prompt": "x" * 201}, "201 letters"),
        ({"kind": "prompt", "prompt": 7}, "is a int"),
        ({"kind": "prompt", "prompt": None}, "NoneType"),
        ({"kind": "prompt", "prompt": "x", "eval": "1"}, "eval"),
        ({"kind": "prompt", "prompt": "x", "sipit": "quick"}, "sipit"),
        ({"kind": "noise", "prompt": "x", "percent": -1}, "percent"),
        ({"kind": "noise", "prompt": "x", "percent": 1e9}, "percent"),
        ({"kind": "noise", "prompt": "x", "percent": True}, "percent is a bool"),
        ({"kind": "prompt", "prompt": "x", "sipit_seconds": 1e6}, "sipit_seconds"),
        ({"kind": "prompt", "prompt": "x", "layer": "1" * 400}, "layer has 400"),
        ({"kind": "file"}, "No file"), ({"kind": "file", "upload": "x", "observe": "soul"}, "observe"),
        ({"kind": "file", "upload": "x", "any_model": "yes"}, "any_model"),
    ],
)  # fmt: skip
def test_jobs_that_cannot_be_asked_for(served: Served, fields: dict[str, Any], words: str) -> None:
    refused(served.job(**fields), 400, words)
    assert served.queue.open() == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"7", b"null", b"\xff\xfe", b'{"kind":' * 500, b"[" * 4000,
     b'{"percent": NaN, "kind": "noise", "prompt": "x"}'],
)  # fmt: skip
def test_bodies_that_say_nothing(served: Served, body: bytes) -> None:
    answer = served.ask("POST", "/api/jobs", body, JSON)
    assert answer.status == 400
    assert answer.message


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_what_a_form_of_another_page_could_send_is_refused(served: Served, kind: str) -> None:  # W4
    for path in ("/api/jobs", "/api/uploads"):
        answer = served.ask("POST", path, b"{}", {"content-type": kind} if kind else {}, "name=a.npy")
        assert answer.status == 415


def test_the_queue_is_bounded(served: Served) -> None:  # W6
    for status in (200, 200, 429):
        assert served.job(kind="prompt", prompt="x").status == status


def test_bodies_are_bounded_while_they_come(served: Served) -> None:  # W6
    pieces = [b" " * 1000] * 100
    refused(served.ask("POST", "/api/jobs", pieces, JSON), 413, "sent")
    assert len(pieces) == 100, "nobody changes what was sent"
    for length in ("999999", "-1", "x", "1" * 50):
        refused(served.ask("POST", "/api/jobs", b"{}", JSON | {"content-length": length}), 413, "sent")
    refused(served.ask("POST", "/api/uploads", [b"x" * 600] * 2, BYTES, "name=a.npy"), 413, "sent")


def test_a_body_that_does_not_come_is_not_waited_for(served: Served) -> None:  # W6
    refused(served.ask("POST", "/api/jobs", [b"{", None], JSON), 408, "did not come")


def test_jobs_that_are_not_there(served: Served) -> None:
    for method, path in (("GET", "/api/jobs/x/events"), ("DELETE", "/api/jobs/x")):
        refused(served.ask(method, path), 404, "no such job")


# --- uploads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [("a.zip", "Unpack it"), ("a.pt", "safetensors.torch.save_file"), ("a.pkl", "safetensors"),
     ("a.tar.gz", "Unpack"), ("a.gguf", "model"), ("a.txt", "Drop one"), ("", "Drop one"),
     ("manifest.json.exe", "Drop one"), ("../manifest.json", "Drop one"), ("x" * 5000 + ".npy", "Drop one")],
)  # fmt: skip
def test_files_that_are_no_states_are_refused_before_they_are_read(
    served: Served, name: str, words: str
) -> None:
    refused(served.ask("POST", "/api/uploads", b"x", BYTES, f"name={name}"), 415, words)


@pytest.mark.parametrize(
    "name", ["a.npy", "..%2F..%2Fa.npy", "%2Fetc%2Fa.npy", "a%00.npy", "%3Cb%3E.npy", ".npy.npy", "-rf.npy"]
)
def test_an_upload_stays_in_its_folder_whatever_its_name(served: Served, name: str) -> None:  # W5
    answer = served.ask("POST", "/api/uploads", b"x", BYTES, f"name={name}")
    assert answer.status == 200
    folder = served.uploads.folder(answer.document["upload"])
    (only,) = folder.iterdir()
    assert only.name in ("a.npy", "tensor.npy")
    assert only.read_bytes() == b"x"


def test_uploads_are_bounded_in_size_and_number_and_the_oldest_goes(served: Served) -> None:  # W6
    def add(to: str = "", size: int = 400) -> Answer:
        query = "name=a.npy" + (f"&to={to}" if to else "")
        return served.ask("POST", "/api/uploads", b"x" * size, BYTES, query)

    first = add().document["upload"]
    assert add(first).status == 200
    refused(add(first), 413, "sent")
    folder = served.uploads.folder(first)
    add()
    add()
    assert not folder.exists()
    with pytest.raises(RequestError, match="not here any more"):
        served.uploads.folder(first)
    refused(add(first), 404, "Drop the file again")
    refused(served.ask("POST", "/api/uploads", b"", BYTES, "name=a.npy"), 400, "empty")


# --- runs ---------------------------------------------------------------------------------------


def test_runs_are_listed_with_what_they_were_and_their_pages(served: Served, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    plan = {"command": "invert", "state": "done", "layer": 15, "options": {"seed": 0},
            "model": {"name": "smollm2", "dtype": "float32"},
            "results": [{"status": "recovered", "seconds": 1.5}, {"status": "likely"}]}  # fmt: skip
    write_json(runs / "a" / "run.json", plan)
    write_json(runs / "few" / "run.json", {"command": "geometry", "layers": [1, 15, "final"]})
    write_json(runs / "many" / "run.json", {"command": "geometry", "layers": [*range(31), "final"]})
    write_text(runs / "b" / "leak.html", "<p>leak</p>")
    write_text(runs / "c" / "run.json", "{")
    write_text(runs / "d" / "notes.txt", "no run")
    write_text(runs / "file.html", "no folder")
    listed = {run["name"]: run for run in served.ask("GET", "/api/runs").document["runs"]}
    assert set(listed) == {"a", "b", "c", "few", "many"}
    assert listed["few"]["facts"]["layers"] == "1, 15, final"
    assert listed["many"]["facts"]["layers"] == "0 … final (32)"
    facts = listed["a"]["facts"]
    assert (facts["command"], facts["model"], facts["statuses"]) == (
        "invert",
        "smollm2",
        "1 recovered, 1 likely",
    )
    assert listed["b"]["pages"] == ["leak.html"]
    assert listed["c"]["facts"] == {"state": "damaged"}
    page = served.ask("GET", "/runs/b/leak.html")
    assert page.body == b"<p>leak</p>"
    policy = page.headers["content-security-policy"]
    assert "sandbox allow-scripts" in policy
    assert "allow-same-origin" not in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize(
    "path",
    ["/runs/../secret.html", "/runs/%2e%2e/secret.html", "/runs/a/../../secret.html", "/runs/a/run.json",
     "/runs/a/..%2f..%2fsecret.html", "/runs/..%5c..%5csecret/report.html", "/runs//report.html",
     "/runs/./report.html", "/runs/../report.html", "/runs/%00/report.html", "/runs/a/report.html%00",
     "/runs/link/report.html", "/runs/a/leak.html", "/runs/~/report.html", "/runs/a/report.html/",
     "/static/../../guard.py", "/static/..%2f..%2fguard.py", "/static/%2e%2e/%2e%2e/guard.py",
     "/runs/%252e%252e/report.html", "/runs/....//report.html", "/runs/\u2024\u2024/report.html"],
)  # fmt: skip
def test_no_spelling_of_a_path_leads_out(served: Served, tmp_path: Path, path: str) -> None:  # W5
    from urllib.parse import unquote

    runs = tmp_path / "runs"
    write_text(tmp_path / "report.html", "secret")
    write_text(tmp_path / "secret.html", "secret")
    write_text(tmp_path / "outside" / "report.html", "secret")
    write_text(runs / "a" / "report.html", "fine")
    (runs / "link").symlink_to(tmp_path / "outside", target_is_directory=True)
    (runs / "a" / "leak.html").symlink_to(tmp_path / "secret.html")
    assert served.ask("GET", "/runs/a/report.html").body == b"fine"
    for spelled in (path, unquote(path)):  # servers hand on what they have decoded once
        answer = served.ask("GET", spelled)
        assert answer.status == 404
        assert b"secret" not in answer.body


@pytest.mark.parametrize("name", [name for name in HOSTILE if not name.startswith("long")])
def test_hostile_words_of_runs_are_spelled_out(served: Served, tmp_path: Path, name: str) -> None:  # W1
    text = HOSTILE[name]
    plan = {
        "command": text,
        "model": {"name": text, "dtype": text},
        "options": {text: text},
        "results": [{"status": text}],
    }
    write_json(tmp_path / "runs" / "a" / "run.json", plan)
    (run,) = served.ask("GET", "/api/runs").document["runs"]
    shown = "".join([run["shown"], *run["facts"].values()])
    assert all(character.isprintable() or character in "\n\t" for character in shown)
