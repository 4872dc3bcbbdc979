"""Symmetries: what must stay stays to rounding, and each verdict comes out the other way where it has to."""

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as t
from torch import Generator, Tensor, nn

import preimage
from preimage.distances import norms, row_distances
from preimage.errors import ModelError, OptionError, PromptError
from preimage.geometry import measure_geometry
from preimage.models import LanguageModel
from preimage.models.float64 import double_copy
from preimage.theory.result import TheoryReport, Verdict
from preimage.theory.symmetry import transforms as make
from preimage.theory.symmetry.check import check_symmetry
from preimage.theory.symmetry.group import Act, Transform, group_of
from preimage.theory.symmetry.norms import Norm
from preimage.theory.symmetry.weights import Map, Weights, read_weights
from support.tiny import NAMES, build, random_ids

ROTARY = tuple(name for name in NAMES if name not in ("gpt2", "opt"))
POST_NORMED = ("gemma2", "gemma3", "olmo2")
APART = [random_ids(11, seed) for seed in range(6)]
# The constant prompts collide at every layer where positions enter through attention alone.
PROMPTS = [*APART, [5] * 4, [5] * 7]
MARGINS, RATIOS, DISCRIMINANT = -3, -2, -1


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices of 32 rows gain nothing from threads, and lose much where the processor is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def generic(name: str, **changes: object) -> LanguageModel:
    """Fresh models have gains of 1 and biases of 0, behind which mistakes would hide; these have not."""
    return preimage.load(shaken(build(name, **changes)))


def shaken(module: nn.Module) -> nn.Module:
    random = Generator().manual_seed(1)
    for parameter in module.parameters():
        size = 0.3 if parameter.ndim == 1 else 0.2
        parameter.data += size * torch.randn(parameter.shape, generator=random)
    return module


@functools.cache
def report_of(name: str) -> TheoryReport:
    return check_symmetry(generic(name), PROMPTS)


def says(model: LanguageModel, act: Act, *, symmetry: bool = True, final: bool = True) -> TheoryReport:
    """The report on one transform of our own."""
    return check_symmetry(model, PROMPTS, transforms=[Transform("ours", "ours", act, symmetry, final)])


def named(report: TheoryReport, name: str) -> Verdict:
    names = list(dict.fromkeys(row["transform"] for row in report.tables["layers"]))
    return report.verdicts[names.index(name)]


# --- what stays -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_states_margins_and_collisions_stay_on_the_orbit(name: str) -> None:
    report = report_of(name)
    assert report.holds, [verdict for verdict in report.verdicts if not verdict.holds]
    rows = [row for row in report.tables["layers"] if row["symmetry"]]
    drawn = {row["transform"] for row in rows}
    wanted = {"heads", "values and outputs", "queries and keys", "units", "coordinates", "all together"}
    wanted |= set() if name == "olmo2" else {"norm gains"}
    wanted |= set() if name in POST_NORMED else {"rotation"}
    assert drawn == wanted
    layers = {"0", "1", "2", "3", "final"}
    for transform in drawn:
        seen = {row["layer"] for row in rows if row["transform"] == transform}
        turned = transform == "rotation" or (transform == "all together" and "rotation" in drawn)
        assert seen == (layers - {"final"} if turned else layers)
    for number in (MARGINS, RATIOS):
        assert report.verdicts[number].value is not None
    colliding = {row["layer"] for row in rows if row["collisions"]}
    assert colliding == (layers if name in ROTARY else set())


@pytest.mark.parametrize("name", NAMES)
def test_generic_queries_and_keys(name: str) -> None:
    """A symmetry with absolute positions, none with rotary ones."""
    model, report = generic(name), report_of(name)
    control = [row for row in report.tables["layers"] if not row["symmetry"]]
    if name not in ROTARY:
        assert not control
        assert says(model, make.mix_queries_keys).verdicts[0].holds is True
        return
    verdict = named(report, "generic queries and keys")
    assert verdict.holds is True
    assert "is no symmetry with rotary positions" in verdict.statement
    assert verdict.value is not None
    assert verdict.value > 0.5
    assert all(row["error"] > 0.05 for row in control if row["layer"] != "0")
    assert says(model, make.mix_queries_keys).verdicts[0].holds is False


