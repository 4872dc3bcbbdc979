"""Searches short enough for every run of the tests, and what holds for any value that hypothesis thinks of.

A search is in processes of its own: it limits memory, sets timers and watches every deed of its process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import preimage
from fuzz.targets import TARGETS
from preimage.errors import BundleError, PreimageError
from preimage.layers import parse_layers
from preimage.storage import MANIFEST, parse_json, read_manifest
from support.refusing import refused

TESTS = Path(__file__).parents[1]


def run(script: list[str]) -> subprocess.CompletedProcess[str]:
    """A process that finds what is in the tests' folder."""
    path = os.pathsep.join([str(TESTS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *script], env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def searched(folder: Path, *given: str) -> dict[str, Any]:
    """What a search counted that found nothing."""
    done = run(["-m", "fuzz", *given, "--seed", "0", "--keep", str(folder), "--json", str(folder / "json")])
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads((folder / "json").read_text())
    return document


def test_hostile_files_of_every_kind_are_read_or_refused_in_words(tmp_path: Path) -> None:  # S4
    document = searched(tmp_path, "--plain", "--cases", "300")
    assert document["targets"].keys() == TARGETS.keys()
    for name, found in document["targets"].items():
        count = 300 // TARGETS[name].slow
        assert found["cases"] == count
        assert found["accepted"] > count // 100
        assert found["refused"] > count // 10


@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not there: not built for this machine")
def test_a_search_led_by_coverage(tmp_path: Path) -> None:
    document = searched(tmp_path, "--cases", "500", "--target", "manifest")
    assert document["how"] == "guided"
    assert document["targets"]["manifest"]["cases"] == 500
    assert document["targets"]["manifest"]["accepted"] > 10


PLANTED = """
import os, pickle, socket, sys, time
from pathlib import Path
from preimage.errors import PreimageError
from fuzz.judging import Fault, judge, scratch

def forever(_):
    while True: pass

def hidden(_):
    try: socket.create_connection(("127.0.0.1", 9))
    except Exception: raise PreimageError("No.", "Go away.")

class Code:
    def __reduce__(self): return print, ("unpickled",)

PLANTED = {
    "traceback": lambda _: 1 / 0,
    "time": forever,
    "memory": lambda _: bytearray(300 << 20),
    "addresses": lambda _: bytearray(8 << 30),
    "elsewhere": lambda _: Path(sys.argv[1], "written").write_bytes(b""),
    "removed": lambda _: Path(sys.argv[1]).rmdir(),
    "network": hidden,
    "program": lambda _: os.system("true"),
    "pickle": lambda _: pickle.loads(pickle.dumps(Code())),
    "novel": lambda _: (_ for _ in ()).throw(PreimageError("x" * 5000, "Go on.")),
    "lines": lambda _: (_ for _ in ()).throw(PreimageError("a\\nb", "Go on.")),
}
import fuzz.judging
fuzz.judging.SECONDS = 0.2
for name, reader in PLANTED.items():
    try: print(name, "passed", judge(reader, b""))
    except Fault as fault: print(name, "is a fault:", fault.what[:60])
print("refusal", judge(lambda _: (_ for _ in ()).throw(PreimageError("No.", "Go on.")), b""))
print("success", judge(lambda _: (scratch() / "a").write_bytes(b""), b""))
Path(sys.argv[1], "written").write_bytes(b"")  # between cases nobody is watched
"""


def test_what_a_case_may_not_do_is_seen(tmp_path: Path) -> None:
    done = run(["-c", PLANTED, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    *faults, refusal, success = done.stdout.splitlines()
    assert (refusal, success) == ("refusal False", "success True")
    said = {line.split()[0]: "is a fault" in line for line in faults}
    assert said == dict.fromkeys(said, True), done.stdout
    assert len(said) == 11


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
QUIET = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.binary(max_size=300))
@settings(QUIET, max_examples=30)
def test_bytes_of_any_kind_are_refused_in_words(name: str, data: bytes) -> None:
    with suppress(PreimageError):
        TARGETS[name].read(data)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed") / "b"
    return preimage.States.from_tensor(torch.ones(2, 3, 4), 1).save(folder)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to everything inside a json value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(place for key, part in inside for place in places(part, (*way, key)))]


def replaced(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    if not way:
        return new
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[way[0]] = replaced(value[way[0]], way[1:], new)
    return changed


@given(draw=st.data())
@QUIET
def test_no_change_of_a_sealed_manifest_goes_unseen(sealed: Path, draw: st.DataObject) -> None:  # J4
    manifest = json.loads((sealed / MANIFEST).read_text())
    way = draw.draw(st.sampled_from(places(manifest)[1:]))
    changed = replaced(manifest, way, draw.draw(VALUES))
    if json.dumps(changed, sort_keys=True) == json.dumps(manifest, sort_keys=True):
        return
    with tempfile.TemporaryDirectory() as other:
        for path in sealed.iterdir():
            (Path(other) / path.name).write_bytes(path.read_bytes())
        (Path(other) / MANIFEST).write_text(json.dumps(changed))
        refused(BundleError, lambda: read_manifest(Path(other)))


@given(value=VALUES)
def test_json_is_read_as_it_was_written(value: Any) -> None:
    text = json.dumps(value)
    assert json.dumps(parse_json(text)) == text


@given(levels=st.integers(1, 3000), object_=st.booleans())
@example(levels=100, object_=True)
@example(levels=101, object_=False)
def test_json_of_more_than_a_hundred_levels_is_none(levels: int, object_: bool) -> None:
    begin, end = ('{"a":', "}") if object_ else ("[", "]")
    text = begin * levels + "0" + end * levels
    if levels <= 100:
        assert json.dumps(parse_json(text)).replace(" ", "") == text
    else:
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text)


LAYERS = st.lists(st.integers(0, 12) | st.just("final"), min_size=1, max_size=6)


@given(layers=LAYERS)
def test_layers_in_words_are_those_layers(layers: list[Any]) -> None:
    assert parse_layers(",".join(map(str, layers)), 12) == parse_layers(layers, 12)
    assert parse_layers(parse_layers(layers, 12), 12) == parse_layers(layers, 12)
