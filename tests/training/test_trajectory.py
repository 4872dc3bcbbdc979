"""Training from scratch with the geometry measured as it goes: what it finds, and that it can be stopped."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

import preimage
from preimage.cli import main
from preimage.errors import OptionError, PreimageError, PromptError, RunFolderError
from preimage.figures import trajectory_figure
from preimage.models import FAMILIES, SIZES, new_model, scratch, train_tokenizer
from preimage.models.float64 import double_copy
from preimage.prompts import PromptOptions, documents, gather
from preimage.storage import Run, read_json
from preimage.training import checkpoint_steps, text, trainer, trajectory
from preimage.training.result import Trajectory
from preimage.training.text import TrainingText, prepare_text
from preimage.training.trainer import Recipe
from preimage.training.trajectory import Training

OPTIONS = preimage.TrajectoryOptions(
    size="tiny", steps=30, batch=4, window=32, learning_rate=3e-3, checkpoints=5, probes=50, length=12,
    vocabulary=400, bits=(None, 4),
)  # fmt: skip
STEPS = checkpoint_steps(30, 5)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    whole = "\n".join(text for _, text in documents("prose", "test"))
    return [whole[start : start + 3000] for start in range(0, 30_000, 3000)]


@pytest.fixture(scope="module")
def prepared(texts: list[str]) -> TrainingText:
    return prepare_text(texts, OPTIONS)


@pytest.fixture(scope="module")
def runs(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trajectory, Path]]:
    """An uninterrupted run of each family, and its folder."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp("runs") / family
        run = preimage.train_trajectory(OPTIONS, family=family, texts=texts, out=folder, device="cpu")
        found[family] = (run, folder)
    return found


# --- when, on what, and of what size ---------------------------------------------------------------


def test_checkpoints_are_spaced_in_equal_ratios() -> None:
    assert checkpoint_steps(10_000, 6) == (0, 1, 10, 100, 1000, 10_000)
    assert checkpoint_steps(7, 2) == (0, 7)
    assert checkpoint_steps(5, 6) == (0, 1, 2, 3, 4, 5)
    for steps in (1, 2, 3, 10, 97, 600):
        for count in range(2, min(steps, 40) + 2):
            found = checkpoint_steps(steps, count)
            assert len(found) == count
            assert found[0] == 0
            assert found[-1] == steps
            assert list(found) == sorted(set(found))


def test_the_learning_rate_warms_up_and_falls() -> None:
    recipe = Recipe(steps=200, rate=1.0, lowest=0.1, weight_decay=0.0, betas=(0.9, 0.95))
    rates = [recipe.rate_at(step) for step in range(200)]
    assert rates.index(max(rates)) in (19, 20)
    assert max(rates) == 1.0
    assert rates[0] == 1 / 20
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("size", SIZES)
def test_families_of_a_size_have_as_many_parameters(size: str) -> None:
    with torch.device("meta"):  # the largest has 88 million
        counts = [
            sum(p.numel() for p in build(SIZES[size], 128, 4096, 0).parameters())
            for build in (scratch._gpt2, scratch._llama)
        ]
    assert max(counts) < 1.1 * min(counts)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_is_a_model(family: str, prepared: TrainingText) -> None:
    def model(seed: int, size: str | tuple[int, int, int] = "tiny") -> preimage.LanguageModel:
        return new_model(family, size, tokenizer=prepared.tokenizer, max_length=32, seed=seed, device="cpu")

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert model(1).identity.weight_hash == model(1).identity.weight_hash
    assert torch.equal(torch.rand(3), expected), "the caller's random numbers were touched"
    assert model(1).identity.weight_hash != model(2).identity.weight_hash
    other = model(0, (48, 3, 4))
    assert (other.d_model, other.n_layers, other.max_length) == (48, 3, 32)
    assert other.vocab_size == len(prepared.tokenizer)