def test_what_an_architecture_does_not_allow_is_said() -> None:
    def missing(name: str) -> str:
        return " / ".join(report_of(name).subject["not_sampled"])

    assert "rotations of the residual stream" in missing("gemma3")
    assert "folding of the norms after attention" in missing("gemma3")
    assert "rotations within rotary planes" in missing("qwen3")
    assert "folding of norms: no linear map" in missing("olmo2")
    assert "reordering of experts" in missing("mixtral")
    assert (
        missing("gpt2") == 'layer "final" under rotations: the last norm\'s gain does not commute with them'
    )


def test_a_draw_that_changes_nothing_is_no_evidence() -> None:
    fresh = check_symmetry(preimage.load(build("llama")), PROMPTS)  # its gains are all 1
    assert "norm gains" not in {row["transform"] for row in fresh.tables["layers"]}
    assert any(
        line.startswith("norm gains: the draw changed no weight") for line in fresh.subject["not_sampled"]
    )
    with pytest.raises(OptionError, match="None of these transforms"):
        says(preimage.load(build("llama")), make.fold_norms)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "mixtral"])
def test_the_model_itself_is_not_touched(name: str) -> None:
    model = generic(name)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    settings = copy.deepcopy(model.module.config.to_dict())
    check_symmetry(model, PROMPTS)
    assert all(torch.equal(before[key], value) for key, value in model.module.state_dict().items())
    assert model.module.config.to_dict() == settings
    assert model.dtype is torch.float32


def test_other_seeds_are_other_elements() -> None:
    model = generic("llama")
    first, second = (check_symmetry(model, PROMPTS, seed=seed) for seed in (0, 1))
    assert first.holds
    assert second.holds
    assert named(first, "generic queries and keys").value != named(second, "generic queries and keys").value
    assert first == check_symmetry(model, PROMPTS)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_table_agrees_with_the_geometry(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Margins and co-Lipschitz constants of the copies, by the package's own certified diagnostics."""
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path))  # capture keeps noise floors; these are throwaways
    model = generic(name)
    rows = check_symmetry(model, APART).tables["layers"]
    base = double_copy(model)
    transforms, _ = group_of(read_weights(base))
    last = next(one for one in transforms if one.name == "all together")
    turned = double_copy(base)
    last.act(read_weights(turned), Generator().manual_seed(0))
    for copied, ending in ((base, ""), (turned, "_after")):
        shape = measure_geometry(preimage.capture(copied, APART, [1, 2, 3], positions="last"), bits=(None,))
        for layer in (1, 2, 3):
            row = next(r for r in rows if r["transform"] == last.name and r["layer"] == str(layer))
            assert row[f"margin{ending}"] == pytest.approx(shape.layers[layer].margin, rel=1e-12)
            assert row[f"colipschitz{ending}"] == pytest.approx(shape.layers[layer].colipschitz, rel=1e-12)


# --- what must come out the other way ---------------------------------------------------------


def values_not_undone(weights: Weights, random: Generator) -> None:
    outputs = [block.output.weight.clone() for block in weights.blocks]
    make.mix_values(weights, random)
    for block, output in zip(weights.blocks, outputs, strict=True):
        block.output.weight.copy_(output)


def without_bias(act: Act, which: str) -> Act:
    """The same transform, one map's bias left as it was."""

    def acting(weights: Weights, random: Generator) -> Tensor | None:
        biases = [getattr(block, which).bias.clone() for block in weights.blocks]
        turn = act(weights, random)
        for block, bias in zip(weights.blocks, biases, strict=True):
            getattr(block, which).bias.copy_(bias)
        return turn

    return acting


def heads_across_groups(weights: Weights, random: Generator) -> None:
    for block in weights.blocks:
        order = torch.arange(len(block.query.weight)).roll(1)
        block.query.take(order)
        block.output.weight.copy_(block.output.weight[:, order])


def values_stay_behind(weights: Weights, random: Generator) -> None:
    values = [block.value.weight.clone() for block in weights.blocks]
    make.permute_heads(weights, random)
    for block, value in zip(weights.blocks, values, strict=True):
        block.value.weight.copy_(value)


