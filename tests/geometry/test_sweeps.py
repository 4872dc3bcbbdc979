"""Propagated quantisation, subsets, sweeps, another quantiser's word, and figures for print."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import preimage
from preimage.bench import bench_geometry
from preimage.cli import main
from preimage.distances import PairScan, row_distances, same_rows, some_near
from preimage.distances.prompt_distances import PromptDistances
from preimage.errors import BundleError, OptionError, PromptError
from preimage.figures import length_figure, save_figures
from preimage.geometry import (
    GeometryOptions,
    GeometrySweep,
    Quantiser,
    SweepOptions,
    measure_geometry,
    propagate,
    sweep_geometry,
)
from preimage.geometry.layer import measure_subsets
from preimage.geometry.quantiser import GRANULARITIES
from preimage.geometry.result import Geometry
from preimage.layers import parse_layers
from preimage.models import LanguageModel, ModelFiles, loading
from preimage.models.float64 import double_copy, in_double
from preimage.prompts import PromptOptions, Vocabulary, gather
from preimage.storage import read_json
from support.tiny import NAMES, VOCABULARY, build, random_ids, tiny

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

# --- quantisation carried on ------------------------------------------------------------------


def carried_by_hooks(
    model: LanguageModel, ids: list[list[int]], quantiser: Quantiser
) -> dict[object, Tensor]:
    """The stored states by another way: one plain pass whose blocks are told to store what they return."""
    kept: dict[object, Tensor] = {}

    def store(layer: object, states: Tensor) -> Tensor:
        flat = states.flatten(0, 1)
        grid = quantiser.fit(flat)
        codes = grid.encode(flat)
        kept[layer] = codes.view(states.shape)[:, -1]
        return grid.decode(codes).to(states.dtype).view(states.shape)

    def enter(_: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> object:
        if args:
            return (store(0, args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": store(0, kwargs["hidden_states"])}

    def leave(layer: int):  # type: ignore[no-untyped-def]
        def hook(_: object, __: object, output: Tensor | tuple[Tensor, ...]) -> object:
            if isinstance(output, tuple):
                return (store(layer, output[0]), *output[1:])
            return store(layer, output)

        return hook

    blocks = model.anatomy.blocks
    handles = [blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [block.register_forward_hook(leave(number)) for number, block in enumerate(blocks, start=1)]
    with torch.no_grad(), in_double():
        final = model.anatomy.backbone(torch.tensor(ids), use_cache=False).last_hidden_state
        store("final", final)
    for handle in handles:
        handle.remove()
    return kept


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("granularity", ["layer", "channel", "vector"])
def test_every_block_sees_what_was_stored(name: str, granularity: str) -> None:
    model = double_copy(tiny(name))
    ids = [random_ids(9, seed) for seed in range(12)]
    quantiser = Quantiser(5, granularity)
    expected = carried_by_hooks(model, ids, quantiser)
    layers = parse_layers("all", model.n_layers)
    found = propagate(model, ids, quantiser, layers)
    assert list(found) == list(layers)
    for layer in layers:
        # in float32 a block entered alone and one inside a pass differ in last bits, and a code may tip over
        assert torch.equal(found[layer].codes, expected[layer]), layer


def test_mixed_lengths_are_carried_on_prompt_by_prompt() -> None:
    """With steps of its own a vector does not see the others, so a prompt alone gives the same codes."""
    model, quantiser = double_copy(tiny("gpt2")), Quantiser(6, "vector")
    ids = [random_ids(length, length) for length in (5, 3, 5, 8)]
    together = propagate(model, ids, quantiser, [2, "final"])
    for row, prompt in enumerate(ids):
        alone = propagate(model, [prompt], quantiser, [2, "final"])
        for layer in (2, "final"):
            assert torch.equal(alone[layer].codes[0], together[layer].codes[row])


def test_many_bits_carried_on_change_little_and_few_bits_change_more() -> None:
    model = tiny("llama")
    states = preimage.capture(model, [random_ids(8, seed) for seed in range(30)], positions="last")
    carried = measure_geometry(states, bits=(None, 16, 3), propagate=True, model=model, subsets=0)
    stored = measure_geometry(states, bits=(None, 16, 3), subsets=0)
    layer = model.n_layers
    assert carried.layers == stored.layers
    full = carried.layers[layer].margin
    assert carried.quantised[16].layers[layer].margin == pytest.approx(full, rel=0.02)
    assert carried.quantised[3].layers[layer].margin != pytest.approx(full, rel=0.02)
    report = carried.quantised[3].layers[layer].quantised
    assert report is not None
    assert report.certified is None
    with pytest.raises(OptionError, match="needs the model"):
        measure_geometry(states, propagate=True)
    with pytest.raises(BundleError, match="made by"):
        measure_geometry(states, propagate=True, model=tiny("llama", 1))


# --- subsets ----------------------------------------------------------------------------------


def test_intervals_are_those_of_random_tenths() -> None:
    """100 pairs, 1 apart within and 100 between: how often a random tenth holds both of one is known."""
    x = torch.zeros(200, 101)
    for pair in range(100):
        x[2 * pair : 2 * pair + 2, pair] = 100 / 2**0.5
        x[2 * pair + 1, 100] = 1.0
    prompts = PromptDistances([[row] * 6 for row in range(200)])  # any two differ in all six tokens
    subsets = measure_subsets(x, prompts, GeometryOptions(subsets=100, seed=7))
    assert subsets is not None
    assert (subsets.count, subsets.size) == (100, 20)
    for name, apart in (("margin", 1), ("colipschitz", 6)):
        interval = subsets.intervals[name]
        assert (interval.low * apart, interval.high * apart) == pytest.approx((1, 100), rel=1e-3)
        share = (100 - interval.mean * apart) / 99  # of tenths that hold a pair
        # twenty of the hundred pairs, one of two each, drawn once each: no row twice, which would be 0 apart
        expected = 1 - math.comb(100, 20) * 2**20 / math.comb(200, 20)
        assert abs(share - expected) < 4 * (expected * (1 - expected) / 100) ** 0.5
        assert 0 < share < 1
    once, again, other = (
        measure_subsets(x, prompts, GeometryOptions(subsets=3, seed=seed)) for seed in (7, 7, 8)
    )
    assert once == again != other
    assert measure_subsets(x[:99], prompts.subset(torch.arange(99)), GeometryOptions(subsets=5)) is None
    assert measure_subsets(x, prompts, GeometryOptions(subsets=0)) is None


def test_intervals_of_states_that_are_all_alike_are_points() -> None:
    prompts = PromptDistances([[row] * 6 for row in range(200)])
    subsets = measure_subsets(torch.eye(200), prompts, GeometryOptions(subsets=3, quantile=0.3))
    assert subsets is not None
    for name, value in (("margin", 1.0), ("colipschitz", 1 / 6), ("nearest_colipschitz", 1 / 6)):
        for wanted in (name, f"{name}_quantile"):
            interval = subsets.intervals[wanted]
            assert (interval.mean, interval.low, interval.high) == pytest.approx((2**0.5 * value,) * 3)
    assert subsets.intervals["normalised_margin"].mean == pytest.approx(2**0.5)
    assert subsets.intervals["mean_norm"].mean == pytest.approx(1.0)
    assert subsets.intervals["anisotropy"].mean == pytest.approx(0.0, abs=1e-12)


def test_near_rows_are_other_rows_within_their_bounds() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (2, 3, 40, 256, 300, 1500):
        x = torch.randn(count, 9, generator=generator)
        x[count // 2] = x[0]
        scan = PairScan(x)
        if len(scan.rows.firsts) == 1:
            continue
        found, bounds = some_near(scan)
        some = torch.isfinite(bounds)
        assert bool(some.any(dim=1).all())
        rows = scan.rows.firsts[:, None].expand_as(found)[some]
        away = row_distances(x[rows], x[found[some]])
        assert bool((rows != found[some]).all())
        assert bool((away <= bounds[some]).all())
        nearest = scan.nearest.distances[scan.rows.firsts]
        reached = bounds.amin(dim=1) <= nearest * (1 + 1e-3)
        assert bool((reached | (nearest == 0)).all())


# --- sweeps -----------------------------------------------------------------------------------


def test_a_sweep_is_the_runs_one_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build("llama").save_pretrained(folder)
    options = GeometryOptions(bits=(None, 4), subsets=2)
    prompts = PromptOptions(count=120)
    quantisers = [Quantiser(), Quantiser(granularity="channel")]
    over = SweepOptions([str(folder)], lengths=(4, 7), dtypes=("float32", "float64"), quantisers=quantisers)

    def run_all() -> GeometrySweep:
        return sweep_geometry(over, "random", prompts=prompts, options=options, out=tmp_path / "out")

    sweep = run_all()
    assert len(sweep.runs) == 8
    assert len({run.setting.name for run in sweep.runs}) == 8
    run = sweep.runs[3]
    assert (run.setting.length, run.setting.dtype, run.setting.quantiser) == (7, "float32", "channel-absmax")
    model = preimage.load(folder)
    ids = gather("random", Vocabulary(None, VOCABULARY, model.max_length), PromptOptions(count=120, length=7))
    states = preimage.capture(model, ids, positions="last", batch_tokens=4096)
    assert run.geometry == measure_geometry(
        states, bits=(None, 4), quantiser=quantisers[1], subsets=2, model=model
    )
    assert not list((tmp_path / "out").rglob("states"))
    assert run_all() == sweep
    table = sweep.rows()
    assert len(table) == 8 * 2 * 5
    assert {row["length"] for row in table} == {4, 7}
    figure = length_figure(sweep.by_length())
    assert len(figure.data) == 4 * 3 * 2  # four series, three panels, all prompts and subsets
    saved = read_json(tmp_path / "out" / "sweep.json")["runs"][0]
    assert Geometry.from_dict(saved) == sweep.runs[0].geometry
    assert sweep.runs[0].geometry.length == 4
    assert GeometrySweep.load(tmp_path / "out" / "sweep.json") == sweep
    records = (tmp_path / "out" / run.setting.name / "record.jsonl").read_text().splitlines()
    assert len(records) == 1  # its folder was opened once


def test_a_sweep_needs_equally_many_prompts(tmp_path: Path) -> None:
    model = tiny("llama")
    (tmp_path / "p.jsonl").write_text(
        "\n".join(json.dumps({"token_ids": random_ids(20, s)}) for s in range(9))
    )
    with pytest.raises(OptionError, match=r"different numbers of prompts.*18 at .*, 10, 36 at .*, 5"):
        sweep_geometry(
            SweepOptions([model], lengths=(10, 5)), tmp_path / "p.jsonl", prompts=PromptOptions(bos=False)
        )
    with pytest.raises(PromptError, match="no pair"):
        sweep_geometry([model], "random", prompts=PromptOptions(count=1))
    with pytest.raises(OptionError, match="over nothing"):
        sweep_geometry([], "random")


def test_the_command_sweeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llama", "gpt2"):
        build(name).save_pretrained(tmp_path / name)
    models = f"{tmp_path / 'llama'},{tmp_path / 'gpt2'}"
    given = ["geometry", "--model", models, "--prompts", "random", "--count", "20", "--length", "4,6",
             "--bits", "4", "--device", "cpu", "--out", str(tmp_path / "out")]  # fmt: skip
    assert main([*given, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(Path(run["model"]).name, run["length"]) for run in document["runs"]] == [
        ("llama", 4), ("llama", 6), ("gpt2", 4), ("gpt2", 6),
    ]  # fmt: skip
    for name in ("layers.html", "depth.html", "lengths.html", "sweep.parquet"):
        assert (tmp_path / "out" / name).exists()
    assert main(given) == 0  # continued: everything is there
    assert "6-tokens" in capsys.readouterr().out
    single = [*given[:2], str(tmp_path / "gpt2"), *given[3:8], "8", "--propagate", "--json"]
    loaded: list[object] = []
    really = loading.load

    def load(given: ModelFiles, **options: str) -> LanguageModel:
        loaded.append(given)
        return really(given, **options)

    monkeypatch.setattr(loading, "load", load)
    assert main([*single, "--out", str(tmp_path / "one")]) == 0
    capsys.readouterr()
    assert len(loaded) == 1
    drawn = {f"{name}.html" for name in ("layers", "depth", "quantised", "near-collisions")}
    assert drawn | {"run.json", "items.jsonl", "layers.parquet", "record.jsonl"} == {
        path.name for path in (tmp_path / "one").iterdir()
    }  # nothing about lengths that were not asked for
    assert main([*single, "--out", str(tmp_path / "one")]) == 0  # continued: everything is there
    capsys.readouterr()
    for wrong in (["--length", "x"], ["--dtype", "float32,x"], ["--figures", "gif"], ["--subsets", "1"]):
        assert main([*given[:7], *wrong, "--json"]) == 2
        assert set(json.loads(capsys.readouterr().out)["error"]) == {"code", "message", "hint"}


def test_unexplained_collisions_are_exit_code_1_and_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As everywhere: what the model's structure or fewer bits make collide is a measurement."""
    module = build("llama")
    module.save_pretrained(tmp_path / "llama")
    with torch.no_grad():
        module.model.norm.weight.zero_()  # every state at "final" is 0
    module.save_pretrained(tmp_path / "flat")
    prompts = tmp_path / "p.jsonl"
    rows = [random_ids(6, seed) for seed in range(9)] + [[7, 7], [7, 7, 7]]
    prompts.write_text("".join(json.dumps({"token_ids": row}) + "\n" for row in rows))

    def run(model: str, *more: str) -> tuple[int, str]:
        given = ["geometry", "--model", str(tmp_path / model), "--prompts", str(prompts), "--bits", "2"]
        code = main([*given, "--device", "cpu", "--no-bos", *more])
        return code, capsys.readouterr().out

    code, out = run("llama", "--json")
    found = Geometry.from_dict(json.loads(out))
    assert (code, found.unexplained) == (0, 0)
    assert found.layers[0].collisions > 0  # the same last token
    assert sum(one.collisions for one in found.quantised[2].layers.values()) > 0
    code, out = run("flat", "--layers", "2,final", "--json")
    layers, pairs = json.loads(out)["layers"], len(rows) * (len(rows) - 1) // 2
    assert (code, layers["2"]["unexplained"]) == (1, 0)
    assert (layers["final"]["collisions"], layers["final"]["unexplained"]) == (pairs, pairs - 1)
    assert "layer final: 54 collisions in full precision, UNEXPLAINED" in run("flat")[1]
    states = preimage.capture(preimage.load(tmp_path / "flat"), rows[:9], "0,final", positions="last")
    states.save(tmp_path / "bundle")
    assert main(["geometry", str(tmp_path / "bundle"), "--bits", "none"]) == 1
    assert main(["collisions", "--model", str(tmp_path / "flat"), "--prompts", str(prompts), "--no-bos",
                 "--layers", "final", "--hard-bases", "0"]) == 1  # fmt: skip


