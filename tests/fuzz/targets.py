"""One target a format: bytes are put where a user would have them, and read as a command would read them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import preimage
from fuzz import leaks, mutation, seeds
from fuzz.judging import check_words, scratch
from fuzz.mutation import NEXT, Mutate
from preimage.cli import BAD_INPUT, BUG, main
from preimage.cli.arguments import parse_bits, parse_positions
from preimage.collisions import CollisionAudit, ContinuationScan
from preimage.collisions.result import LayerCollisions
from preimage.errors import PreimageError
from preimage.geometry import Geometry
from preimage.inversion import Inversion, pull_lenses, verify_lenses
from preimage.inversion.proposers.lens_files import given_lens, read_info, read_weights
from preimage.layers import parse_layer, parse_layers
from preimage.models import locate, read_preview
from preimage.models.memory import require_room
from preimage.observations import Observation
from preimage.prompts import PromptOptions, Vocabulary, gather
from preimage.states import read_states_file
from preimage.storage import Run, read_manifest, sha256_document
from support.folders import make_tokenizer

LAYER = seeds.LAYER


@dataclass(frozen=True)
class Target:
    """A format: what reads it, whole files of it, and changes that keep its form."""

    read: Callable[[bytes], None]
    seeds: Callable[[Path], list[bytes]]
    mutate: Mutate
    slow: int = 1  # cases of others that take as long as one of these

    def begin(self) -> list[bytes]:
        """The seeds, made anew."""
        with _folder("seeds") as folder:
            return self.seeds(folder)

    def mutated(self, data: bytes, rng: random.Random) -> bytes:
        """A case made of another by one to four changes."""
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = (self.mutate if rng.random() < 0.8 else mutation.mutate_bytes)(data, rng)
        return data


@contextmanager
def _folder(name: str = "case") -> Iterator[Path]:
    """An empty folder, and the user's cache in it, so that nothing of one case is there in the next."""
    folder = scratch() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    before = os.environ.get("PREIMAGE_CACHE")
    os.environ["PREIMAGE_CACHE"] = str(folder / "cache")
    try:
        yield folder
    finally:
        os.environ.pop("PREIMAGE_CACHE") if before is None else os.environ.update(PREIMAGE_CACHE=before)


def _files(data: bytes, *names: str) -> dict[str, bytes]:
    return dict(zip(names, data.split(NEXT, len(names) - 1), strict=False))


def _told(document: bytes, of: bytes) -> bytes:
    """A document that has the right size and digest of a file wherever it asks for them."""
    digest = hashlib.sha256(of).hexdigest().encode()
    return document.replace(seeds.SIZE, str(len(of)).encode()).replace(seeds.DIGEST, digest)


def _write_bundle(data: bytes, folder: Path) -> None:
    files = _files(data, "manifest.json", "states.safetensors")
    tensors = files.get("states.safetensors", b"")
    (folder / "manifest.json").write_bytes(_told(files["manifest.json"], tensors))
    (folder / "states.safetensors").write_bytes(tensors)


def read_bundle(data: bytes) -> None:
    """``preimage.open_states``, and everything that is done with states that are there."""
    with _folder() as folder:
        _write_bundle(data, folder)
        _use(preimage.open_states(folder))


def command(data: bytes) -> None:
    """``preimage invert BUNDLE --json``, with the model that the bundle names and with another."""
    model = str(seeds.model_folder())
    with _folder() as folder:
        _write_bundle(data.replace(seeds.MODEL, model.encode()), folder)
        for more in ([], ["--model", model]):
            out = io.StringIO()
            with redirect_stdout(out), redirect_stderr(io.StringIO()):
                code = main(["invert", str(folder), "--json", "--device", "cpu", *more])
            document = json.loads(out.getvalue())
            assert code != BUG, document["error"]
        if code == BAD_INPUT:
            raise PreimageError(document["error"]["message"], document["error"]["hint"])


def _use(states: preimage.States) -> None:
    repr(states)
    for layer in states.layers:
        states.last(layer)
        states.fingerprint(layer)
        for prompt in range(len(states)):
            states.at(prompt, layer)
        states.require_finite(layer)
    states.require_width(seeds.model())
    mask = [[1] * max(states.lengths, default=0)] * len(states)
    _each(
        lambda: preimage.states_from(states, seeds.model()),
        lambda: preimage.states_from(states, seeds.model(), attention_mask=mask),
    )


def read_manifest_alone(data: bytes) -> None:
    """``read_manifest``, of a folder whose tensors are a few bytes."""
    with _folder() as folder:
        (folder / "manifest.json").write_bytes(_told(data, b"12345678"))
        (folder / "states.safetensors").write_bytes(b"12345678")
        read_manifest(folder)