def folded_twice(weights: Weights, random: Generator) -> None:
    gains = [norm.gain.clone() for block in weights.blocks for norm, _ in block.read_norms]
    make.fold_norms(weights, random)
    readers = [maps for block in weights.blocks for _, maps in block.read_norms]
    for gain, maps in zip(gains, readers, strict=True):
        for reader in maps:
            reader.weight.mul_(gain)


def folded_as_if_plain(weights: Weights, random: Generator) -> None:
    """Gemma's gain is 1 + weight."""
    for block in weights.blocks:
        for norm, maps in block.read_norms:
            for reader in maps:
                reader.weight.mul_(norm.weight)
            norm.weight.fill_(1.0)


def post_norms_folded(weights: Weights, random: Generator) -> None:
    for block in weights.blocks:
        for norm, writer in zip(block.post_norms, block.writers, strict=True):
            gain = norm.gain.reshape(-1, *[1] * (writer.weight.ndim - 1))
            writer.weight.mul_(gain)
            norm.weight.fill_(1.0 - norm.offset)


def units_not_followed(weights: Weights, random: Generator) -> None:
    for block in weights.blocks:
        order = torch.arange(len(block.units[0].up.weight)).roll(1)
        block.units[0].up.take(order)


def gate_scaled(weights: Weights, random: Generator) -> None:
    """What is gated may be scaled, the gate may not."""
    for block in weights.blocks:
        for units in block.units:
            assert units.gate is not None
            units.gate.weight.mul_(1.5)
            units.down.weight.div_(1.5)


def neighbouring_planes(weights: Weights, random: Generator) -> None:
    """Planes (0, 1), (2, 3), …, where they are (0, d/2), (1, d/2 + 1), …"""
    assert weights.planes is not None
    wrong = torch.arange(weights.planes.numel()).view(-1, 2)
    make.turn_planes(Weights(weights.embeddings, weights.blocks, weights.final, wrong), random)


def gains_split_a_plane(weights: Weights, random: Generator) -> None:
    for block in weights.blocks:
        assert block.query_norm is not None
        assert block.key_norm is not None
        factor = torch.ones_like(block.query_norm.weight)
        factor[0] = 2.0
        block.query_norm.scale(factor)
        block.key_norm.scale(1 / factor)


def positions_not_turned(weights: Weights, random: Generator) -> Tensor:
    positions = weights.embeddings[1].clone()
    turn = make.rotate_stream(weights, random)
    weights.embeddings[1].copy_(positions)
    return turn


def rotated_as_if_uncentred(weights: Weights, random: Generator) -> Tensor:
    """Any rotation, also of the all-ones direction."""
    make.fold_norms(weights, random)
    return make._turn_stream(weights, make._orthogonal((32, 32), random))


def rotated_without_folding(weights: Weights, random: Generator) -> Tensor:
    return make._turn_stream(weights, make._orthogonal((32, 32), random))