def test_the_bench_times_both_sides() -> None:
    result = bench_geometry(tiny("llama"), [0, 2], source="random", count=40, length=5, rounds=2)
    assert list(result["layers"]) == ["0", "2"]
    assert result["worst"] >= result["colipschitz_over_margin"] > 0
    with pytest.raises(OptionError, match="count = 1"):
        bench_geometry(tiny("llama"), count=1)


# --- another quantiser's word -----------------------------------------------------------------


class Stored(NamedTuple):
    """States and how they are to be stored."""

    x: Tensor
    bits: int
    granularity: str
    symmetric: bool


AFFINE = """
import sys
import torch
from safetensors.torch import load_file, save_file
from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

codes = {}
for name, x in load_file(sys.argv[1]).items():
    _, bits, granularity, symmetric = name.split(" ")
    bits, symmetric = int(bits), symmetric == "True"
    first, last = (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    block = {"layer": tuple(x.shape), "channel": (len(x), 1), "vector": (1, x.shape[1])}[granularity]
    kind = MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC
    limits = {"quant_min": first, "quant_max": last}
    scale, zero = choose_qparams_affine(
        x, kind, block, torch.int16, scale_dtype=torch.float32, zero_point_dtype=torch.int32, **limits
    )
    codes[name] = quantize_affine(x, block, scale, zero, torch.int16, **limits)
save_file(codes, sys.argv[2])
"""


