"""``preimage theory``: one document, an exit code that says whether the theory held, and what breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preimage.cli import main
from preimage.collisions import rounding
from preimage.errors import OptionError
from preimage.models import LanguageModel, new_model
from preimage.storage import SCHEMA
from preimage.theory import check_analyticity, registry, verification
from preimage.theory.discriminant import check as discriminant
from preimage.theory.optimiser import updates
from preimage.theory.result import Verdict
from preimage.theory.symmetry import group
from preimage.theory.symmetry.transforms import mix_queries_keys
from support.folders import make_folder
from support.tiny import build

SEPARATED, SEPARATED_ABOVE = "dichotomy.separated", "dichotomy.separated_above_0"  # ids of verdicts

Document = Callable[..., tuple[int, dict[str, Any]]]
TWO = ("--text", "the cat", "--text", "a dog runs")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A Llama with a tokenizer; an OPT, which has ReLU; a Llama whose config names a window it has not."""
    root = tmp_path_factory.mktemp("models")
    build("opt").save_pretrained(root / "opt")
    build("llama", sliding_window=2).save_pretrained(root / "window")
    make_folder(root / "llama")
    return {name: str(root / name) for name in ("llama", "opt", "window")}


@pytest.fixture
def llama(folders: dict[str, str]) -> str:
    return folders["llama"]


@pytest.fixture
def document(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Document:
    """Runs ``preimage theory … --json``: the exit code and the one document on stdout."""
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))

    def run(*argv: object) -> tuple[int, dict[str, Any]]:
        code = main(["theory", *map(str, argv), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def answers(found: dict[str, Any]) -> dict[str, bool | None]:
    return {verdict["id"]: verdict["holds"] for verdict in found["verdicts"]}


def ids_file(folder: Path, *prompts: list[int]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in prompts))
    return path


def test_analyticity(folders: dict[str, str], document: Document, tmp_path: Path) -> None:
    code, found = document("analyticity", folders["llama"], "--out", tmp_path / "out")
    assert (code, found["schema"], found["command"]) == (0, SCHEMA, "theory analyticity")
    assert found["model"]["architecture"] == "LlamaForCausalLM"
    assert (found["check"], found["holds"]) == ("analyticity", True)
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["kind"] == "theory"
    assert {key: saved[key] for key in ("check", "verdicts", "tables")} == {
        key: found[key] for key in ("check", "verdicts", "tables")
    }
    code, found = document("analyticity", folders["opt"])
    assert (code, found["holds"]) == (1, False)
    assert answers(found)["analyticity.activation"] is False


def test_what_people_read(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "analyticity", folders["opt"]]) == 1
    shown = capsys.readouterr().out
    assert "ReLU" in shown
    (line,) = [line for line in shown.splitlines() if "no activation has a kink" in line]
    assert line.split()[2] == "NO"
    assert "Not shown:\n1. Passes over one token" in shown
    assert main(["theory", "--help"]) == 0
    help_text = capsys.readouterr().out
    for command in ("analyticity", "dichotomy", "symmetry", "optimiser", "discriminant", "verify"):
        assert command in help_text


def test_dichotomy_of_all_short_prompts(llama: str, document: Document) -> None:
    small = ("--vocabulary", 2, "--longest", 3, "--draws", 2)
    code, found = document("dichotomy", "--model", llama, *small)
    assert code == 0  # prompts that must collide, and why, are known: nothing is wrong
    assert found["subject"]["prompts"] == 2 + 4 + 8
    assert answers(found)[SEPARATED_ABOVE] is False
    assert all(holds for name, holds in answers(found).items() if SEPARATED not in name)
    descriptive = {verdict["id"] for verdict in found["verdicts"] if verdict["descriptive"]}
    assert descriptive == {SEPARATED, SEPARATED_ABOVE}
    code, found = document("dichotomy", "--model", llama, *small, "--bos-id", 5, "--layers", "1-3")
    assert (code, found["holds"]) == (0, True)
    assert found["subject"]["bos"] == 5