def test_the_tokenizer_writes_any_text_and_is_the_same_twice(texts: list[str]) -> None:
    one, other = (train_tokenizer(texts, 300) for _ in "ab")
    assert one.get_vocab() == other.get_vocab()
    assert len(one) == 300
    strange = "naïve \t 漢字 \x00 🙂\n\n  if x:"
    assert one.decode(one(strange)["input_ids"], clean_up_tokenization_spaces=False) == strange
    assert one.bos_token_id == one.eos_token_id == one.convert_tokens_to_ids("<|endoftext|>")
    with pytest.raises(OptionError, match="vocabulary"):
        train_tokenizer(texts, 200)


def test_probes_are_of_the_text_held_out() -> None:
    text = "".join(f"line {number} is {number * number}; " for number in range(4000))
    found = prepare_text([text], OPTIONS)
    border = len(text) - len(text) // 4
    assert found.tokenizer.decode(found.train[1:].tolist()) == text[:border]
    assert len(set(found.probes)) == OPTIONS.probes
    assert set(found.probes.lengths) == {OPTIONS.length}
    for ids in [*found.probes, *found.held_out.tolist()]:
        assert found.tokenizer.decode(list(ids)).removeprefix("<|endoftext|>") in text[border:]
    again = prepare_text([text], replace(OPTIONS, seed=3, family="llama", size="small"))
    assert again.probes == found.probes, "runs of one text are compared on the same probes"


def test_too_little_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(PromptError, match="fewer than a window"):
        prepare_text(["short"], OPTIONS)
    with pytest.raises(PromptError, match="probes of 12 tokens, not 100000"):
        prepare_text(texts, replace(OPTIONS, probes=100_000))
    with pytest.raises(PromptError, match="not a list of texts"):
        prepare_text("one text", OPTIONS)


def test_every_step_has_windows_of_its_own(prepared: TrainingText) -> None:
    model = new_model("gpt2", "tiny", tokenizer=prepared.tokenizer, max_length=32, device="cpu")
    drawn = set()
    for seed in (0, 1):
        running = Training(model, prepared.train, replace(OPTIONS, seed=seed))
        for step in range(20):
            windows = running._batch(step)
            assert windows.shape == (OPTIONS.batch, OPTIONS.window)
            drawn.add(tuple(windows.flatten().tolist()))
            assert torch.equal(running._batch(step), windows)
    assert len(drawn) == 40
    whole = Training(model, prepared.train[: OPTIONS.window], OPTIONS)._batch(0)
    assert torch.equal(whole, prepared.train[: OPTIONS.window].expand(OPTIONS.batch, -1))


def test_the_loss_is_that_of_transformers(prepared: TrainingText) -> None:
    model = new_model("llama", "tiny", tokenizer=prepared.tokenizer, max_length=32, device="cpu")
    with torch.no_grad():
        plain = model.module(prepared.held_out, labels=prepared.held_out).loss
    assert Training(model, prepared.train, OPTIONS).loss(prepared.held_out) == pytest.approx(
        float(plain), rel=1e-5
    )


# --- what a run finds ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run(family: str, runs: dict[str, tuple[Trajectory, Path]], prepared: TrainingText) -> None:
    run, _ = runs[family]
    assert tuple(at.step for at in run.checkpoints) == STEPS
    assert run.probes == prepared.probes.fingerprint
    first, last = run.checkpoints[0], run.checkpoints[-1]
    assert first.training_loss is None
    assert first.held_out_loss == pytest.approx(math.log(len(prepared.tokenizer)), rel=0.02)
    assert last.held_out_loss < first.held_out_loss - 0.7
    assert last.training_loss is not None
    assert last.training_loss < first.held_out_loss
    assert len({at.weight_hash for at in run.checkpoints}) == len(STEPS)
    for at in run.checkpoints:
        assert at.geometry.prompts == OPTIONS.probes
        assert list(at.geometry.layers) == [0, 1, 2, "final"]
        assert list(at.geometry.quantised) == [4]
        assert at.collisions == 0
        assert at.smallest("normalised_margin")[1] > 1e6 * at.noise_floor
    assert first.geometry.layers[0].margin == 0  # some probes end alike
    assert run.model["parameters"] == sum(
        p.numel() for p in preimage.load(runs[family][1] / "model").module.parameters()
    )