def affine_codes(given: Sequence[Stored], folder: Path) -> list[Tensor]:
    """The codes of torchao's affine primitives, from a process of their own (see the Makefile)."""
    home = Path(sys.prefix) / "quant"
    assert (home / "torchao").is_dir(), "torchao is not there; run `make setup`"
    names = [f"{place} {one.bits} {one.granularity} {one.symmetric}" for place, one in enumerate(given)]
    save_file({n: one.x.clone() for n, one in zip(names, given, strict=True)}, folder / "x.safetensors")
    subprocess.run(
        [sys.executable, "-c", AFFINE, "x.safetensors", "codes.safetensors"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(home)}, check=True, capture_output=True,
    )  # fmt: skip
    found = load_file(folder / "codes.safetensors")
    return [found[name] for name in names]


def pairs_of_equals(codes: Tensor) -> int:
    sizes = same_rows(codes.double()).bincount()
    return int((sizes * (sizes - 1) // 2).sum())


def test_torchao_gives_the_same_codes(tmp_path: Path) -> None:
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0)) + 0.3
    given = [Stored(x, *kind) for kind in product((2, 4, 8), GRANULARITIES, (True, False))]
    for one, theirs in zip(given, affine_codes(given, tmp_path), strict=True):
        grid = Quantiser(one.bits, one.granularity, "absmax" if one.symmetric else "minmax").fit(x)
        ours = grid.encode(x)
        place = x.double() / grid.step
        tie = (place - place.floor() - 0.5).abs() < 1e-4  # they round in float32
        assert bool(((ours == theirs) | tie).all()), one
        assert float((ours == theirs).double().mean()) > 0.999
        if one.bits == 2 and one.granularity == "layer":
            assert pairs_of_equals(ours) > 0


