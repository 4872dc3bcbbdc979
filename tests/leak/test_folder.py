"""Folders as somebody has them: everything named once, nothing waited for, nothing bad in the way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import preimage
from preimage.errors import BundleError, OptionError, StatesError
from preimage.leak.folder import Found, read_paths
from preimage.leak.holdings import Sizes, Told
from support.folders import make_folder
from support.refusing import refused

NOBODY = Told()
STATES = torch.randn(5, 32)
FILES = Path(__file__).parent / "files"


def kinds(found: Found) -> dict[str, str]:
    return {holding.paths[0].name: holding.kind for holding in found.holdings}


def fill(folder: Path) -> Path:
    """One of everything."""
    folder.mkdir()
    save_file({"layer_2": STATES}, folder / "a.safetensors")
    (folder / "a.json").write_text('{"prompt": "of a"}')  # sorted before what it belongs to
    (folder / "log.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    (folder / ".hidden").mkdir()
    np.save(folder / ".hidden/layer_1.npy", STATES.numpy())
    (folder / "broken.pt").write_bytes(b"PK\x03\x04 and no more")
    (folder / "readme.md").write_text("nothing")
    (folder / "note.txt").write_text("text that lies alone")
    preimage.States.from_tensor(torch.ones(2, 3, 16), 1).save(folder / "bundle")
    for path in make_folder(folder / "model").iterdir():
        path.chmod(0o644)  # whoever may read the folder may read the model
    return folder


def test_a_folder_of_everything(tmp_path: Path) -> None:
    folder = fill(tmp_path / "f")
    found = read_paths([folder], NOBODY)
    assert kinds(found) == {
        "layer_1.npy": "plain states",
        "a.safetensors": "plain states",
        "bundle": "preimage bundle",
        "log.jsonl": "plain text",
    }
    assert found.holdings[1].paths == (folder / "a.safetensors", folder / "a.json")
    ((path, why),) = found.unread
    assert path == folder / "broken.pt"
    assert "broken.pt is a pickle" in why
    assert found.others == 2 + len(list((folder / "model").iterdir()))


def test_what_engines_wrote(tmp_path: Path) -> None:
    found = read_paths([FILES], NOBODY)
    names = {holding.kind for holding in found.holdings}
    assert {"vLLM hidden states", "vLLM block", "LMCache chunk"} <= names


def test_the_same_file_is_named_once(tmp_path: Path) -> None:
    folder = fill(tmp_path / "f")
    once = read_paths([folder], NOBODY)
    (tmp_path / "link").symlink_to(folder)
    (folder / "loop").symlink_to(folder)
    (folder / "z.safetensors").symlink_to(folder / "a.safetensors")
    again = read_paths([folder, folder / "a.safetensors", tmp_path / "link", folder / "bundle"], NOBODY)
    assert kinds(again) == kinds(once)
    assert len(again.holdings) == len(once.holdings)
    assert (again.unread, again.others) == (once.unread, once.others)
    linked = read_paths([folder / "z.safetensors"], NOBODY)  # given by itself it is followed
    assert kinds(linked) == {"z.safetensors": "plain states"}


def test_what_is_given_alone_must_be_read(tmp_path: Path) -> None:
    error = refused(StatesError, lambda: read_paths([tmp_path / "gone"], NOBODY))
    assert error.message == f"There is no file or folder {tmp_path / 'gone'}."
    (tmp_path / "n.md").write_text("nothing")
    error = refused(StatesError, lambda: read_paths([tmp_path / "n.md"], NOBODY))
    assert error.message == "n.md is of no kind that is read."
    assert "safetensors" in error.hint
    save_file({"layer_2": STATES}, tmp_path / "s.safetensors")
    found = read_paths([tmp_path / "n.md", tmp_path / "s.safetensors"], NOBODY)
    assert [path.name for path, _ in found.unread] == ["n.md"]
    assert kinds(found) == {"s.safetensors": "plain states"}
    error = refused(
        StatesError, lambda: read_paths([tmp_path / "s.safetensors"], Told(sizes=Sizes(3, 16, 2, 8, 41)))
    )
    assert error.message == "layer_2 in s.safetensors has states of 32 numbers; the model has 16."
    bundle = preimage.States.from_tensor(torch.ones(2, 3, 16), 1).save(tmp_path / "b")
    (bundle / "states.safetensors").unlink()
    refused(BundleError, lambda: read_paths([bundle], NOBODY))
    assert len(read_paths([tmp_path], NOBODY).unread) == 1
    refused(OptionError, lambda: read_paths([], NOBODY))
    assert read_paths([make_folder(tmp_path / "m")], NOBODY).holdings == ()


def test_pipes_sockets_and_devices_are_not_opened(tmp_path: Path) -> None:
    for name in ("pipe.json", "pipe.safetensors", "t.json"):
        os.mkfifo(tmp_path / name)
    listening = socket.socket(socket.AF_UNIX)
    before = Path.cwd()
    os.chdir(tmp_path)  # names of sockets are short
    try:
        listening.bind("s.pt")
    finally:
        os.chdir(before)
    (tmp_path / "zero.npy").symlink_to("/dev/zero")
    save_file({"layer_2": STATES}, tmp_path / "t.safetensors")  # a pipe lies beside it
    found = read_paths([tmp_path], NOBODY)
    listening.close()
    assert kinds(found) == {"t.safetensors": "plain states"}
    assert (found.unread, found.others) == ((), 4)
    for given in (Path("/dev/zero"), tmp_path / "pipe.json", tmp_path / "zero.npy"):
        refused(StatesError, lambda given=given: read_paths([given], NOBODY))


HOSTILE = (
    b"\x1b[2Jclear", b"two\nlines", b"\xff\xfe not utf-8", b"'; DROP TABLE", b"<script>", b"%n%s",
    "\u202eevil".encode(), b" ", b"-rf", b"x" * 240,
)  # fmt: skip


def test_names_that_are_made_to_harm(tmp_path: Path) -> None:
    for name in HOSTILE:
        for suffix, content in (
            (b".pt", b"PK\x03\x04"),
            (b".npy", b"no array"),
            (b".safetensors", b"\x02" + bytes(7) + b"{{"),
            (b".json", b'{"prompt": "x"}'),
        ):
            with open(os.path.join(os.fsencode(tmp_path), name + suffix), "wb") as file:
                file.write(content)
    found = read_paths([tmp_path], NOBODY)
    assert len(found.holdings) == len(HOSTILE)
    assert len(found.unread) == 3 * len(HOSTILE)
    for _, why in found.unread:
        assert why.isprintable()
        assert len(why) <= 1001
    for holding in found.holdings:
        assert holding.about.isprintable()
    path = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"gone \xff\x1b[2J")))
    assert str(refused(StatesError, lambda: read_paths([path], NOBODY))).isprintable()
    refused(StatesError, lambda: read_paths([tmp_path / ("x" * 5000)], NOBODY))
    refused(StatesError, lambda: read_paths([Path("a\0b")], NOBODY))


def test_folders_of_any_depth(tmp_path: Path) -> None:
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(60):  # beyond the longest path there can be
            os.mkdir("d" * 100)
            os.chdir("d" * 100)
        Path("log.jsonl").write_text('{"prompt": "x"}')
    finally:
        os.chdir(before)
    found = read_paths([tmp_path], NOBODY)
    assert len(found.unread) == 1
    assert "cannot be looked into" in found.unread[0][1]


def test_what_may_not_be_read_is_told_of(tmp_path: Path) -> None:
    folder = fill(tmp_path / "f")
    (folder / "a.safetensors").chmod(0)
    (folder / "log.jsonl").chmod(0)
    (folder / ".hidden").chmod(0)
    tmp_path.chmod(0o755)
    script = """
