"""Plans: what work would cost, held against what it is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import preimage
from preimage.cli import main
from preimage.planning import Stage, WorkPlan, plan_capture, plan_collisions
from preimage.states.batches import Piece, cut
from preimage.states.layout import Layout, group_by_length
from support.folders import make_folder
from support.tiny import tiny


def plan(*stages: Stage, workers: int = 2, device: str = "cpu") -> WorkPlan:
    return WorkPlan("collisions", "m", stages, 1, 1, 1, 1, workers, device, 3.0, {})


def test_stages_are_shared_by_workers_and_what_is_serial_is_not() -> None:
    shared, serial = Stage("layers", 10, 2.0), Stage("noise", 1, 5.0, serial=True)
    assert plan(shared, serial).seconds == 3 + 20 + 5
    on = plan(shared, serial).seconds_on
    assert on[1] - on[4] == 20 - 2 * math.ceil(10 / 4)
    assert on[16] == on[64]  # ten pieces keep ten workers busy
    # workers that share the cores of one machine are as slow as they are many
    assert plan(shared).seconds_here >= plan(shared).seconds
    assert plan(shared, workers=1, device="cuda").seconds_here < plan(shared, workers=1).seconds_here + 20


def test_a_plan_counts_what_the_work_consists_of() -> None:
    model, lengths = tiny("llama"), [5, 9, 9, 5, 2]
    planned = plan_collisions(model, lengths, [0, 1, "final"], hard_bases=0)
    assert planned.forward_tokens == 30
    assert planned.pairs == 3 * 10
    stages = {stage.name: stage for stage in planned.stages}
    assert stages["layers compared"].pieces == 3
    layout = Layout(group_by_length(lengths), (0, 1, "final"), "last", model.d_model)
    assert stages["pieces captured"].pieces == len(cut(layout, 4096, Piece(0, 5)))
    whole = plan_capture(model, lengths, [1, 2])
    states = preimage.capture(model, [[1] * length for length in lengths], [1, 2])
    assert whole.disk_bytes == sum(states.at(i, at).numel() * 4 for i in range(5) for at in (1, 2))


def test_pairs_grow_like_n_squared_and_capture_like_n() -> None:
    model = tiny("llama")
    small, large = (plan_collisions(model, [8] * count, [1], hard_bases=0) for count in (100, 400))
    assert large.pairs == pytest.approx(16 * small.pairs, rel=0.02)
    assert large.forward_tokens == 4 * small.forward_tokens
    assert large.memory_bytes > small.memory_bytes


COMMANDS = {
    "collisions": ["--count", "50"],
    "continuations": [],
    "geometry": ["--count", "50"],
    "capture": ["--count", "5", "--out", "never"],
    "invert": ["--count", "4", "--layer", "2"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_long_command_has_a_plan_and_runs_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_folder(tmp_path / "model")
    given = [name, "--model", str(model), "--plan", "--workers", "3", *COMMANDS[name]]
    given += ["--text", "a"] if name == "continuations" else ["--prompts", "random", "--length", "9"]
    assert main([*given, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["command"] == name
    assert said["plan"]["workers"] == 3
    assert said["plan"]["seconds"] > 0
    assert set(said["plan"]["seconds_on"]) >= {"1", "3", "8"}
    assert main(given) == 0
    assert "Nothing was run." in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--workers", "2"], "--workers goes with --cluster."),
        (["--cluster", "local", "--workers", "0"], "--workers is 0."),
        (["--cluster", "nowhere"], "The cluster 'nowhere' is none."),
        (["--cluster", "ray://host:1"], "The cluster 'ray://host:1' is none."),
    ],
)
def test_a_cluster_that_is_none_is_refused_before_the_model_is_loaded(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collisions", "--model", "none", "--json", *given]) == 2
    assert words in json.loads(capsys.readouterr().out)["error"]["message"]