@pytest.mark.real_model
def test_torchao_counts_the_same_collisions_on_the_default_model(
    smollm2: LanguageModel, tmp_path: Path
) -> None:
    prompts = gather("default", smollm2, PromptOptions(count=300, length=8))
    states = preimage.capture(smollm2, prompts, [1, 15, 30, "final"], positions="last", batch_tokens=4096)
    shape = measure_geometry(states, bits=(None, 8, 4), subsets=0)
    sets = [(bits, layer) for bits in (8, 4) for layer in states.layers]
    given = [Stored(states.last(layer), bits, "layer", True) for bits, layer in sets]
    ours = [shape.quantised[bits].layers[layer].collisions for bits, layer in sets]
    assert ours == [pairs_of_equals(codes) for codes in affine_codes(given, tmp_path)]
    assert sum(ours) > 0  # at 4 bits outlying coordinates flatten the rest


# --- print ------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not BROWSER and "PREIMAGE_REQUIRE_BROWSER" not in os.environ, reason="NO BROWSER: svg and pdf not tested"
)
def test_figures_for_print(tmp_path: Path) -> None:
    states = preimage.capture(tiny("gpt2"), [random_ids(5, seed) for seed in range(9)], positions="last")
    shape = measure_geometry(states, bits=(None,))
    figure = length_figure({"gpt2": {5: shape, 10: shape}})
    save_figures({"lengths": figure}, tmp_path, ("svg", "pdf"))
    save_figures({"lengths": figure}, tmp_path / "again", ("svg",))
    drawn = (tmp_path / "lengths.svg").read_bytes()
    assert b"normalised margin" in drawn
    assert drawn == (tmp_path / "again" / "lengths.svg").read_bytes(), "plotly's random ids are gone"
    assert (tmp_path / "lengths.pdf").read_bytes().startswith(b"%PDF")


def test_without_a_browser_print_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import plotly.graph_objects as go

    def fail(*_: object, **__: object) -> bytes:
        raise RuntimeError("no browser here")

    monkeypatch.setattr(go.Figure, "to_image", fail)
    with pytest.raises(OptionError, match="no browser here"):
        save_figures({"a": go.Figure()}, tmp_path, ("svg",))
    assert not list(tmp_path.iterdir())
