"""Every next token of a prefix, against plain passes over the vocabulary."""

from __future__ import annotations

import json
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from torch import Tensor

import preimage
from preimage.collisions.structure import IDENTICAL_EMBEDDINGS, UNEXPLAINED
from preimage.distances import norms
from preimage.errors import LayerError, OptionError, PreimageError, PromptError, RunFolderError
from preimage.layers import Layer
from preimage.models import LanguageModel
from support.collisions import PREFIXES, all_distances, changed, ends, flat, results_of, with_twins
from support.folders import VOCABULARY as TEXT_VOCABULARY
from support.folders import make_tokenizer
from support.refusing import refused
from support.tiny import VOCABULARY, build, random_ids, tiny


def full_passes(model: LanguageModel, prefix: list[int], layer: Layer) -> Tensor:
    """The state of every token after the prefix, without a cache: whole prompts from their first token on."""
    prompts = torch.tensor([[*prefix, token] for token in range(model.vocab_size)])
    return model.states(prompts, (layer,))[layer][:, -1]


@pytest.mark.parametrize("layer", [0, 2, "final"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_scan_agrees_with_plain_passes_over_the_vocabulary(name: str, layer: Layer) -> None:
    model = tiny(name)
    scan = preimage.scan_continuations(model, [*PREFIXES, PREFIXES[0]], layer, closest=5)
    assert [found.prefix for found in scan.prefixes] == [tuple(prefix) for prefix in PREFIXES]
    assert (scan.layer, scan.unexplained, scan.model) == (layer, 0, model.identity.to_dict())
    for found in scan.prefixes:
        spacing, states = found.spacing, full_passes(model, list(found.prefix), layer)
        away, noise = all_distances(states), 2 * spacing.noise_floor * float(norms(states).max())
        pairs = sorted((float(away[i, j]), i, j) for i, j in combinations(range(VOCABULARY), 2))
        assert (found.layer, spacing.states, spacing.pairs) == (layer, VOCABULARY, len(pairs))
        assert found.margin == spacing.margin
        assert abs(found.margin - pairs[0][0]) <= 2 * noise
        for pair, (distance, i, j) in zip(spacing.closest, pairs, strict=False):
            assert abs(pair.distance - distance) <= 2 * noise
            assert abs(pair.distance - float(away[pair.first, pair.second])) <= 2 * noise
            assert (pair.first_ids, pair.second_ids) == ((pair.first,), (pair.second,))
            assert (i, j) == (pair.first, pair.second) or abs(pairs[0][0] - pairs[1][0]) < noise
        assert spacing.mean_norm == pytest.approx(float(norms(states).mean()), rel=1e-5)
        assert abs(spacing.quantiles["1"][0] - pairs[-1][0]) <= 1e-2 * pairs[-1][0]
        assert (spacing.within_noise, spacing.listed) == (0, ())


@pytest.mark.parametrize("layer", [0, 2, "final"])
def test_tokens_with_one_embedding_do_not_count_for_the_margin(layer: Layer) -> None:
    model = with_twins("llama")
    scan = preimage.scan_continuations(model, PREFIXES, layer)
    assert scan.unexplained == 0
    for found in scan.prefixes:
        spacing = found.spacing
        assert spacing.explained == {IDENTICAL_EMBEDDINGS: 1}
        assert (ends(spacing.listed), spacing.listed[0].explanation) == ([(5, 6)], IDENTICAL_EMBEDDINGS)
        assert spacing.closest_pair == spacing.listed[0]
        assert spacing.closest_pair.distance <= (0.0 if layer == 0 else spacing.closest_pair.noise_radius)
        away = all_distances(full_passes(model, list(found.prefix), layer))
        away[5, 6] = away[6, 5] = torch.inf
        noise = 2 * spacing.noise_floor * 2 * spacing.mean_norm
        smallest = float(away.fill_diagonal_(torch.inf).min())
        assert found.margin is not None
        assert abs(found.margin - smallest) <= noise
        assert (5, 6) not in ends(spacing.closest)


def test_the_longest_prefix_leaves_room_for_one_token() -> None:
    (found,) = preimage.scan_continuations(tiny("llama"), [random_ids(127)], 1).prefixes
    assert (len(found.prefix), found.spacing.states) == (127, VOCABULARY)


def test_tokens_that_only_this_model_confuses_leave_no_margin() -> None:
    scan = preimage.scan_continuations(changed("llama", flat), [[3, 4]], "final")
    (found,) = scan.prefixes
    assert scan.unexplained == found.spacing.unexplained == VOCABULARY * (VOCABULARY - 1) // 2
    assert (found.margin, found.spacing.closest[0].explanation) == (0.0, UNEXPLAINED)
    assert len(found.spacing.closest) == len(found.spacing.listed) == 10


def test_text_prefixes_and_their_tables() -> None:
    model = preimage.load(build("llama", vocab_size=TEXT_VOCABULARY), tokenizer=make_tokenizer())
    scan = preimage.scan_continuations(model, ["the <b>", "a"], 1, closest=1)
    assert [found.text for found in scan.prefixes] == ["<s>the <b>", "<s>a"]
    pair = scan.prefixes[0].spacing.closest[0]
    assert pair.first_text == model.decode(pair.first_ids)
    assert [row["text"] for row in scan.rows()] == ["<s>the <b>", "<s>a"]
    assert "&lt;s&gt;the &lt;b&gt;" in scan._repr_html_()
    assert preimage.scan_continuations(model, ["a"], 1, bos=False).prefixes[0].text == "a"
    untold = preimage.scan_continuations(tiny("llama"), [[3, 4]], 1)
    assert untold.rows()[0]["text"] == "[3, 4]"


def test_a_scan_is_saved_and_continued(compared: list[int], tmp_path: Path) -> None:
    model = tiny("llama")
    scan = preimage.scan_continuations(model, PREFIXES, 2, out=tmp_path / "whole")
    assert scan == preimage.scan_continuations(model, PREFIXES, 2)
    saved = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert (saved["command"], saved["state"]) == ("continuations", "done")
    assert saved["results"] == json.loads(json.dumps(scan.to_dict()))
    assert [entry["margin"] for entry in saved["results"]["prefixes"]] == [f.margin for f in scan.prefixes]
    assert parquet.read_table(tmp_path / "whole" / "prefixes.parquet").to_pylist() == scan.rows()
    out, copies = tmp_path / "run", []

    def copy_folder(*_: object) -> None:
        copies.append(shutil.copytree(out, tmp_path / f"killed-{len(copies)}"))

    preimage.scan_continuations(model, PREFIXES, 2, out=out, progress=copy_folder)
    copy_folder()
    for done, folder in enumerate(copies):
        compared.clear()
        assert preimage.scan_continuations(model, PREFIXES, 2, out=folder) == scan
        assert len(compared) == max(0, len(PREFIXES) - done)
        assert results_of(folder) == results_of(tmp_path / "whole")
    changes: dict[str, Any] = {
        "model": (tiny("llama", 1), PREFIXES, 2, {}), "prefixes": (model, PREFIXES[:2], 2, {}),
        "layer": (model, PREFIXES, 3, {}), "options": (model, PREFIXES, 2, {"closest": 3}),
    }  # fmt: skip
    for field, (other, prefixes, layer, options) in changes.items():
        with pytest.raises(RunFolderError, match=f"was begun with another {field}: "):
            preimage.scan_continuations(other, prefixes, layer, out=copies[1], **options)


@pytest.mark.parametrize(
    ("kind", "prefixes", "change", "message"),
    [
        (PromptError, [[3], [4] * 128], {}, "Prefix 1 has 128 tokens, as many as the model takes."),
        (PromptError, [], {}, "No prompt was given."),
        (PromptError, [[VOCABULARY]], {}, f"Prompt 0 has token id {VOCABULARY}"),
        (LayerError, [[3]], {"layer": 9}, "There is no layer 9."),
        (LayerError, [[3]], {"layer": "1,2"}, "One layer is needed here"),
        (OptionError, [[3]], {"thresholds": (1e-12,)}, "is below the noise floor of layer final"),
        (OptionError, [[3]], {"thresholds": (-1.0,)}, "A threshold is -1.0."),
        (OptionError, [[3]], {"closest": 0}, "closest is 0."),
    ],
)
def test_a_scan_of_nothing_that_can_be_scanned(
    kind: type[PreimageError], prefixes: list[Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    error = refused(kind, lambda: preimage.scan_continuations(tiny("llama"), prefixes, out=out, **change))
    assert message in error.message
    assert not out.exists()