BROKEN = {
    "values not undone": ("llama", values_not_undone),
    "values not undone, GPT-2": ("gpt2", values_not_undone),
    "value bias forgotten": ("qwen2", without_bias(make.mix_values, "value")),
    "value bias forgotten, GPT-2": ("gpt2", without_bias(make.mix_values, "value")),
    "key bias forgotten": ("qwen2", without_bias(make.turn_planes, "key")),
    "query bias forgotten": ("qwen2", without_bias(make.turn_planes, "query")),
    "query bias forgotten, GPT-2": ("gpt2", without_bias(make.mix_queries_keys, "query")),
    "heads permuted across groups": ("llama", heads_across_groups),
    "values left behind": ("qwen2", values_stay_behind),
    "gain folded twice": ("llama", folded_twice),
    "gain folded twice, Gemma": ("gemma3", folded_twice),
    "gain without its offset": ("gemma3", folded_as_if_plain),
    "post-norms folded backwards": ("gemma3", post_norms_folded),
    "units not followed": ("gpt2", units_not_followed),
    "gate scaled": ("llama", gate_scaled),
    "planes of neighbours": ("llama", neighbouring_planes),
    "planes turned under norms": ("qwen3", make.turn_planes),
    "planes turned under norms, Gemma": ("gemma3", make.turn_planes),
    "planes turned under norms, OLMo": ("olmo2", make.turn_planes),
    "gains that split a plane": ("gemma3", gains_split_a_plane),
    "positions not turned": ("gpt2", positions_not_turned),
    "mean not respected": ("gpt2", rotated_as_if_uncentred),
    "rotated with its gains": ("llama", rotated_without_folding),
    "rotated with post-norms": ("gemma3", rotated_as_if_uncentred),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_symmetry_is_caught(case: str) -> None:
    name, act = BROKEN[case]
    report = says(generic(name), act, final=False)
    verdict = report.verdicts[0]
    assert verdict.holds is False
    assert verdict.value is not None
    assert verdict.value > 1e-3
    assert report.verdicts[MARGINS].holds is False
    assert report.verdicts[RATIOS].holds is False
    assert not report.holds


def test_the_final_layer_does_not_follow_a_rotation() -> None:
    for name in ("gpt2", "llama"):
        model = generic(name)
        assert says(model, make.rotate_stream, final=False).verdicts[0].holds is True
        report = says(model, make.rotate_stream, final=True)
        assert report.verdicts[0].holds is False
        assert {row["layer"] for row in report.tables["layers"] if row["error"] > 1e-12} == {"final"}


def test_a_control_that_is_a_symmetry_is_caught() -> None:
    model = generic("llama")
    assert says(model, make.turn_planes, symmetry=False).verdicts[0].holds is False

    def hardly(weights: Weights, random: Generator) -> None:
        weights.blocks[0].value.weight.mul_(1 + 1e-8)

    undecided = says(model, hardly, symmetry=False).verdicts
    assert len(undecided) == 1  # nothing is said of margins where nothing was said to be a symmetry
    assert undecided[0].holds is None
    assert says(model, hardly).verdicts[0].holds is False


def test_states_that_are_not_numbers_are_no_agreement() -> None:
    def broken(weights: Weights, random: Generator) -> None:
        weights.blocks[1].output.weight.fill_(float("nan"))

    report = says(generic("llama"), broken)  # layers 0 and 1 agree to the bit, and come first
    assert [report.verdicts[i].holds for i in (0, MARGINS, RATIOS)] == [False] * 3


def test_margins_are_looked_at_on_their_own() -> None:
    """Rotating the states is fine, stretching them is not, however well the states follow the matrix."""

    def stretched(weights: Weights, random: Generator) -> Tensor:
        turn = torch.eye(32, dtype=torch.float64)
        turn[0, 0] = 1 + 1e-7
        for table in weights.embeddings:
            table.copy_(table @ turn)
        return turn

    report = says(generic("llama"), stretched)
    assert [row["error"] < 1e-12 for row in report.tables["layers"] if row["layer"] == "0"] == [True]
    assert report.verdicts[MARGINS].holds is False
    assert report.verdicts[RATIOS].holds is False
    assert report.verdicts[DISCRIMINANT].holds is True  # far too little to make or part a collision


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "gemma3"])
def test_the_discriminant_is_kept_and_leaving_it_is_seen(name: str) -> None:
    """Two equal embedding rows put a pair of prompts on the discriminant of every layer."""
    model = generic(name)
    with torch.no_grad():
        table = model.anatomy.embedding.weight
        table[7] = table[8]
    prompts = [[3, 7, 9], [3, 8, 9], [4, 7, 9], [3, 7, 10, 2]]
    report = check_symmetry(model, prompts)
    assert report.holds
    assert all(row["collisions"] == row["collisions_after"] > 0 for row in report.tables["layers"])

    def parted(weights: Weights, random: Generator) -> None:
        weights.embeddings[0][7].mul_(1.01)

    def joined(weights: Weights, random: Generator) -> None:
        weights.embeddings[0][3].copy_(weights.embeddings[0][4])

    for act in (parted, joined):
        left = check_symmetry(model, prompts, transforms=[Transform("ours", "ours", act)]).verdicts[-1]
        assert left.holds is False
        assert left.value is not None
        assert left.value >= 4  # at every layer above 0


