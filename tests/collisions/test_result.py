"""Results of collision searches: saved, read again, drawn, and their closest prompts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import preimage
from preimage.collisions import closest_prompts
from preimage.collisions.result import CollisionAudit, Continuation, LayerCollisions
from preimage.errors import OptionError, RunFolderError
from preimage.figures import spacing_figure
from preimage.storage import Run, decode
from support.collisions import FAMILY, PREFIXES, PROMPTS, Stopped, search, stop_at, with_twins
from support.refusing import refused
from support.tiny import tiny


def test_the_prompts_of_the_closest_pairs(whole: Path, tmp_path: Path) -> None:
    audit = search(whole)
    found = closest_prompts(audit)
    pairs = audit.at("final").spacing.closest
    assert found[:2] == [pairs[0].first_ids, pairs[0].second_ids]
    assert set(found) == {ids for pair in pairs for ids in (pair.first_ids, pair.second_ids)}
    assert len(found) == len(set(found))
    assert closest_prompts(whole) == closest_prompts(str(whole)) == found
    assert closest_prompts(whole, 1) == closest_prompts(audit, 1)
    assert closest_prompts(audit, 1)[0] == audit.at(1).spacing.closest[0].first_ids
    assert closest_prompts(audit, count=3) == found[:3]
    for of in (audit, whole):
        error = refused(OptionError, lambda: closest_prompts(of, 7))  # noqa: B023
        assert (error.message, error.hint) == ("The audit has no layer 7.", "It has 0, 1, 2, 3, final.")
        for count in (0, -1):
            refused(OptionError, lambda: closest_prompts(of, count=count))  # noqa: B023
    with pytest.raises(Stopped):
        search(tmp_path / "half", progress=stop_at("layers compared", 2))
    Run({"command": "invert"}, tmp_path / "other").finish(list)
    for name in ("half", "other"):
        error = refused(RunFolderError, lambda: closest_prompts(tmp_path / name))  # noqa: B023
        assert error.message == f"{tmp_path / name} holds no finished collision search."
    refused(RunFolderError, lambda: closest_prompts(tmp_path / "nowhere"))


def test_results_survive_json(tmp_path: Path) -> None:
    audit = preimage.find_collisions(tiny("llama"), [*PROMPTS, *FAMILY], thresholds=(0.5,))
    for found in audit.layers:
        assert decode(LayerCollisions, asdict(found)) == found
        assert decode(LayerCollisions, json.loads(json.dumps(asdict(found)))) == found
    scan = preimage.scan_continuations(with_twins("llama"), PREFIXES, 2)
    for prefix in scan.prefixes:
        assert decode(Continuation, json.loads(json.dumps(asdict(prefix)))) == prefix
    for kind, result in (("collisions", audit), ("continuations", scan)):
        saved = json.loads(result.save(tmp_path / f"{kind}.json").read_text())
        assert (saved["schema"], saved["kind"], saved["unexplained"]) == ("preimage/9", kind, 0)
        assert saved == {"schema": "preimage/9", "kind": kind, **json.loads(json.dumps(result.to_dict()))}
        assert (
            type(result).load(tmp_path / f"{kind}.json") == type(result).from_dict(result.to_dict()) == result
        )
    error = refused(RunFolderError, lambda: CollisionAudit.load(tmp_path / "continuations.json"))
    assert error.message.endswith("is not a saved collisions: its kind is 'continuations', not 'collisions'.")


def test_the_figure_has_a_curve_for_every_quantity() -> None:
    audit = preimage.find_collisions(tiny("llama"), [*PROMPTS, *FAMILY])
    figure = spacing_figure(audit)
    curves = {curve.name: list(curve.y) for curve in figure.data}
    assert list(curves) == [
        "maximum", "quantile 0.5", "quantile 0.01", "closest pair that must differ", "noise radius",
        "closest hard pair that must differ",
    ]  # fmt: skip
    assert all(list(curve.x) == ["0", "1", "2", "3", "final"] for curve in figure.data)
    spacings = [found.spacing for found in audit.layers]
    assert curves["closest pair that must differ"] == [spacing.margin for spacing in spacings]
    assert curves["maximum"] == [spacing.quantiles["1"][0] for spacing in spacings]
    assert curves["noise radius"] == [s.noise_radius for s in spacings]
    hard = curves["closest hard pair that must differ"]
    for found, value in zip(audit.layers[1:], hard[1:], strict=True):
        assert value == min(k.margin for k in found.hard if k.margin is not None)
    assert figure.layout.yaxis.type == "log"
    assert figure.layout.xaxis.type == "category"