def test_derived_values(runs: dict[str, tuple[Trajectory, Path]]) -> None:
    run, _ = runs["gpt2"]
    margins = {
        (at.step, layer): found.margin
        for at in run.checkpoints
        for layer, found in at.geometry.layers.items()
        if layer != 0
    }
    least = run.smallest
    assert least.margin == min(margins.values()) == margins[least.step, least.layer]
    drift = run.drift("normalised_margin_quantile")
    values = {at.step: at.smallest("normalised_margin_quantile")[1] for at in run.checkpoints}
    assert (drift.first, drift.last, drift.half_step) == (values[0], values[30], 10)
    assert drift.from_start == pytest.approx((values[30] - values[0]) / values[0])
    assert drift.second_half == pytest.approx((values[30] - values[10]) / values[10])
    assert Trajectory.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    rows = run.rows()
    assert len(rows) == len(STEPS) * 4 * 2
    assert {row["training_step"] for row in rows} == set(STEPS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_saved_model_has_the_last_margins(
    family: str, runs: dict[str, tuple[Trajectory, Path]], texts: list[str]
) -> None:
    run, folder = runs[family]
    model = preimage.load(folder / "model", dtype="float64", device="cpu")
    probes = gather(folder / "probes.jsonl", model, PromptOptions())
    assert probes.fingerprint == run.probes
    assert model.identity.weight_hash == run.checkpoints[-1].weight_hash
    throughout = double_copy(preimage.load(folder / "model", device="cpu"))
    states = preimage.capture(throughout, probes, positions="last", batch_tokens=4096)
    expected = replace(run.checkpoints[-1].geometry, source=probes.source)
    assert preimage.measure_geometry(states, bits=(None, 4), subsets=0, model=throughout) == expected
    plain = preimage.capture(model, probes, positions="last", batch_tokens=4096)  # float32 within, for Llama
    margins = preimage.measure_geometry(plain, bits=(None,), subsets=0).layers["final"]
    assert margins.margin == pytest.approx(expected.layers["final"].margin, rel=1e-5)
    text = texts[0]
    assert model.decode(model.tokenizer(text)["input_ids"]) == text


def test_nothing_is_left_in_the_cache(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path))
    preimage.train_trajectory(OPTIONS, steps=2, checkpoints=2, texts=texts, device="cpu")
    assert list(tmp_path.rglob("*")) == []


def test_measuring_does_not_change_the_training(
    runs: dict[str, tuple[Trajectory, Path]], texts: list[str]
) -> None:
    few = preimage.train_trajectory(OPTIONS, checkpoints=2, texts=texts, device="cpu")
    whole = runs["gpt2"][0]
    assert few.checkpoints[0] == whole.checkpoints[0]
    assert few.checkpoints[-1].geometry == whole.checkpoints[-1].geometry
    assert few.checkpoints[-1].weight_hash == whole.checkpoints[-1].weight_hash


def test_the_default_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(kind: str, split: str) -> Iterator[tuple[str, str]]:
        return islice(documents(kind, split), 20)  # type: ignore[arg-type]  # all of them take a while

    monkeypatch.setattr(text, "documents", few)
    run = preimage.train_trajectory(
        size="tiny", steps=2, batch=2, window=16, checkpoints=2, probes=20, length=8, vocabulary=300,
        device="cpu",
    )  # fmt: skip
    assert [at.step for at in run.checkpoints] == [0, 2]
    assert run.checkpoints[-1].collisions == 0
    assert run.options["learning_rate"] == pytest.approx(1e-3 * 2**0.5)


# --- stopped and continued -------------------------------------------------------------------------


