"""Lenses handed on: pushed, pulled, verified, and given by their file; what is not as stated is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors import safe_open

import preimage
from preimage.errors import ModelError, OptionError
from preimage.inversion import pull_lenses, push_lenses, verify_lenses
from preimage.inversion.proposers import lens_places, lens_repository
from preimage.inversion.proposers.lens_files import (
    cached_path,
    default_path,
    find_lens,
    read_info,
    read_lens,
    save_lens,
)
from preimage.inversion.proposers.lens_places import FolderPlace, HubPlace, place_of
from preimage.models import LanguageModel, tokenizer_hash
from preimage.observations import Site
from preimage.storage import write_tensors
from preimage.training import LensOptions, train_lens
from preimage.training.lenses import held_out
from support.folders import VOCABULARY, make_tokenizer
from support.refusing import refused
from support.tiny import build, random_ids

QUICK = LensOptions(steps=12, batch_tokens=256, length=8, rank=8, hidden=16)
OTHER = "f" * 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return preimage.load(build("llama", vocab_size=VOCABULARY), tokenizer=make_tokenizer())


@pytest.fixture(scope="module")
def lens(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lens") / "my.safetensors"
    train_lens(model, 2, "random", QUICK, out=path)
    return path


@pytest.fixture
def folder(lens: Path, tmp_path: Path) -> Path:
    """A repository with one lens."""
    push_lenses([lens], tmp_path / "lenses")
    return tmp_path / "lenses"


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def relist(folder: Path, **changes: Any) -> None:
    """Change what the registry says of its one lens."""
    registry = folder / "lenses.json"
    document = json.loads(registry.read_text())
    (row,) = document["lenses"]
    row |= changes
    registry.write_text(json.dumps(document))


def rewritten(lens: Path, to: Path, **changes: Any) -> Path:
    """A copy of a lens that says something else of itself."""
    with safe_open(lens, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(file.metadata()["about"])
    return write_tensors(to, tensors, about | changes)


def test_a_pushed_lens_is_pulled_found_and_used(model: LanguageModel, lens: Path, folder: Path) -> None:
    (row,) = json.loads((folder / "lenses.json").read_text())["lenses"]
    content = lens.read_bytes()
    assert (row["bytes"], row["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert (row["layer"], row["place"], row["weight_hash"]) == (2, "residual", model.identity.weight_hash)
    assert row["tokenizer_hash"] == tokenizer_hash(make_tokenizer())
    assert row["held_out"] == read_info(lens).ranks
    assert (folder / row["file"]).read_bytes() == content
    assert find_lens(model, 2) is None
    (pulled,) = pull_lenses(folder, model)
    assert pulled.path == default_path(model, 2)
    assert pulled.path.read_bytes() == content
    assert find_lens(model, 1) == pulled
    ids = random_ids(10, vocabulary=VOCABULARY)
    (found,) = preimage.invert(model, preimage.capture(model, [ids], layers=1))
    assert (found.status, list(found.token_ids), found.proposer) == ("recovered", ids, "lens-2")


def test_a_lens_for_the_same_purpose_is_replaced(model: LanguageModel, lens: Path, folder: Path) -> None:
    before = files_in(folder)
    better = rewritten(lens, folder.parent / "better", training={"steps": 99})
    keys = save_lens(
        train_lens(model, Site(1, "keys"), "random", QUICK).lens, folder.parent / "keys",
        tap=Site(1, "keys", "before"), model=model, training={}, ranks={},
    )  # fmt: skip
    push_lenses([better, keys], str(folder))
    rows = json.loads((folder / "lenses.json").read_text())["lenses"]
    assert [(row["layer"], row["place"]) for row in rows] == [(2, "residual"), (1, "keys")]
    assert files_in(folder) == sorted([*(row["file"] for row in rows), "lenses.json"])
    assert len({*before, *files_in(folder)}) == 4  # the first lens is gone
    (of_keys,) = pull_lenses(folder, model, 1)
    assert of_keys.path == default_path(model, Site(1, "keys"))
    assert find_lens(model, Site(1, "keys")) == of_keys
    assert find_lens(model, 2) is None
    assert [info.training for info in pull_lenses(folder, model)] == [{"steps": 99}, {}]
    error = refused(ModelError, lambda: push_lenses([better, lens], folder))
    assert "two lenses for layer 2" in error.message
    error = refused(ModelError, lambda: pull_lenses(folder, model, 3))
    assert "no lens for layer 3; it has layers 1, 2" in error.message


def test_an_interrupted_push_leaves_the_repository_as_it_was(
    lens: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    other = rewritten(lens, folder.parent / "other", training={"steps": 99})

    def interrupted(source: Path, target: Path, most: int) -> tuple[int, str]:
        target.write_bytes(source.read_bytes()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(lens_places, "copy_hashed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        push_lenses([other], folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_what_is_no_lens_is_not_pushed(lens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(lens.read_bytes()[:-50])
    wide = rewritten(lens, tmp_path / "wide", shape={**read_info(lens).shape.to_dict(), "rank": 10**9})
    with safe_open(lens, framework="pt") as file:
        empty = write_tensors(tmp_path / "empty", {}, json.loads(file.metadata()["about"]))
    for wrong in (broken, wide, empty, tmp_path / "nowhere"):
        refused(ModelError, lambda wrong=wrong: push_lenses([wrong], tmp_path / "lenses"))
    monkeypatch.setattr(lens_repository, "_MOST_BYTES", 1000)
    error = refused(ModelError, lambda: push_lenses([lens], tmp_path / "lenses"))
    assert "A lens has 1000 at most" in error.hint
    assert not (tmp_path / "lenses").exists()


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def claim_other_weights(file: Path) -> None:
    rewritten(file, file, weight_hash=OTHER)
    relist(file.parent, bytes=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())


def claim_other_sizes(file: Path) -> None:
    rewritten(file, file, shape={**read_info(file).shape.to_dict(), "hidden": 17})
    relist(file.parent, bytes=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte": (flip_a_byte, "its sha256 is"),
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes, the registry says"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b" "), "at most are expected"),
    "another size": (lambda file: relist(file.parent, bytes=file.stat().st_size + 1), "the registry says"),
    "too large": (lambda file: relist(file.parent, bytes=2**30 + 1), "its bytes is 1073741825"),
    "other weights": (claim_other_weights, "it says weight_hash ffffffffffff of itself"),
    "other sizes": (claim_other_sizes, "it is not a lens"),
    "another layer": (lambda file: relist(file.parent, layer=1), "it says layer 2 of itself"),
    "no layer": (lambda file: relist(file.parent, layer=True), "its layer is True"),
    "another place": (lambda file: relist(file.parent, place="../x"), "it is for '../x'"),
    "better ranks": (lambda file: relist(file.parent, held_out={}), "it says held_out"),
    "ranks of nothing": (lambda file: relist(file.parent, held_out={"prose": {}}), "its held_out is"),
    "another tokenizer": (lambda file: relist(file.parent, tokenizer_hash=OTHER), "with the tokenizer ffff"),
    "a way out": (lambda file: relist(file.parent, file="../x"), "its file is '../x'"),
    "an absolute way": (lambda file: relist(file.parent, file="/etc/hosts"), "its file is '/etc/hosts'"),
    "a hidden way": (lambda file: relist(file.parent, file="a..b"), "its file is 'a..b'"),
    "no name": (lambda file: relist(file.parent, file=None), "its file is None"),
    "a missing file": (lambda file: file.unlink(), "has no layer-2"),
    "no registry": (lambda file: (file.parent / "lenses.json").unlink(), "has no lenses.json"),
    "no json": (lambda file: (file.parent / "lenses.json").write_text("{"), "is not a registry"),
    "no text": (lambda file: (file.parent / "lenses.json").write_bytes(b"\xff"), "is not a registry"),
    "a list": (lambda file: (file.parent / "lenses.json").write_text("[]"), "its schema is None"),
    "a deep list": (lambda file: (file.parent / "lenses.json").write_text("[" * 10**5), "is not a registry"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_as_stated_is_refused(name: str, model: LanguageModel, folder: Path, cache: Path) -> None:
    change, words = WRONG[name]
    (file,) = folder.glob("*.safetensors")
    change(file)
    error = refused(ModelError, lambda: pull_lenses(folder, model))
    assert words in error.message
    assert not files_in(cache)


def test_one_wrong_lens_means_that_none_is_taken(model: LanguageModel, lens: Path, folder: Path) -> None:
    path = cached_path(model.identity.weight_hash, 2)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"as it was")
    (row,) = push_lenses([rewritten(lens, folder.parent / "one", layer=1)], folder)
    flip_a_byte(folder / row.file)
    refused(ModelError, lambda: pull_lenses(folder, model))
    assert files_in(path.parent) == [path.name]
    assert path.read_bytes() == b"as it was"


def test_lenses_for_other_weights_are_named(model: LanguageModel, folder: Path, cache: Path) -> None:
    other = preimage.load(build("llama", seed=1, vocab_size=VOCABULARY))
    error = refused(ModelError, lambda: pull_lenses(folder, other))
    assert f"has lenses for {model.name} (weights {model.identity.weight_hash[:12]})" in error.message
    assert not files_in(cache)
    refused(ModelError, lambda: verify_lenses(folder, other))
    (pulled,) = pull_lenses(folder)  # for any weights
    assert find_lens(model, 2) == pulled
    assert find_lens(other, 2) is None


def test_sizes_no_model_has_are_not_served(model: LanguageModel, lens: Path, tmp_path: Path) -> None:
    """A file may say of itself what it likes, the right weights too."""
    narrow = train_lens(preimage.load(build("llama", hidden_size=16)), 2, "random", QUICK).lens
    path = save_lens(narrow, tmp_path / "narrow", tap=2, model=model, training={}, ranks={})
    refused(ModelError, lambda: read_lens(path, model))
    path = rewritten(lens, tmp_path / "high", layer=77)
    refused(ModelError, lambda: read_lens(path, model))


def test_verifying(model: LanguageModel, lens: Path, folder: Path, tmp_path: Path) -> None:
    (row,) = json.loads((folder / "lenses.json").read_text())["lenses"]
    (good,) = verify_lenses(folder, model, held_out)
    assert good.problems == ()
    assert good.stated == row["held_out"]
    assert good.measured is not None
    assert good.measured.keys() == {"prose", "code", "random"}
    (alone,) = verify_lenses(lens, model, held_out)
    assert (alone.file, alone.problems, alone.measured) == (str(lens), (), good.measured)

    ranks = {kind: {**shares, "rank0": shares["rank0"] + 0.03} for kind, shares in row["held_out"].items()}
    boasting = rewritten(lens, tmp_path / "boasting", ranks=ranks, tokenizer_hash=OTHER)
    (check,) = verify_lenses(boasting, model, held_out)
    assert len(check.problems) == 4
    assert check.problems[0].startswith("it was trained with the tokenizer ffffffffffff")
    shown = {kind: shares["rank0"] for kind, shares in (check.measured or {}).items()}
    assert f"of held-out random it names {shown['random']:.2%} first, not " in " ".join(check.problems)
    assert verify_lenses(boasting)[0].problems == ()  # without a model nothing is measured

    (of_others,) = verify_lenses(rewritten(lens, tmp_path / "others", weight_hash=OTHER), model)
    assert of_others.problems == ()  # almost the same weights are served
    other = preimage.load(build("llama", seed=1, vocab_size=VOCABULARY))
    (of_others,) = verify_lenses(lens, other, held_out)
    assert "was trained for" in of_others.problems[0]

    shutil.copy(lens, folder / "mine.safetensors")
    (folder / row["file"]).unlink()
    missing, unlisted = verify_lenses(folder)
    assert (missing.file, missing.problems) == (row["file"], ("it is missing",))
    assert (unlisted.file, unlisted.problems) == ("mine.safetensors", ("it is not listed",))
    shutil.copy(lens, folder / row["file"])
    flip_a_byte(folder / row["file"])
    assert verify_lenses(folder)[0].problems[0].startswith("its sha256 is")
    (broken,) = verify_lenses(write_tensors(tmp_path / "broken", {}))
    assert "is not a lens" in broken.problems[0]
    refused(ModelError, lambda: verify_lenses(tmp_path / "nowhere"))


def test_a_given_lens_proposes(model: LanguageModel, lens: Path) -> None:
    ids = random_ids(10, vocabulary=VOCABULARY)
    states = preimage.capture(model, [ids], layers=[1, 2, 3])
    for layer in (1, 2):
        (found,) = preimage.invert(model, states, layer, lens=str(lens))
        assert (found.status, list(found.token_ids), found.proposer) == ("recovered", ids, "lens-2")
    (found,) = preimage.invert(model, states, 2, lens=lens, proposers="codebook,lens")
    assert found.proposer == "lens-2+codebook"
    (found,) = preimage.invert(model, states, 2)
    assert "lens" not in found.proposer
    options = preimage.InvertOptions(lens=lens)
    assert (options.chosen_proposers, options.to_dict()["lens"]) == (("lens",), str(lens))


def test_a_given_lens_goes_before_those_that_are_found(
    model: LanguageModel, lens: Path, folder: Path
) -> None:
    pull_lenses(folder, model)
    higher = folder.parent / "higher"
    train_lens(model, 3, "random", QUICK, out=higher)
    states = preimage.capture(model, [random_ids(6, vocabulary=VOCABULARY)], layers=2)
    assert preimage.invert(model, states)[0].proposer == "lens-2"
    assert preimage.invert(model, states, lens=higher)[0].proposer == "lens-3"
    assert preimage.invert(model, states)[0].proposer == "lens-2"


def test_a_lens_that_does_not_fit_is_refused(model: LanguageModel, lens: Path, tmp_path: Path) -> None:
    ids = [random_ids(6, vocabulary=VOCABULARY)]
    states = preimage.capture(model, ids, layers=[2, 3])

    def inverted(layer: int = 2, seen: Any = states, by: LanguageModel = model, **given: Any) -> object:
        return preimage.invert(by, seen, layer, **({"lens": lens} | given))

    error = refused(OptionError, lambda: inverted(3))
    assert "is for layer 2, the states are layer 3" in error.message
    keys = preimage.capture(model, ids, 2, observe="keys")
    assert "the states are keys of layer 2" in refused(OptionError, lambda: inverted(seen=keys)).message
    last = preimage.capture(model, ids, 2, positions="last")
    assert "without a lens" in refused(OptionError, lambda: inverted(seen=last)).message
    other = preimage.load(build("llama", seed=1, vocab_size=VOCABULARY))
    assert "was trained for" in refused(ModelError, lambda: inverted(by=other)).message
    (tmp_path / "no").write_text("no lens")
    assert "is not a lens" in refused(ModelError, lambda: inverted(lens=tmp_path / "no")).message
    for wrong in ({"method": "sipit"}, {"method": "brute-force"}, {"proposers": "codebook,prior"}):
        refused(OptionError, lambda wrong=wrong: inverted(**wrong))


def test_keys_beside_values_are_read_by_a_given_lens_of_one_half(
    model: LanguageModel, tmp_path: Path
) -> None:
    train_lens(model, Site(2, "values"), "random", QUICK, out=tmp_path / "values")
    ids = random_ids(6, vocabulary=VOCABULARY)
    states = preimage.capture(model, [ids], 2, observe="kv")
    (found,) = preimage.invert(model, states, lens=tmp_path / "values")
    assert (list(found.token_ids), found.proposer) == (ids, "lens-2.values")


def test_a_tokenizers_hash(lens: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    known = tokenizer_hash(tokenizer)
    tokenizer(["a b c"], truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == known  # how it was called says nothing of it
    assert tokenizer_hash(make_tokenizer(adds_bos=False)) != known
    slow = SimpleNamespace(get_vocab=lambda: {"b": 1, "a": 0})
    same = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    assert tokenizer_hash(slow) == tokenizer_hash(same) != known
    assert tokenizer_hash(None) is None
    with safe_open(lens, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
    del about["tokenizer_hash"]
    older = write_tensors(tmp_path / "older", {}, about)
    assert read_info(older).tokenizer_hash is None


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("owner/name", HubPlace), ("./owner/name", FolderPlace), ("/owner/name", FolderPlace),
        ("owner/name/", FolderPlace), ("name", FolderPlace), ("../name", FolderPlace), ("a/b/c", FolderPlace),
    ],
)  # fmt: skip
def test_what_a_place_is_taken_for(
    given: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert type(place_of(given)) is kind
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert type(place_of(given)) is FolderPlace


class Hub:
    """The hub as its client has it, without a network: one repository, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made, self.commits = folder, [], []

    def model_info(self, name: str, **_: Any) -> Any:
        if not self.folder.is_dir():
            response = SimpleNamespace(headers={}, request=None, status_code=404)
            raise RepositoryNotFoundError("none", response=response)
        files = [
            SimpleNamespace(rfilename=path.name, size=path.stat().st_size) for path in self.folder.iterdir()
        ]
        return SimpleNamespace(sha=f"commit {len(self.commits)}", siblings=files)

    def create_repo(self, name: str, *, exist_ok: bool) -> None:
        assert exist_ok
        self.made.append(name)

    def create_commit(
        self, name: str, operations: list[Any], *, commit_message: str, parent_commit: Any
    ) -> None:
        self.folder.mkdir(exist_ok=True)
        for one in operations:
            path = self.folder / one.path_in_repo
            if isinstance(one, huggingface_hub.CommitOperationDelete):
                path.unlink()
                continue
            given = one.path_or_fileobj
            path.write_bytes(given if isinstance(given, bytes) else Path(given).read_bytes())
        self.commits.append((name, commit_message, parent_commit))

    def hf_hub_download(self, name: str, file: str, *, revision: str | None, local_files_only: bool) -> str:
        assert (revision, local_files_only) == (f"commit {len(self.commits)}", False)
        return str(self.folder / file)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return hub


