"""Geometry against its definitions: a float64 oracle for every quantity, and the relations between them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import preimage
from preimage.cli import main
from preimage.distances import PairScan, find_closest, norms, row_distances
from preimage.distances.arithmetic import FLOAT64
from preimage.distances.prompt_distances import PromptDistances
from preimage.errors import OptionError, PromptError, RunFolderError
from preimage.figures import (
    family_figure,
    layer_figure,
    length_figure,
    near_collision_figure,
    quantised_figure,
)
from preimage.geometry import Geometry, GeometryOptions, GeometrySweep, Quantiser, measure_geometry
from preimage.geometry.quantiser import GRANULARITIES, RANGES
from preimage.geometry.ratios import largest_ratio, measure_ratios
from preimage.states import States
from support.geometry import captured, table
from support.tiny import VOCABULARY

# --- ratios -----------------------------------------------------------------------------------


@st.composite
def states_and_prompts(draw: st.DrawFn) -> tuple[Tensor, list[list[int]]]:
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    length = draw(st.integers(1, 6))
    mixed = draw(st.booleans())
    rows = draw(st.integers(2, 40))
    ids: dict[tuple[int, ...], None] = {}
    for _ in range(rows):
        long = int(torch.randint(1, length + 1, (1,), generator=generator)) if mixed else length
        ids[tuple(torch.randint(0, 4, (long,), generator=generator).tolist())] = None
    while len(ids) < 2:
        ids[(5,) * length] = None
    x = torch.randn(len(ids), 7, generator=generator, dtype=torch.float64)
    x += draw(st.sampled_from([0.0, 100.0]))
    for _ in range(draw(st.integers(0, 5))):
        a, b = (int(torch.randint(len(ids), (1,), generator=generator)) for _ in "ab")
        x[a] = x[b]
    return x.to(draw(st.sampled_from([torch.float32, torch.float64]))), [list(row) for row in ids]


@settings(max_examples=100, deadline=None)
@given(given_=states_and_prompts())
def test_ratios_agree_with_the_definition(given_: tuple[Tensor, list[list[int]]]) -> None:
    x, ids = given_
    prompts = PromptDistances(ids)
    away = row_distances(x[:, None], x[None]).fill_diagonal_(torch.inf)
    ratio = away / table(prompts).clamp_min(1)
    found = measure_ratios(PairScan(x), prompts)
    assert torch.equal(found.smallest, ratio.amin(dim=1))
    assert torch.equal(found.first, away.amin(dim=1))
    assert torch.equal(found.at_nearest, ratio.gather(1, away.argmin(dim=1, keepdim=True))[:, 0])
    finite = ratio.masked_fill(torch.isinf(ratio), 0.0)
    assert largest_ratio(PairScan(x), prompts, x) == float(finite.max())
    two = away.sort(dim=1).values[:, :2]
    if len(x) > 2:
        assert torch.equal(found.second, two[:, 1])


def test_many_rows_take_few_certified_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most pairs are excluded by their bound, and the ratios are those of all pairs still."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (1500, 8), generator=generator)
    x = torch.randn(1500, 20, generator=generator) + ids[:, -1:]
    prompts, scan, seen = PromptDistances(ids.tolist()), PairScan(x), 0
    within = PairScan.pairs_within_each

    def counting(self: PairScan, radii: Tensor):  # type: ignore[no-untyped-def]
        nonlocal seen
        for i, j, away in within(self, radii):
            seen += len(i)
            yield i, j, away

    monkeypatch.setattr(PairScan, "pairs_within_each", counting)
    found = measure_ratios(scan, prompts)
    away = row_distances(x[:, None], x[None]).fill_diagonal_(torch.inf)
    expected = (away / table(prompts).clamp_min(1)).amin(dim=1)
    assert torch.equal(found.smallest, expected)
    assert seen < 0.1 * 1500**2


# --- the whole --------------------------------------------------------------------------------


def given_states(x: Tensor, ids: Sequence[Sequence[int]], layer: int) -> States:
    made = States.from_tensor(x[:, None], layer)
    made.token_ids = tuple(tuple(row) for row in ids)
    return made


def test_every_quantity_is_its_definition() -> None:
    states = captured()
    shape = preimage.measure_geometry(states, bits=(None, 8, 4))
    assert shape.prompt_distance == "hamming"
    assert set(shape.quantised) == {8, 4}
    prompts = PromptDistances(states.token_ids or [])
    apart = table(prompts)
    for layer, found in shape.layers.items():
        check(found, states.last(layer), apart, 6)
        for bits, other in shape.quantised.items():
            grid = Quantiser(bits).fit(states.last(layer))
            codes = grid.encode(states.last(layer))
            quantised = other.layers[layer]
            check(quantised, grid.decode(codes), apart, 6)
            counts = codes.unique(dim=0, return_counts=True)[1]
            assert quantised.collisions == int((counts * (counts - 1) // 2).sum())
            report = quantised.quantised
            assert report is not None
            reach = report.step * math.sqrt(states.d_model)
            assert abs(quantised.margin - found.margin) <= reach * (1 + 1e-9)
            assert report.certified == (found.margin > reach)
            assert not (report.certified and quantised.collisions)


def test_what_is_cut_off_is_not_certified() -> None:
    # one large coordinate, different in every state and beyond the percentile: it becomes the same in all
    x = torch.ones(40, 8)
    x[:, 7] = 100 + 10 * torch.arange(40)
    states = given_states(x, [[i] for i in range(40)], 1)
    cutting = Quantiser(range="percentile", percentile=50.0)
    shape = measure_geometry(states, bits=(8,), options=GeometryOptions(quantiser=cutting))
    quantised = shape.quantised[8].layers[1]
    assert quantised.collisions == 780
    assert quantised.quantised is not None
    assert shape.layers[1].margin > quantised.quantised.step * math.sqrt(8)
    assert quantised.quantised.certified is False


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(2, 20),
    d=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    bits=st.integers(2, 8),
    granularity=st.sampled_from(sorted(GRANULARITIES)),
    range_=st.sampled_from(sorted(RANGES)),
    percentile=st.sampled_from([1.0, 50.0, 90.0, 99.9, 100.0]),
    outliers=st.booleans(),
)
def test_a_certificate_means_no_collision(
    n: int, d: int, seed: int, bits: int, granularity: str, range_: str, percentile: float, outliers: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (n, d), generator=generator).double()
    if outliers:
        x[:, 0] *= 50
    grid = Quantiser(bits, granularity, range_, percentile).fit(x)
    codes = grid.encode(x)
    stored = grid.decode(codes)
    margin = float(find_closest(PairScan(x))[0].distance)
    certified = grid.certifies(margin, x, stored)
    if certified:
        assert len(stored.unique(dim=0)) == n
    cut = (x - stored).abs() > grid.step / 2 * (1 + 1e-9)
    if not bool(cut.any()):  # the published statement, where nothing is cut off
        reach = float(grid.step.max()) * math.sqrt(d)
        assert certified == (margin > reach) or margin == pytest.approx(reach, rel=1e-12)
    farther = 2 * float(row_distances(x, stored).max()) * (1 + 1e-12)
    assert grid.certifies(max(farther, float(grid.step.max()) * math.sqrt(d) * (1 + 1e-12)), x, stored)


def check(found, x: Tensor, apart: Tensor, length: int) -> None:  # type: ignore[no-untyped-def]
    """One layer against float64 over all pairs, and the relations that must hold."""
    away = row_distances(x[:, None], x[None]).fill_diagonal_(torch.inf)
    ratio = away / apart.clamp_min(1)
    nearest = ratio.gather(1, away.argmin(dim=1, keepdim=True))[:, 0]
    mean = float(norms(x).mean())
    assert found.mean_norm == pytest.approx(mean)
    assert found.margin == float(away.min())
    assert found.margin_quantile == pytest.approx(float(away.amin(dim=1).quantile(0.01)))
    assert found.colipschitz == float(ratio.min())
    assert found.colipschitz_quantile == pytest.approx(float(ratio.amin(dim=1).quantile(0.01)))
    assert found.nearest_colipschitz_quantile == pytest.approx(float(nearest.quantile(0.01)))
    assert found.nearest_colipschitz >= found.colipschitz
    assert found.lipschitz == float(ratio.masked_fill(torch.isinf(ratio), 0.0).max())
    assert found.distortion == (found.lipschitz / found.colipschitz if found.colipschitz else None)
    assert found.margin / length <= found.colipschitz * (1 + 1e-12) <= found.margin * (1 + 1e-9)
    assert found.length_colipschitz == pytest.approx(length * found.colipschitz)
    assert found.normalised_margin == pytest.approx(found.margin / mean)
    pairs = away[torch.triu(torch.ones_like(away), 1).bool()]
    assert found.pairs == len(pairs)
    for eps in (1e-2, 1e-6):
        assert found.near_collisions[f"{eps:g}"] == pytest.approx(float((pairs <= eps).double().mean()))
        close = float((pairs <= eps * mean).double().mean())
        assert found.relative_near_collisions[f"{eps:g}"] == pytest.approx(close)
    unit = x.double() / norms(x)[:, None]
    cosines = (unit @ unit.T)[torch.triu(torch.ones_like(away), 1).bool()]
    assert found.anisotropy == pytest.approx(float(cosines.mean()), abs=1e-9)


def test_scaling_permuting_and_adding() -> None:
    states = captured(40)
    x = states.last(2)
    assert states.token_ids is not None
    ids = [list(row) for row in states.token_ids]

    def shape(rows: Tensor, order: Sequence[int]):  # type: ignore[no-untyped-def]
        made = given_states(rows[list(order)], [ids[i] for i in order], 2)
        return measure_geometry(made, bits=(None,)).layers[2]

    base = shape(x, range(40))
    scaled, shuffled, fewer = shape(8 * x, range(40)), shape(x, range(39, -1, -1)), shape(x, range(25))
    assert scaled.margin == pytest.approx(8 * base.margin)
    assert scaled.normalised_colipschitz_quantile == pytest.approx(base.normalised_colipschitz_quantile)
    assert scaled.intrinsic_dimension == pytest.approx(base.intrinsic_dimension)
    assert (shuffled.margin, shuffled.colipschitz) == (base.margin, base.colipschitz)
    assert fewer.margin >= base.margin
    assert fewer.colipschitz >= base.colipschitz


def test_tiles_and_arithmetic_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:  # N4
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(700, 24, generator=generator) + 5
    x[300] = x[7]
    ids = torch.randint(0, 9, (700, 7), generator=generator).tolist()
    ids = [[*row, number // 30, number % 30] for number, row in enumerate(ids)]
    states = given_states(x, ids, 1)
    expected = measure_geometry(states)
    for changes in (
        {"distances.screen.TILE": {"cpu": 256}, "geometry.ratios._TOGETHER": {"cpu": 33}},
        {"distances.screen.TILE": {"cpu": 512}, "distances.screen._DECIDED": {"cpu": 100}},
        {"geometry.ratios._CERTIFIED": 50, "distances.scan._CERTIFIED": {"cpu": 17}},
        {"distances.scan.LADDERS": {"cpu": (FLOAT64,)}},
    ):
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(f"preimage.{name}", value)
            assert measure_geometry(states) == expected


def test_the_intrinsic_dimension_is_that_of_the_cloud() -> None:
    generator = torch.Generator().manual_seed(0)
    plane = torch.rand(2500, 2, generator=generator) @ torch.randn(2, 30, generator=generator)
    ids = torch.randint(0, VOCABULARY, (2500, 8), generator=generator)
    made = given_states(plane, ids.tolist(), 1)
    assert measure_geometry(made, bits=(None,)).layers[1].intrinsic_dimension == pytest.approx(2.0, rel=0.1)


def test_bad_input_is_refused() -> None:
    states = captured(4)
    for wrong in ({"bits": (1,)}, {"bits": (8, 8)}, {"eps": (0.0,)}, {"quantile": 2.0}):
        with pytest.raises(OptionError):
            measure_geometry(states, **wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="withheld"):
        measure_geometry(States.from_tensor(torch.randn(3, 1, 4), 1))
    with pytest.raises(PromptError, match="the same"):
        measure_geometry(given_states(torch.randn(2, 4), [[1, 2], [1, 2]], 1))
    with pytest.raises(PromptError, match="no pair"):
        measure_geometry(given_states(torch.randn(1, 4), [[1]], 1))
    assert GeometryOptions().to_dict()["bits"] == [None, 8, 4]


# --- run folders and the command line ---------------------------------------------------------


def test_a_stopped_measurement_continues_to_the_same_bytes(tmp_path: Path) -> None:
    states = captured(12)
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"

    def stop(done: int, total: int, note: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_geometry(states, out=stopped, progress=stop)
    measured = (stopped / "items.jsonl").read_bytes()
    assert measured.count(b"\n") == 3
    again = measure_geometry(states, out=stopped)
    assert (stopped / "items.jsonl").read_bytes().startswith(measured)
    assert measure_geometry(states, out=whole) == again
    for name in ("run.json", "layers.parquet"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()
    with pytest.raises(RunFolderError, match="another options"):
        measure_geometry(states, out=whole, quantile=0.5)
    with pytest.raises(RunFolderError, match="another prompts"):
        measure_geometry(captured(11), out=whole)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = captured(9)
    states.save(tmp_path / "bundle")
    given_ = ["geometry", str(tmp_path / "bundle"), "--bits", "4", "--granularity", "channel"]
    assert main([*given_, "--json", "--out", str(tmp_path / "run")]) == 0
    document = json.loads(capsys.readouterr().out)
    expected = measure_geometry(states, bits=(None, 4), quantiser=Quantiser(granularity="channel"))
    assert document["layers"]["2"]["margin"] == expected.layers[2].margin
    assert (
        document["quantised"]["4"]["layers"]["2"]["collisions"] == expected.quantised[4].layers[2].collisions
    )
    for name in ("layers.parquet", "layers.html", "quantised.html", "near-collisions.html"):
        assert (tmp_path / "run" / name).exists()
    assert main(given_) == 0
    assert "9 prompts, 4 bits, hamming distance" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        (["--bits", "x"], "bad_option", "--bits is 'x'."),
        (["--bits", "1"], "bad_option", "bits is 1."),
        (["--range", "wide"], "bad_option", "Range 'wide' is not known."),
        (["--quantile", "3"], "bad_option", "quantile is 3.0."),
        (["--text", "a"], "bad_option", "A bundle and prompts were given."),
        (["--length", "8"], "bad_option", "A bundle and prompts were given."),
        (["--granularity", "layer,channel"], "bad_option", "sweeps need the model and its prompts."),
        (["--layers", "z"], "bad_layer", "There is no layer 'z'."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_refuses(
    wrong: list[str], code: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captured(3).save(tmp_path / "bundle")
    source = [] if wrong[0] == "--layers" else [str(tmp_path / "bundle")]
    assert main(["geometry", *source, *wrong, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert set(error) == {"code", "message", "hint"}
    assert error["code"] == code
    assert said in error["message"]


def test_figures_show_what_was_measured() -> None:
    shape = measure_geometry(captured(12))
    layers = [str(layer) for layer in shape.layers]
    first = layer_figure({"llama": shape})
    assert [list(curve.x) for curve in first.data] == [layers] * 3
    assert list(first.data[1].y)[1:] == [found.margin_quantile for found in shape.layers.values()][1:]
    fourth = quantised_figure(shape)
    assert {curve.name for curve in fourth.data} == {"full precision", "8 bits", "4 bits"}
    assert len(fourth.data) == 12
    fifth = near_collision_figure(shape)
    assert len(fifth.data) == 3
    share = shape.quantised[4].layers[0].near_collisions["0.01"]
    assert fifth.data[2].z[0][0] == pytest.approx(math.log10(share))
    second = length_figure({"llama": {6: shape, 12: shape}})
    alpha = shape.layers["final"].normalised_colipschitz_quantile
    assert list(second.data[2].y) == pytest.approx([6 * alpha, 12 * alpha])
    third = family_figure({"one": shape, "other": shape})
    assert list(third.data[0].x) == [0.0, 0.25, 0.5, 0.75, 1.0]
    with pytest.raises(OptionError, match="11, 12 prompts"):  # nearest distances shrink with their number
        family_figure({"one": shape, "other": measure_geometry(captured(11))})


def test_saved_geometry_is_read_back(tmp_path: Path) -> None:
    for shape in (measure_geometry(captured(12)), measure_geometry(captured(110), bits=(None, 3))):
        path = shape.save(tmp_path / "shape.json")
        assert Geometry.load(path) == shape
    nowhere = given_states(torch.zeros(3, 4), [[1], [2], [3]], 1)  # no norm, no direction
    shape = measure_geometry(nowhere, bits=(None,))
    again = Geometry.load(shape.save(tmp_path / "nan.json"))
    assert math.isnan(again.layers[1].normalised_margin)
    assert math.isnan(again.layers[1].anisotropy)
    with pytest.raises(RunFolderError, match="is not a saved geometry-sweep: its kind is 'geometry'"):
        GeometrySweep.load(path)