def same_run(one: Path, other: Path) -> None:
    names = ("run.json", "checkpoints.parquet", "probes.jsonl", "model/model.safetensors")
    for name in (*names, "model/tokenizer.json", "items.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())


@pytest.mark.parametrize("moment", ["between", "before_item", "after_item", "model", "finish"])
def test_a_stopped_run_continues_to_the_bit(
    moment: str,
    runs: dict[str, tuple[Trajectory, Path]],
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, whole = runs["gpt2"]
    out = tmp_path / "run"
    add, measure = Run.keep, trajectory._checkpoint
    trained: list[int] = []

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def stop_after_item(self: Run, key: int, item: object) -> None:
        add(self, key, item)
        if key == STEPS[3]:
            stop()

    def stop_before_item(running: Training, *rest: object) -> object:
        return stop() if running.step == STEPS[3] else measure(running, *rest)  # type: ignore[arg-type]

    def watch(done: int, total: int, note: str) -> None:
        trained.append(done)
        if moment == "between" and done == STEPS[3] + 4:
            stop()

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_SAVE_SECONDS", -1.0)
        if moment == "before_item":
            patch.setattr(trajectory, "_checkpoint", stop_before_item)
        if moment == "after_item":
            patch.setattr(Run, "keep", stop_after_item)
        if moment == "model":
            patch.setattr(trajectory, "save_model", stop)
        if moment == "finish":
            patch.setattr(Run, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            preimage.train_trajectory(OPTIONS, texts=texts, out=out, device="cpu", progress=watch)
    moment = "continued"
    again = preimage.train_trajectory(OPTIONS, texts=texts, out=out, device="cpu", progress=watch)
    assert again == expected
    assert len(trained) <= 31, "steps already made were made again"
    same_run(out, whole)
    assert preimage.train_trajectory(OPTIONS, texts=texts, out=out, device="cpu") == expected


def test_a_killed_process_continues_to_the_bit(
    runs: dict[str, tuple[Trajectory, Path]], texts: list[str], tmp_path: Path
) -> None:
    """No cleaning up: the process is gone from one moment to the next."""
    out = tmp_path / "run"
    script = (
        "import json, os, signal, sys, torch, preimage\n"
        "from preimage.storage import Run\n"
        "torch.set_num_threads(1)\n"
        "add = Run.keep\n"
        "def killed_after_three(self, key, item):\n"
        "    add(self, key, item)\n"
        "    if len(self.items) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Run.keep = killed_after_three\n"
        "given = json.loads(sys.stdin.read())\n"
        "options = preimage.TrajectoryOptions(**given['options'] | {'bits': (None, 4)})\n"
        "preimage.train_trajectory(options, texts=given['texts'], out=given['out'], device='cpu')\n"
    )
    given = json.dumps({"options": OPTIONS.to_dict(), "texts": texts, "out": str(out)})
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (out / "items.jsonl").read_bytes().count(b"\n") == 3
    assert preimage.train_trajectory(OPTIONS, texts=texts, out=out, device="cpu") == runs["gpt2"][0]
    same_run(out, runs["gpt2"][1])


def test_a_folder_of_other_work_is_refused(
    runs: dict[str, tuple[Trajectory, Path]], texts: list[str], tmp_path: Path
) -> None:
    folder = runs["gpt2"][1]
    with pytest.raises(RunFolderError, match="another options"):
        preimage.train_trajectory(OPTIONS, steps=31, texts=texts, out=folder, device="cpu")
    with pytest.raises(RunFolderError, match="another text"):
        preimage.train_trajectory(OPTIONS, texts=texts[1:], out=folder, device="cpu")
    out = tmp_path / "run"
    out.mkdir()
    (out / "run.json").write_bytes((folder / "run.json").read_bytes())
    (out / "items.jsonl").write_bytes(b"".join((folder / "items.jsonl").read_bytes().splitlines(True)[:3]))
    with pytest.raises(RunFolderError, match="missing or too old"):
        preimage.train_trajectory(OPTIONS, texts=texts, out=out, device="cpu")
    (out / "training.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(RunFolderError, match="cannot be read"):
        preimage.train_trajectory(OPTIONS, texts=texts, out=out, device="cpu")


# --- options, figure, command ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"family": "bert"},
        {"size": "huge"},
        {"size": (64, 2)},
        {"size": (64, 2, 3)},
        {"size": (64, 0, 2)},
        {"steps": 0},
        {"steps": 3, "checkpoints": 5},
        {"checkpoints": 1},
        {"window": 1},
        {"batch": 0},
        {"probes": 1},
        {"learning_rate": 0.0},
        {"vocabulary": 256},
        {"bits": (1,)},
        {"seed": -1},
        {"seed": 2**32},
        {"device": "nowhere"},
    ],
    ids=str,
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PreimageError) as caught:
        preimage.train_trajectory(**wrong)  # type: ignore[arg-type]
    assert caught.value.message


def test_a_training_that_breaks_down_says_so(prepared: TrainingText) -> None:
    model = new_model("gpt2", "tiny", tokenizer=prepared.tokenizer, max_length=32, device="cpu")
    running = Training(model, prepared.train, OPTIONS)
    with torch.no_grad():
        next(model.module.parameters())[0, 0] = torch.inf
    with pytest.raises(OptionError, match="broke down at step 0"):
        running.advance(3)


def test_the_figure_holds_every_checkpoint(runs: dict[str, tuple[Trajectory, Path]]) -> None:
    figure = trajectory_figure({family: run for family, (run, _) in runs.items()})
    assert len(figure.data) == 8
    ticks = figure.layout.xaxis.ticktext
    assert (ticks[0], ticks[-1]) == ("0", str(STEPS[-1]))  # whatever lies between, both ends have a tick
    for number, family in enumerate(FAMILIES):
        run = runs[family][0]
        curves = figure.data[4 * number : 4 * number + 4]
        for curve in curves:
            assert curve.name == family
            assert list(curve.x) == [0.5, *STEPS[1:]]
        assert list(curves[0].y) == [at.smallest("normalised_margin_quantile")[1] for at in run.checkpoints]
        assert list(curves[1].y) == [
            at.geometry.layers["final"].normalised_margin_quantile for at in run.checkpoints
        ]
        assert list(curves[2].y) == [
            at.smallest("normalised_colipschitz_quantile")[1] for at in run.checkpoints
        ]
        assert list(curves[3].y) == [at.held_out_loss for at in run.checkpoints]


def test_the_command(texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("\n".join(texts), encoding="utf-8")
    given = ["trajectory", "--family", "llama", "--size", "32,1,2", "--steps", "4", "--checkpoints", "3",
             "--batch", "2", "--window", "16", "--probes", "20", "--length", "8", "--vocabulary", "300",
             "--text", str(file), "--device", "cpu", "--out", str(tmp_path / "run")]  # fmt: skip
    assert main([*given, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [at["step"] for at in document["checkpoints"]] == [0, 1, 4]
    assert document["model"]["architecture"] == "LlamaForCausalLM"
    assert document["drift"]["margin"]["half_step"] == 1
    assert read_json(tmp_path / "run" / "run.json")["results"]["smallest"] == document["smallest"]
    for name in ("checkpoints.parquet", "trajectory.html", "model/config.json"):
        assert (tmp_path / "run" / name).exists()
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "Smallest margin of all" in shown
    assert "llama-32x1x2" in shown


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        (["--family", "bert"], "bad_option", "Family 'bert' is not known."),
        (["--size", "huge"], "bad_option", "Size 'huge' is not known."),
        (["--size", "64,2,x"], "bad_option", "--size is '64,2,x'."),
        (["--bits", "x"], "bad_option", "--bits is 'x'."),
        (["--steps", "0"], "bad_option", "steps is 0"),
        (["--text", "no-such-file.txt"], "bad_prompt", "'no-such-file.txt' does not exist."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_refuses_at_once(
    wrong: list[str], code: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trajectory", *wrong, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert set(error) == {"code", "message", "hint"}
    assert error["code"] == code
    assert said in error["message"]


def test_a_refusal_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from preimage.cli import main; "
        "assert main(['trajectory', '--size', 'huge']) == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_token_ids_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text('{"token_ids": [1, 2]}\n')
    assert main(["trajectory", "--text", str(file), "--json"]) == 2
    assert "token ids" in json.loads(capsys.readouterr().out)["error"]["message"]