# --- arithmetic and weights -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "olmo2", "mixtral"])
def test_the_copy_is_float64_throughout(name: str) -> None:
    """Casting alone leaves float32 norms in; the copy has none, and is the same map."""
    model = generic(name)
    ids = torch.tensor([random_ids(9)])
    exact = double_copy(model)
    cast = LanguageModel(copy.deepcopy(exact.module), None, name=name)

    def off(one: LanguageModel) -> float:
        turned = copy.deepcopy(one.module)
        other = type(one)(turned, None, name=name)
        turn = make.permute_stream(read_weights(other), Generator().manual_seed(0))
        before, after = one.states(ids, (3,))[3][0], other.states(ids, (3,))[3][0]
        return float((row_distances(before @ turn, after) / norms(before)).max())

    assert exact.states(ids, (3,))[3].dtype is torch.float64
    assert off(exact) < 1e-12  # the line that symmetries are held to
    assert off(cast) > 1e-9
    near = row_distances(exact.states(ids, (3,))[3][0], model.states(ids, (3,))[3][0])
    assert float((near / norms(model.states(ids, (3,))[3][0])).max()) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_of_a_block_is_read_once_and_as_a_view(name: str) -> None:
    model = double_copy(generic(name))
    weights = read_weights(model)
    for block, module in zip(weights.blocks, model.anatomy.blocks, strict=True):
        norms_ = [norm for norm, _ in block.read_norms] + list(block.post_norms)
        norms_ += [norm for norm in (block.query_norm, block.key_norm) if norm is not None]
        parts: list[Map | Norm] = [*block.readers, *block.writers, *norms_]
        views = [view for part in parts for view in (part.weight, part.bias) if view is not None]
        parameters = list(module.parameters())
        assert sum(view.numel() for view in views) == sum(p.numel() for p in parameters)
        for view in views:
            view.zero_()
        assert all(bool((parameter == 0).all()) for parameter in parameters)


def test_planes_are_those_of_the_architecture() -> None:
    def planes(module: nn.Module) -> list[list[int]]:
        found = read_weights(double_copy(preimage.load(module))).planes
        assert found is not None
        return found.tolist()

    shape = {"vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    interleaved = t.AutoModelForCausalLM.from_config(t.CohereConfig(**shape)).eval()
    assert planes(interleaved) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert planes(build("llama")) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert planes(build("gpt_neox")) == [[0, 1]]  # a quarter of the head turns, the rest may be mixed
    assert check_symmetry(preimage.load(shaken(interleaved)), PROMPTS).holds


def test_what_is_not_understood_is_refused_by_name() -> None:
    module = build("llama")
    module.model.layers[1].self_attn.register_parameter("sinks", nn.Parameter(torch.zeros(4)))
    with pytest.raises(ModelError, match=r"its parameter self_attn\.sinks does is not known"):
        check_symmetry(preimage.load(module), PROMPTS)
    bloom = t.BloomConfig(vocab_size=41, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(ModelError, match="BloomModel cannot be read: its attention"):
        check_symmetry(preimage.load(t.AutoModelForCausalLM.from_config(bloom).eval()), PROMPTS)
    with pytest.raises(ModelError, match="norms stand on the residual stream"):
        check_symmetry(generic("opt", do_layer_norm_before=False), PROMPTS)


def test_wrong_input_is_refused() -> None:
    model = generic("llama")
    with pytest.raises(PromptError, match="two prompts or more"):
        check_symmetry(model, [[1, 2, 3]])
    with pytest.raises(PromptError, match="all different"):
        check_symmetry(model, [[1, 2], [1, 2], [3, 4]])
    with pytest.raises(OptionError, match="decide nothing"):
        check_symmetry(model, PROMPTS, tolerance=0.0)


def test_the_report_is_plain_json(tmp_path: Path) -> None:
    report = report_of("gemma3")
    saved = json.loads(report.save(tmp_path / "symmetry.json").read_text(encoding="utf-8"))
    assert saved["check"] == "symmetry"
    assert saved["holds"] is True
    assert saved["subject"]["positions"] == "rotary"
    assert (saved["subject"]["heads"], saved["subject"]["groups"]) == (4, 2)
    assert len(saved["verdicts"]) == len(report.verdicts)