def test_dichotomy_of_given_prompts(folders: dict[str, str], document: Document, tmp_path: Path) -> None:
    code, found = document("dichotomy", "--model", folders["llama"], *TWO, "--layers", "1,final")
    assert (code, found["check"], found["holds"]) == (0, "dichotomy", True)
    assert [row["layer"] for row in found["tables"]["layers"]] == [1, "final"]
    prompts = ids_file(tmp_path, [3, 9, 5, 7], [8, 9, 5, 7])
    code, found = document("dichotomy", "--model", folders["window"], "--prompts", prompts, "--layers", 1)
    assert code == 1  # the window says that these collide, and they do not
    refuted = [name for name, holds in answers(found).items() if holds is False]
    assert refuted == ["dichotomy.predictions_hold"]


def test_symmetry(llama: str, document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = document("symmetry", "--model", llama, *TWO, "--seed", 3)
    assert (code, found["holds"], found["command"]) == (0, True, "theory symmetry")
    assert found["subject"]["seed"] == 3
    assert found["subject"]["prompts"] == 2
    code, found = document("symmetry", "--model", llama)
    assert (code, found["subject"]["prompts"]) == (0, 8)  # of the default corpus
    monkeypatch.setattr(group.acts, "permute_heads", mix_queries_keys)  # which is no symmetry here
    code, found = document("symmetry", "--model", llama, *TWO)
    assert (code, found["holds"]) == (1, False)


@pytest.mark.parametrize("kind", updates.KINDS)
def test_optimizer_on_the_small_model(kind: str, document: Document) -> None:
    code, found = document("optimizer", "--optimizer", kind, "--steps", 2, "--learning-rate", 1e-3)
    assert (code, found["holds"], found["command"]) == (0, True, "theory optimiser")
    assert found["subject"]["options"]["optimiser"] == kind
    assert len(found["tables"]["steps"]) == 2


def test_optimizer_is_singular_at_one_over_an_eigenvalue(document: Document) -> None:
    _, found = document("optimizer", "--steps", 1)
    rate = 1 / found["tables"]["steps"][0]["largest_eigenvalue"]
    code, exact = document("optimizer", "--steps", 1, "--learning-rate", repr(rate))
    assert (code, exact["holds"]) == (1, False)
    code, lanczos = document("optimizer", "--method", "lanczos", "--learning-rate", repr(rate))
    assert (code, lanczos["holds"]) == (1, False)
    assert document("optimizer", "--method", "lanczos", "--learning-rate", repr(0.9 * rate))[0] == 0


def test_options_reach_the_optimizer(document: Document) -> None:
    given = ("--optimizer", "adamw", "--betas", 0.8, 0.9, "--eps", 1e-6, "--weight-decay", 0.1)
    _, found = document("optimizer", *given, "--momentum", 0.5, "--steps", 1, "--learning-rate", 0.01)
    expected = updates.OptimiserOptions("adamw", 1, 0.01, 0.5, (0.8, 0.9), 1e-6, 0.1, "exact")
    assert found["subject"]["options"] == expected.to_dict()


def test_optimizer_on_a_larger_model(llama: str, document: Document) -> None:
    given = ("--model", llama, *TWO, "--learning-rate", 1e-4)
    code, found = document("optimizer", *given, "--method", "lanczos")
    assert (code, found["holds"]) == (0, True)
    assert found["subject"]["parameters"] > 2000
    code, found = document("optimizer", *given)
    assert (code, found["error"]["code"]) == (2, "bad_option")


def test_discriminant(llama: str, document: Document, tmp_path: Path) -> None:
    given = ("discriminant", "--model", llama, *TWO, "--layer", 1)
    code, found = document(*given, "--learning-rate", 1e-5, "--only", "layers.0")
    assert (code, found["holds"], found["subject"]["layer"]) == (0, True, 1)
    assert found["subject"]["only"] == "layers.0"
    code, found = document(*given, "--learning-rate", 1.0)
    assert code == 0  # one such step is longer than the way to a collision, and no theory forbids it
    assert [verdict["holds"] for verdict in found["verdicts"]] == [True, True, True, False]
    constant = ids_file(tmp_path, [7, 7], [7, 7, 7])
    code, found = document("discriminant", "--model", llama, "--prompts", constant, "--no-bos")
    assert code == 1
    assert answers(found)["discriminant.apart"] is False


def test_a_collision_that_merges_embeddings_is_a_result(
    llama: str, document: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The nearest collision of two one-token prompts makes two rows equal, at every layer: no failure."""
    prompts = ids_file(tmp_path, [7], [9])
    given = ("--model", llama, "--prompts", prompts, "--no-bos", "--only", "embed_tokens")
    code, found = document("discriminant", *given, "--learning-rate", 1e-5)
    assert code == 0
    assert answers(found)["discriminant.reached"] is True
    assert answers(found)["discriminant.earlier_layers_apart"] is False
    (verdict,) = (one for one in found["verdicts"] if one["id"] == "discriminant.earlier_layers_apart")
    assert verdict["descriptive"]
    assert "tokens 7 = 9" in verdict["not_shown"]
    (row,) = found["tables"]["merged"]
    assert (row["first"], row["second"]) == (7, 9)
    assert main(["theory", "discriminant", *map(str, given)]) == 0
    assert "Merged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "argv"),
    [
        ("bad_model", ["analyticity", "no/such/folder"]),
        ("bad_layer", ["dichotomy", "--model", "llama", "--layers", "9"]),
        ("bad_prompt", ["dichotomy", "--model", "llama", "--text", "one"]),
        ("bad_option", ["dichotomy", "--model", "llama", *TWO, "--longest", "2"]),
        ("bad_option", ["dichotomy", "--model", "llama", "--count", "2"]),
        ("bad_option", ["dichotomy", "--model", "llama", "--draws", "1"]),
        ("bad_prompt", ["symmetry", "--model", "llama", "--text", "one"]),
        ("bad_option", ["symmetry", "--model", "llama", *TWO, "--count", "2"]),
        ("bad_option", ["optimizer", "--optimizer", "adagrad"]),
        ("bad_option", ["optimizer", "--method", "dense"]),
        ("bad_option", ["optimizer", "--text", "a prompt and no model"]),
        ("bad_option", ["discriminant", "--model", "llama"]),
        ("bad_prompt", ["discriminant", "--model", "llama", "--text", "one"]),
        ("bad_prompt", ["discriminant", "--model", "llama", "--text", "one", "--text", "one"]),
        ("bad_layer", ["discriminant", "--model", "llama", *TWO, "--layer", "9"]),
        ("bad_option", ["discriminant", "--model", "llama", *TWO, "--only", "("]),
        ("usage", ["nothing"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input(code: str, argv: list[str], llama: str, document: Document) -> None:
    exit_code, found = document(*(llama if part == "llama" else part for part in argv))
    assert exit_code == 2
    assert found.keys() == {"error"}
    assert found["error"]["code"] == code
    assert found["error"]["hint"]


def test_a_folder_that_is_a_file_is_refused_before_the_work(document: Document, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, found = document("verify", "--out", tmp_path / "file")
    assert (code, found["error"]["code"]) == (2, "bad_run_folder")


def test_verify(document: Document, tmp_path: Path) -> None:
    code, found = document("verify", "--out", tmp_path)
    assert (code, found["command"], found["holds"]) == (0, "theory verify", True)
    assert json.loads((tmp_path / "report.json").read_text()) == found
    reports = found["reports"]
    kinds = ["analyticity", "structure", "structure", "symmetry", *["optimiser"] * 4, "discriminant"]
    assert [report["check"] for report in reports] == kinds * 2
    verdicts = [verdict for report in reports for verdict in report["verdicts"]]
    assert len(verdicts) == 107  # as docs/theory.md says
    assert all(verdict["holds"] is True and not verdict["descriptive"] for verdict in verdicts)
    assert all(verdict["not_shown"] and verdict["bound"] is not None for verdict in verdicts)
    names = [verdict["id"] for verdict in verdicts]
    assert names.count(f"{SEPARATED_ABOVE}.denied") == 1  # of the Llama alone
    assert names.count(SEPARATED_ABOVE) == 3
    assert all(name and " " not in name for name in names)


def other_rate(
    state: Tensor, gradient: updates.Gradient, step: int, options: updates.OptimiserOptions
) -> Tensor:
    return state - 1.001 * options.learning_rate * gradient(state)


def kinked(*args: Any, **options: Any) -> LanguageModel:
    model = new_model(*args, **options)
    for block in model.anatomy.blocks:
        block.mlp.act_fn = torch.nn.ReLU()  # type: ignore[union-attr]
    return model


def smaller(patch: pytest.MonkeyPatch) -> None:
    """One model of one block, followed for one step."""
    patch.setattr(verification, "FAMILIES", ("llama",))
    patch.setattr(verification, "_BLOCKS", 1)
    patch.setattr(registry, "_STEPS", 1)
    patch.setattr(registry, "_OPTIMISERS", {"gradient-descent": {"learning_rate": 1e-2}})


def test_verify_sees_what_is_broken(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller(monkeypatch)
    code, found = document("verify")
    assert (code, found["holds"]) == (0, True)
    monkeypatch.setattr(verification, "new_model", kinked)  # analyticity
    monkeypatch.setattr(group.acts, "permute_heads", mix_queries_keys)  # symmetry
    monkeypatch.setitem(updates._UPDATES, "gradient-descent", other_rate)  # optimiser
    monkeypatch.setattr(discriminant, "COLLISION", 0.0)
    monkeypatch.setattr(rounding, "_PRODUCTS", 1e-3)  # structure: rounding is taken for distance
    code, found = document("verify")
    assert (code, found["holds"]) == (1, False)
    broken = [report["check"] for report in found["reports"] if not report["holds"]]
    kinds = ["analyticity", "structure", "structure", "symmetry", "optimiser", "optimiser", "discriminant"]
    assert broken == kinds  # the second structure: without analyticity almost every theta is left open


def test_a_denial_holds_where_the_statement_does_not() -> None:
    report = check_analyticity(verification.small_model("llama"))
    first = report.verdicts[0]
    denied = verification._denying(report, {first.id: "denied"})
    name = f"{first.id}.denied"
    assert denied.verdicts[0] == Verdict(name, "denied", False, first.value, first.bound, first.not_shown)
    assert denied.verdicts[1:] == report.verdicts[1:]
    assert denied.refuted == denied.verdicts[:1]
    with pytest.raises(AssertionError):
        verification._denying(report, {first.statement: "denied"})


def test_a_new_model_without_a_tokenizer() -> None:
    model = new_model("gpt2", (8, 1, 2), vocabulary=11, max_length=4, device="cpu")
    assert (model.vocab_size, model.tokenizer, model.max_length) == (11, None, 4)
    with pytest.raises(OptionError):
        new_model("gpt2", (8, 1, 2), max_length=4)


def test_experts_have_a_discriminant_too(tmp_path: Path, document: Document) -> None:
    """Grouped products of experts know no float64; the copy that is moved has none."""
    build("mixtral").save_pretrained(tmp_path / "mixtral")
    prompts = ids_file(tmp_path, [5, 1, 0, 9, 2], [30, 4, 1, 2, 8])
    given = ("--model", tmp_path / "mixtral", "--prompts", prompts, "--layer", 1, "--learning-rate", 1e-5)
    code, found = document("discriminant", *given)
    assert (code, found["holds"]) == (0, True)