@cache
def _plans() -> tuple[dict[str, Any], ...]:
    """What the seeds of run folders were begun with."""
    begun = [json.loads(case.split(NEXT)[0]) for case in TARGETS["run"].begin()]
    told = ("state", "results", "sha256")
    return tuple({name: run[name] for name in run if name not in told} for run in begun)


def _sealed(document: bytes, whole: Callable[[dict[str, Any]], Any]) -> bytes:
    """Json with the right digest of what it covers, where it asks for that."""
    with suppress(Exception):  # it may be anything by now
        said = json.loads(document)
        if said.pop("sha256") == seeds.DIGEST.decode():
            return document.replace(seeds.DIGEST, sha256_document(whole(said)).encode())
    return document


def read_run(data: bytes) -> None:
    """``Run`` in a folder that is there already, and what it says is done."""
    plans = _plans()
    begun, _, items = data.partition(NEXT)
    lines = items.splitlines(keepends=True)
    lines = [_sealed(line, lambda said: [said["key"], said["item"]]) for line in lines]
    with _folder() as folder:
        (folder / "run.json").write_bytes(_sealed(begun, lambda said: said))
        (folder / "items.jsonl").write_bytes(b"".join(lines))
        run = Run(plans[b'"collisions"' in data], folder)
        run.left(range(3))
        _each(
            lambda: run.kept(range(3), Inversion),
            lambda: run.kept([1, 2], LayerCollisions),
            lambda: run.result(CollisionAudit),
            lambda: run.result(Geometry),
        )
        run.keep(1, {"a": 1})


def _each(*actions: Callable[[], object]) -> None:
    """Do all, whichever is refused; a case is refused where all are."""
    refusals = []
    for action in actions:
        try:
            action()
        except PreimageError as error:
            check_words(error)
            refusals.append(error)
    if len(refusals) == len(actions):
        raise refusals[-1]


SAVED = (Inversion, CollisionAudit, Geometry, ContinuationScan)


def read_result(data: bytes) -> None:
    """``Saved.load``, as the kind of result it says it is."""
    with _folder() as folder:
        (folder / "r.json").write_bytes(data)
        named = [kind for kind in SAVED if re.search(rf'"kind": *"{kind._kind}"'.encode(), data)]
        result = (named or [Inversion])[0].load(folder / "r.json")
        repr(result)
        result.to_dict()
        result.save(folder / "again.json")


@cache
def _vocabulary() -> Vocabulary:
    return Vocabulary(make_tokenizer(), 300, 128)


def _reader_of_prompts(suffix: str) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        with _folder() as folder:
            path = folder / f"p{suffix}"
            path.write_bytes(data)
            _each(
                lambda: gather(path, _vocabulary()),
                lambda: gather(str(path), _vocabulary(), PromptOptions(length=3, count=2)),
                lambda: gather(path, Vocabulary(None, 10, None), PromptOptions(bos=False)),
            )

    return read


@cache
def _states() -> preimage.States:
    return preimage.capture(seeds.model(), seeds.PROMPTS, LAYER)


def read_lens_file(data: bytes) -> None:
    """A lens given by its file, verified, and used to invert."""
    with _folder() as folder:
        path = folder / "l.safetensors"
        path.write_bytes(data)
        verify_lenses(path)
        verify_lenses(path, seeds.model())
        info = read_info(path)
        repr(info)
        read_weights(info)
        given_lens(path, seeds.model(), info.tap)
        if info.tap == LAYER:  # it proposes, and never decides: nothing else may come of it
            found = preimage.invert(seeds.model(), _states(), LAYER, lens=path)
            told = [(one.status, list(one.token_ids)) for one in found]
            assert told == [("recovered", ids) for ids in seeds.PROMPTS], told


def read_registry(data: bytes) -> None:
    """A folder of lenses verified, and pulled from."""
    files = _files(data, "lenses.json", "lens")
    lens = files.get("lens", b"")
    with _folder() as folder:
        registry = _told(files["lenses.json"], lens)
        with suppress(ValueError, RecursionError, KeyError, TypeError, OSError, IndexError):
            name = Path(json.loads(registry)["lenses"][0]["file"]).name
            (folder / name).write_bytes(lens)
        (folder / "lenses.json").write_bytes(registry)
        _each(
            lambda: verify_lenses(folder),
            lambda: verify_lenses(folder, seeds.model()),
            lambda: pull_lenses(folder),
            lambda: pull_lenses(folder, seeds.model(), LAYER),
        )