import json, os, re, sys
from pathlib import Path
from preimage.leak.folder import read_paths
from preimage.leak.holdings import Told
os.chdir(sys.argv[1])
if os.geteuid() == 0:  # who may read everything
    os.seteuid(65534)
found = read_paths([Path("f")], Told())
print(json.dumps(sorted(re.split(r"[:.] ", why)[0] for _, why in found.unread)))
print(json.dumps(sorted(holding.kind for holding in found.holdings)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    (folder / ".hidden").chmod(0o755)
    assert done.returncode == 0, done.stderr
    unread, held = map(json.loads, done.stdout.splitlines())
    assert unread == [
        ".hidden cannot be looked into",
        "a.safetensors cannot be read",
        "broken.pt is a pickle that may hold more than plain tensors; it was not opened",
        "log.jsonl cannot be read",
    ]
    assert held == ["plain text", "preimage bundle"]  # a.json, which now belongs to nothing


def test_twenty_thousand_files(tmp_path: Path) -> None:
    for number in range(20_000):
        folder = tmp_path / f"{number % 100}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.bin").write_bytes(b"12345678901234567890")
    for number in range(100):
        save_file({"layer_2": STATES}, tmp_path / f"{number}/s.safetensors")
    begun = time.process_time()
    calls: list[tuple[int, int]] = []
    found = read_paths([tmp_path], NOBODY, lambda done, total, _: calls.append((done, total)))
    assert time.process_time() - begun < 60
    assert (len(found.holdings), found.others) == (100, 20_000)
    assert calls[-1] == (20_100, 20_100)
    assert torch.equal(found.holdings[7].pieces[0].seen[0].read(), STATES)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is only told by Linux")
def test_nothing_large_is_read(tmp_path: Path) -> None:
    for number in range(40):
        array = np.lib.format.open_memmap(
            tmp_path / f"layer_{number}.npy", mode="w+", dtype=np.float32, shape=(40_000, 256)
        )
        del array  # 40 MB each, sparse
        np.savez(tmp_path / f"a{number}.npz", layer_2=np.zeros((200, 256), np.float32))
    script = """
import sys
from pathlib import Path
from preimage.leak.folder import read_paths
from preimage.leak.holdings import Told
def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10
before = peak()
found = read_paths([Path(sys.argv[1])], Told())
print(len(found.holdings), peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    held, grown = map(int, done.stdout.split())
    assert held == 80
    assert grown < 100  # MiB, of which the first file takes most


def test_too_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preimage.leak.folder._MOST", 30)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for number in range(14):
        (tmp_path / f"a/{number}").touch()
        (tmp_path / f"b/{number}").touch()
    assert read_paths([tmp_path], NOBODY).others == 28
    (tmp_path / "b/more").touch()
    error = refused(StatesError, lambda: read_paths([tmp_path], NOBODY))
    assert error.message.startswith("There are more than 30 files and folders up to ")


def test_a_manifest_of_another_kind_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "an app"}))
    save_file({"layer_2": STATES}, tmp_path / "states.safetensors")
    assert kinds(read_paths([tmp_path], NOBODY)) == {"states.safetensors": "plain states"}