def test_the_hub_is_given_one_commit(model: LanguageModel, lens: Path, hub: Hub, tmp_path: Path) -> None:
    (entry,) = push_lenses([lens], "owner/lenses")
    assert hub.made == ["owner/lenses"]
    assert hub.commits == [("owner/lenses", f"Lenses: {entry.file}", None)]
    assert files_in(hub.folder) == sorted([entry.file, "lenses.json"])
    (again,) = push_lenses([rewritten(lens, tmp_path / "again", training={"steps": 99})], "owner/lenses")
    assert hub.commits[1][2] == "commit 1"  # refused where there is another meanwhile
    assert hub.made == ["owner/lenses"]
    assert files_in(hub.folder) == sorted([again.file, "lenses.json"])
    (pulled,) = pull_lenses("owner/lenses", model)
    assert (pulled.path, pulled.training) == (default_path(model, 2), {"steps": 99})


def test_a_hub_that_refuses_is_one_short_error(
    model: LanguageModel, lens: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(ModelError, lambda: pull_lenses("owner/lenses", model))
    assert "the hub does not have it" in error.message

    def refuse(*_: object, **__: object) -> None:
        response = SimpleNamespace(headers={}, request=None, status_code=401)
        raise huggingface_hub.errors.HfHubHTTPError("401", response=response)

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "create_repo", refuse)
    assert "token" in refused(ModelError, lambda: push_lenses([lens], "owner/lenses")).message
    monkeypatch.setattr(hub, "model_info", unreachable)
    for action in (lambda: push_lenses([lens], "owner/lenses"), lambda: pull_lenses("owner/lenses", model)):
        assert "the hub cannot be reached" in refused(ModelError, action).message
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "offline" in refused(ModelError, lambda: push_lenses([lens], "owner/lenses")).message


def test_offline_what_the_hubs_client_kept_is_used_and_nobody_asked(
    model: LanguageModel, folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def kept(name: str, file: str, *, revision: str | None, local_files_only: bool) -> str:
        assert (name, revision, local_files_only) == ("owner/lenses", None, True)
        if not (folder / file).exists():
            raise FileNotFoundError(file)
        return str(folder / file)

    monkeypatch.setattr(hub, "hf_hub_download", kept)
    monkeypatch.setattr(hub, "model_info", None)
    (pulled,) = pull_lenses("owner/lenses", model)
    assert pulled.path == default_path(model, 2)
    (folder / "lenses.json").unlink()
    error = refused(ModelError, lambda: pull_lenses("owner/lenses", model))
    assert "not in the hub's cache (offline)" in error.message