@cache
def _tokenizer() -> str:
    text: str = make_tokenizer().backend_tokenizer.to_str()
    return text


MODEL_FILES = ("config.json", "tokenizer_config.json", "model.safetensors.index.json", "w.safetensors")


def read_model(data: bytes) -> None:
    """A model's folder as far as preimage reads it, before transformers does."""
    with _folder() as folder:
        (folder / "tokenizer.json").write_text(_tokenizer())
        for name, content in _files(data, *MODEL_FILES).items():
            (folder / name).write_bytes(content)
        files = locate(str(folder))
        _each(
            lambda: require_room(files, files.dtype, torch.device("cpu")),
            lambda: files.hash,
            lambda: repr(read_preview(files)),
        )


def read_gguf(data: bytes) -> None:
    """``preimage.load`` of a GGUF file."""
    with _folder() as folder:
        (folder / "m.gguf").write_bytes(data)
        repr(preimage.load(folder / "m.gguf", device="cpu"))


OBSERVED: tuple[dict[str, Any], ...] = (
    {},
    {"layer": 1},
    {"layer": "final"},
    {"observe": "keys"},
    {"observe": "kv"},
    {"positions": "last"},
)


def _take(path: Path, layer: int | str = LAYER, **how: Any) -> None:
    held = read_states_file(path, layer=layer)
    preimage.states_from(held.states, seeds.model(), layer, attention_mask=held.mask, **how)


def _reader_of_tensors(suffix: str) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        with _folder() as folder:
            path = folder / f"t{suffix}"
            path.write_bytes(data)
            _each(*(partial(_take, path, **how) for how in OBSERVED))

    return read


def read_option(data: bytes) -> None:
    """Layers, one layer, positions, bits and what was observed, in the words of a command."""
    text = data.decode("utf-8", errors="surrogateescape")
    typed = text[:1000]  # of what a user types there is never more, and it is repeated as it is
    _each(
        lambda: parse_layers(text, 3),
        lambda: parse_layer(text, 3),
        lambda: parse_layers(text.split(","), 3),
        lambda: Observation(at=parse_positions(typed)),
        lambda: parse_bits(typed),
        lambda: Observation(text),
    )


def read_leak(data: bytes) -> None:
    """Files that somebody has, as an audit of them looks at a folder."""
    with _folder() as folder:
        leaks.read_folder(data, folder)


def _by_name(name: str) -> Mutate:
    return mutation.mutate_pickle if name.endswith(".pkl") else mutation.mutate_npy


_PLAIN, _JSON, _TENSORS = mutation.mutate_bytes, mutation.mutate_json, mutation.mutate_tensors
TARGETS: dict[str, Target] = {
    "bundle": Target(read_bundle, seeds.bundles, mutation.mutate_files(_JSON, _TENSORS)),
    "command": Target(command, seeds.commanded, mutation.mutate_files(_JSON, _TENSORS), slow=20),
    "manifest": Target(read_manifest_alone, seeds.manifests, _JSON),
    "run": Target(read_run, seeds.runs, mutation.mutate_files(_JSON, mutation.mutate_lines)),
    "result": Target(read_result, seeds.results, _JSON),
    "prompts-txt": Target(_reader_of_prompts(".txt"), seeds.texts, _PLAIN),
    "prompts-jsonl": Target(_reader_of_prompts(".jsonl"), seeds.json_lines, mutation.mutate_lines),
    "prompts-parquet": Target(_reader_of_prompts(".parquet"), seeds.parquets, _PLAIN),
    "lens": Target(read_lens_file, seeds.lenses, _TENSORS),
    "registry": Target(read_registry, seeds.registries, mutation.mutate_files(_JSON, _TENSORS)),
    "model": Target(read_model, seeds.models, mutation.mutate_files(*[_JSON] * 3, _TENSORS)),
    "gguf": Target(read_gguf, seeds.ggufs, mutation.mutate_gguf, slow=20),
    "safetensors": Target(_reader_of_tensors(".safetensors"), seeds.safetensors, _TENSORS),
    "npy": Target(_reader_of_tensors(".npy"), seeds.npys, mutation.mutate_npy),
    "npz": Target(_reader_of_tensors(".npz"), seeds.npzs, mutation.mutate_zip(_by_name)),
    "pt": Target(_reader_of_tensors(".pt"), seeds.torch_files, mutation.mutate_zip(_by_name)),
    "option": Target(read_option, seeds.options, mutation.mutate_text),
    **{
        f"leak-{name}": Target(read_leak, begun, mutate, slow=3)
        for name, (begun, mutate) in leaks.FAMILIES.items()
    },
}
