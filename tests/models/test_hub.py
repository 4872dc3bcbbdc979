"""The hub and its cache: what is there is used, what is not is asked for once, and offline nobody is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import preimage
from preimage.errors import ModelError
from support.folders import VOCABULARY
from support.model_files import same_weights
from support.refusing import refused
from support.tiny import build

SHA = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(root: Path, source: Path, *, only: str = "*") -> Path:
    """A model as huggingface_hub keeps it: snapshots of links to blobs, and refs by name."""
    repository = root / "models--someone--tiny"
    snapshot, blobs, refs = repository / "snapshots" / SHA, repository / "blobs", repository / "refs"
    for made in (snapshot, blobs, refs):
        made.mkdir(parents=True)
    for path in source.glob(only):
        shutil.copy(path, blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"blob-{path.name}")
    (refs / "main").write_text(SHA)
    (refs / "v1").write_text(SHA)
    return snapshot


def test_a_hub_id_is_served_from_the_hubs_cache_offline(made_once: Path, tmp_path: Path) -> None:
    hub_cache(tmp_path / "home" / "hub", made_once)
    script = """
import json, preimage
found = [preimage.load("someone/tiny", revision=revision) for revision in (None, "v1")]
errors = []
for name, revision in (("someone/other", None), ("someone/tiny", "v2")):
    try: preimage.load(name, revision=revision)
    except preimage.PreimageError as error: errors.append(error.to_dict())
states = preimage.capture(found[0], ["some text"], 2)
print(json.dumps([[m.name, m.revision, m.identity.weight_hash] for m in found]))
print(json.dumps([errors, states.model, states.token_ids]))
"""
    home = {"HF_HOME": str(tmp_path / "home"), "PREIMAGE_CACHE": str(tmp_path / "cache")}
    done = run_python(script, **home)
    assert done.returncode == 0, done.stderr
    found, (errors, made_by, ids) = map(json.loads, done.stdout.splitlines())
    local = preimage.load(made_once)
    assert found == [["someone/tiny", SHA, local.identity.weight_hash]] * 2
    assert (made_by["name"], made_by["revision"]) == ("someone/tiny", SHA)
    assert ids == [local.tokenizer("some text")["input_ids"]]
    for error in errors:
        assert error["code"] == "bad_model"
        assert "no file or folder here, and not in the hub's cache (offline)" in error["message"]


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache of one's own, and the belief that the hub may be asked."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


class Hub:
    """What the hub answers; its files are in a folder."""

    def __init__(self, folder: Path, answer: Exception | list[str]) -> None:
        self.folder = folder
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    def model_info(self, name: str, **options: Any) -> Any:
        self.asked.append(options)
        if isinstance(self.answer, Exception):
            raise self.answer
        files = [huggingface_hub.hf_api.RepoSibling(rfilename=file) for file in self.answer]
        return type("Info", (), {"siblings": files})


def ask(hub: Hub, monkeypatch: pytest.MonkeyPatch, download: Callable[..., Any]) -> None:
    local = huggingface_hub.snapshot_download

    def answer(name: str, **options: Any) -> Any:
        return local(name, **options) if options.get("local_files_only") else download(name, **options)

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)


def test_what_the_cache_lacks_is_downloaded_without_pickles(
    made_once: Path, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache(online, made_once, only="config.json")  # as reading a config alone leaves it
    hub, patterns = Hub(made_once, [path.name for path in made_once.iterdir()]), []

    def download(name: str, **options: Any) -> str:
        patterns.extend(options["allow_patterns"])
        shutil.rmtree(online)
        return str(hub_cache(online, made_once))

    ask(hub, monkeypatch, download)
    model = preimage.load("someone/tiny")
    same_weights(build("llama", vocab_size=VOCABULARY), model.module)
    assert model.revision == SHA
    assert hub.asked == [{"revision": None, "timeout": 3.0}]
    assert patterns
    assert not any(pattern.endswith(("bin", "pt", "*", "py")) for pattern in patterns)
    preimage.load("someone/tiny")  # now it is there, and nobody is asked again
    assert len(hub.asked) == 1


def test_answers_of_the_hub_become_one_line(
    made_once: Path, online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    hub = Hub(made_once, ConnectionError("no route"))
    ask(hub, monkeypatch, fail)
    error = refused(ModelError, lambda: preimage.load("someone/tiny"))
    assert error.message.startswith("'someone/tiny' is not an alias (smollm2), no file or folder here")
    assert error.message.endswith("and the hub cannot be reached.")
    hub.answer = ["config.json", "pytorch_model.bin"]
    error = refused(ModelError, lambda: preimage.load("someone/tiny"))
    assert "has no safetensors on the hub, and preimage never opens pickled weights" in error.message
    hub.answer = ["config.json", "model.safetensors"]
    error = refused(ModelError, lambda: preimage.load("someone/tiny"))
    assert error.message == "The download of someone/tiny failed: [Errno 28] No space left on device"


def test_half_a_model_in_the_hubs_cache_is_refused_offline(
    made_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = hub_cache(tmp_path / "hub", made_once, only="config.json")
    error = refused(ModelError, lambda: preimage.load("someone/tiny"))
    assert error.message == f"{snapshot} holds no *.safetensors."


@pytest.mark.real_model
def test_offline_means_no_socket_call() -> None:  # S3
    script = """
import json, socket
calls = []
def forbidden(name):
    def call(*args, **kwargs):
        calls.append(name + repr(args[-2:]))
        raise OSError("no network in this test")
    return call
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, forbidden(name))
for name in ("getaddrinfo", "gethostbyname", "create_connection"):
    setattr(socket, name, forbidden(name))
import preimage
model = preimage.load("smollm2")
states = preimage.capture(model, ["Nobody is asked."], 1)
errors = []
for name in ("someone/no-such-model", "no-such-model"):
    try: preimage.load(name)
    except preimage.PreimageError as error: errors.append(error.message)
print(json.dumps([calls, len(states), errors]))
"""
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    calls, count, errors = json.loads(done.stdout)
    assert calls == []
    assert count == 1
    assert len(errors) == 2
    assert all("(offline)" in error for error in errors)
