"""``preimage invert``."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preimage.cli import DONE, FINDINGS
from preimage.cli import arguments as arg
from preimage.cli.elsewhere import (
    ClusterAddress,
    OnlyPlan,
    WorkerCount,
    check_cluster,
    load_seconds,
    planned_workers,
    show_plan,
    working_on,
)
from preimage.cli.ending import print_written
from preimage.cli.terminal import print_lines, print_result, print_table, progress_bar
from preimage.errors import BundleError, OptionError
from preimage.layers import parse_layer
from preimage.observations import in_words
from preimage.storage import read_manifest

if TYPE_CHECKING:
    from preimage.inversion.options import InvertOptions
    from preimage.inversion.result import Inversion
    from preimage.models import LanguageModel
    from preimage.preparation import Preparation
    from preimage.states import States

_BAR = 24  # characters of the longest bar
_DOUBTFUL = 0.9  # confidence below which a token is marked

_States = Annotated[
    Path | None,
    typer.Argument(help="States to invert blind: a bundle, or a .safetensors, .npy, .npz or .pt file."),
]
_Model = Annotated[
    str | None, typer.Option(help="Alias, hub id, folder or GGUF file; default: the bundle's, or smollm2.")
]


def invert(
    path: _States = None,
    model: _Model = None,
    text: arg.Texts = None,
    prompts: arg.Source = None,
    count: arg.Count = None,
    length: arg.Length = None,
    seed: arg.Seed = 0,
    bos: arg.Bos = None,
    layer: Annotated[str | None, typer.Option(help="The layer to invert from.")] = None,
    key: arg.Key = None,
    mask_key: arg.MaskKey = None,
    scale_key: arg.ScaleKey = None,
    observe: arg.Observe = None,
    stored: arg.Stored = None,
    positions: arg.SeenPositions = None,
    at: arg.At = None,
    rotary: arg.Rotary = None,
    permuted: arg.Permuted = False,
    rotated: arg.Rotated = False,
    prefix: Annotated[str | None, typer.Option(help="Text known to stand before the first state.")] = None,
    method: Annotated[
        str,
        typer.Option(
            help="fast, sipit, brute-force, hard-prompts, vocabulary-match, nearest-embedding, logit-lens."
        ),
    ] = "fast",
    steps: Annotated[
        int | None, typer.Option(help="Steps of hard-prompts; default: positions x vocabulary / 4.")
    ] = None,
    proposers: arg.Proposers = None,
    lens: Annotated[Path | None, typer.Option(help="The file of the lens that proposes.")] = None,
    train_lens: Annotated[
        bool | None,
        typer.Option(help="Train a lens first where there is none; default: where there is much to invert."),
    ] = None,
    prove: Annotated[bool, typer.Option(help="Try the whole vocabulary at every position; slow.")] = False,
    tolerance: Annotated[float | None, typer.Option(help="Relative; default: calibrated.")] = None,
    max_tests: Annotated[int | None, typer.Option(help="Verifier tests a prompt may cost.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds a prompt may cost.")] = None,
    published_cost: Annotated[bool, typer.Option(help="No prefix cache, no batches.")] = False,
    any_model: Annotated[bool, typer.Option(help="Try also a model that did not make the bundle.")] = False,
    out: arg.Out = None,
    cluster: ClusterAddress = None,
    workers: WorkerCount = None,
    plan: OnlyPlan = False,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    device_map: arg.DeviceMap = None,
    json: arg.Json = False,
) -> int:
    """Recover prompts from hidden states: of a bundle or file, or of prompts run for this purpose."""
    import preimage
    from preimage.inversion import HardPromptSettings, InvertOptions
    from preimage.preparation import Preparation

    check_cluster(cluster, workers, plan=plan)
    learned = method == "fast" and not proposers and lens is None
    if train_lens and not learned:
        raise OptionError("--train-lens needs the fast method and its own choice.", "Leave one of them out.")
    if steps is not None and method != "hard-prompts":
        raise OptionError(f"--steps is for hard-prompts; the method is {method}.", "Leave it out.")
    options = InvertOptions(
        method=method, proposers=proposers, lens=lens, prove=prove, seed=seed, tolerance=tolerance,
        max_tests=max_tests, timeout=timeout, published_cost=published_cost, prefix=prefix or "",
        hard_prompts=HardPromptSettings(steps=steps),
    )  # fmt: skip
    choice = arg.PromptChoice(text, prompts, count, length, seed, bos)
    told = arg.StatesChoice(
        key, mask_key, observe, stored, positions, rotary, permuted, rotated, scale_key, at
    )
    manifest = _check_source(path, choice, told, layer, prefix)
    named = model or ((manifest or {}).get("model") or {}).get("name") or "smollm2"
    prepared = Preparation(named, dtype=dtype, device=device, device_map=device_map)
    states, name = _open(path, manifest, choice, told, layer, prepared, any_model)
    loaded = arg.load_named(prepared)
    if plan:
        _show_plan(loaded, states, layer, options, planned_workers(workers), json)
        return DONE
    if learned:
        _train_if_worth(loaded, states, layer, train_lens)
    with working_on(cluster, workers, device), progress_bar() as progress:
        results = preimage.invert(loaded, states, layer, options=options, out=out, progress=progress)
    _print_json(results, states, name, loaded) if json else _show(results, loaded)
    if prove:
        _show_proofs(results, loaded, out, json)
    if not json:
        print_lines(_counted(results))
        print_written(out)
    return DONE if all(result.status in ("recovered", "likely") for result in results) else FINDINGS


def _show_plan(
    model: LanguageModel, states: States, layer: str | None, options: InvertOptions, workers: int, json: bool
) -> None:
    """What the inversion would cost, by its first prompt."""
    from preimage.inversion import invert as invert_states
    from preimage.planning import plan_inversion
    from preimage.states import States as Wrapped

    seconds = load_seconds()
    at = parse_layer(layer, model.n_layers) if layer is not None else states.layers[0]

    def invert_one() -> tuple[float, float, int]:
        first = Wrapped.from_tensor([states.at(0, at)], at, observation=states.observation)
        (found,) = invert_states(model, first, at, options=options)
        return found.setup_seconds, found.seconds, found.forward_tokens

    lengths = [max(1, length) for length in states.lengths]
    show_plan(plan_inversion(model, lengths, invert_one, load_seconds=seconds, workers=workers), json)


def _train_if_worth(model: LanguageModel, states: States, layer: str | None, wanted: bool | None) -> None:
    """Train a lens where there is none and it was asked for, or there is much to invert; say so."""
    if wanted is False or states.positions != "all":
        return
    at = parse_layer(layer, model.n_layers) if layer is not None else states.layers[0]
    if len(states.layers) > 1 and layer is None:
        return  # refused later, by name
    from preimage.inversion.proposers.lens_files import default_path, find_lenses
    from preimage.training import is_worth_training, train_lens, training_tokens

    tap = states.observation.tap(at, model.n_layers)
    tokens = sum(states.lengths)
    if find_lenses(model, tap) if wanted else not is_worth_training(model, tap, tokens):
        return
    path = default_path(model, tap)
    typer.echo(
        f"There is no lens for {in_words(tap)} of {model.name}. One is trained first, for about "
        f"{training_tokens(model, tap):,} forward tokens, and kept in {path}; the prompts have {tokens:,}. "
        "--no-train-lens leaves it out.",
        err=True,
    )
    with progress_bar() as progress:
        train_lens(model, tap, out=path, progress=progress)


def _print_json(results: list[Inversion], states: States, key: str | None, model: LanguageModel) -> None:
    seen = {"observation": states.observation.to_dict(), "key": key, "prompts": states.prompts}
    rows = [_with_truth(result, states, index) for index, result in enumerate(results)]
    print_result("invert", {"model": model.identity.to_dict()} | seen | {"results": rows})


def _check_source(
    path: Path | None, choice: arg.PromptChoice, told: arg.StatesChoice, layer: str | None, prefix: str | None
) -> dict[str, Any] | None:
    """The manifest where states come from a bundle; what does not go together is refused."""
    if path is None:
        told.refuse(*vars(told), hint="Give states with it: a bundle or a file.")
        if prefix is not None:
            raise OptionError("--prefix cannot be used here.", "Give states with it: a bundle or a file.")
        return None
    if choice.texts or choice.source:
        raise OptionError("States and prompts were given.", "Give one of them.")
    if path.suffix and not path.is_dir():
        told.check(path, layer)
        return None
    told.refuse("key", "mask_key", "scale_key", hint="A bundle says where its states are; leave it out.")
    _ = told.observation  # which refuses what is no observation
    return read_manifest(path)


def _open(
    path: Path | None,
    manifest: dict[str, Any] | None,
    choice: arg.PromptChoice,
    told: arg.StatesChoice,
    layer: str | None,
    prepared: Preparation,
    any_model: bool,
) -> tuple[States, str | None]:
    """The states, and the name of their tensor in a file that holds several."""
    if layer is not None:
        parse_layer(layer, prepared.known.n_layers)  # a wrong one is refused before weights are read
    if path is None:
        return _capture(choice, prepared, layer), None
    if manifest is None:
        return told.read(path, layer, prepared)
    return _open_bundle(path, manifest, told, prepared, any_model), None


def _capture(choice: arg.PromptChoice, prepared: Preparation, layer: str | None) -> States:
    """States of prompts run for this purpose; without a layer, of the middle one."""
    depth = prepared.known.n_layers
    at = (depth + 1) // 2 if layer is None else parse_layer(layer, depth)
    choice.of(prepared)  # wrong ones are refused before the weights are loaded, and torch
    from preimage.states import capture

    loaded = arg.load_named(prepared)
    return capture(loaded, choice.of(prepared), at)  # as the loaded tokenizer has them


def _open_bundle(
    path: Path, manifest: dict[str, Any], told: arg.StatesChoice, prepared: Preparation, any_model: bool
) -> States:
    """A bundle's states, held against the model before its weights are read, and then against them."""
    from preimage.states import IN_A_CACHE, observed_width, states_from
    from preimage.states.bundle import open_bundle

    states = states_from(open_bundle(path, manifest), prepared.known, observe=told.observation)
    sizes = arg.load_named(prepared) if states.observation.place in IN_A_CACHE else prepared.known
    states.require_sizes(prepared.name, observed_width(sizes, states.observation), sizes.max_length)
    if not any_model:
        _check_files(prepared, states.model or {})
        states.require_made_by(arg.load_named(prepared))
    return states


def _check_files(prepared: Preparation, made_by: dict[str, Any]) -> None:
    """Refuse another model's files before they are loaded; what passes is checked again by its weights."""
    theirs = made_by.get("files_hash")
    ours = prepared.files.hash if theirs and prepared.files else None
    if theirs and ours and theirs != ours:
        raise BundleError(
            f"These states were made by {made_by['name']} (files {theirs[:12]}), not by {prepared.name} "
            f"(files {ours[:12]}).",
            "Use the model that made them, or --any-model to try this one.",
        )


def _show_proofs(results: list[Inversion], model: LanguageModel, out: Path | None, json: bool) -> None:
    """The margins of a proof: in the terminal, and as figures where there is a place for them."""
    if not json:
        _show_margins(results, model)
    if out is None:
        return
    from preimage.figures import made_now, margin_figure, save_figures

    for index, result in enumerate(results):
        if result.token_ids:
            figure = margin_figure(result, lambda token: model.decode([token]) or str(token))
            about = made_now(model.identity.to_dict())
            save_figures({f"margins-{index}": figure}, out, about=about)


def _show_margins(results: list[Inversion], model: LanguageModel) -> None:
    """The margin at every position, with a bar on a logarithmic scale."""
    for index, result in enumerate(results):
        proved = [position for position in result.positions if position.margin is not None]
        logs = [math.log10(max(position.margin or 0.0, position.radius)) for position in proved]
        low, high = min(logs, default=0.0) - 0.5, max(logs, default=0.0)
        rows = []
        for position, log in zip(proved, logs, strict=True):
            bar = "█" * max(1, round(_BAR * (log - low) / (high - low)))
            shown, rival = (
                model.decode([token]) or str(token)
                for token in (position.token_id, position.runner_up_id or 0)
            )
            rows.append([str(position.index), shown, f"{position.margin:.4g}",
                         f"{position.tolerated_noise:.4g}", rival, bar])  # fmt: skip
        columns = ["position", "token", "margin D", "tolerated D/2", "nearest other", "D, logarithmic"]
        print_table(f"Margins of prompt {index}", columns, rows)


def _with_truth(result: Inversion, states: States, index: int) -> dict[str, Any]:
    """The result, and whether it claims the prompt that was run, where that is known."""
    truth = states.token_ids[index] if states.token_ids is not None else None
    exact = None if truth is None else result.claims(truth)
    return {"index": index, "exact": exact, **result.to_dict()}


def _show(results: list[Inversion], model: LanguageModel) -> None:
    rows = []
    for index, result in enumerate(results):
        shown = result.text if result.text is not None else " ".join(map(str, result.token_ids))
        if result.status in ("likely", "not_recovered"):
            shown = _marked(result, model)
        rows.append([str(index), result.status, shown, str(result.tests), f"{result.seconds:.1f} s"])
    columns = ["#", "status", "prompt", "tests", "time"]
    print_table("Recovered prompts", columns, rows, prose=["prompt"])
    if any(result.status in ("likely", "not_recovered") for result in results):
        print_lines(f"[token?]: less than {_DOUBTFUL:.0%} sure")
    for index, result in enumerate(results):
        if result.reason:
            print_lines(f"{index}: {result.reason}")
        if result.uniqueness:
            print_lines(f"{index}: nothing else fits ({result.unique}). {result.uniqueness}")
        if result.status == "ambiguous":
            print_lines(f"{index}: {result.fitting}{'' if result.complete else ' or more'} prompts fit:")
            print_lines(*(f"  {list(ids)}" for ids in result.alternatives))


def _counted(results: list[Inversion]) -> str:
    """How many prompts were recovered, and what became of the others."""
    statuses = Counter(result.status for result in results)
    right = statuses.pop("recovered", 0)
    others = (f", {number} {status.replace('_', ' ')}" for status, number in statuses.items())
    return f"{right} of {len(results)} recovered{''.join(others)}."


def _marked(result: Inversion, model: LanguageModel) -> str:
    """What was read, doubtful tokens in brackets; tokens in a row that are alike in that are one text."""
    read = zip(result.reading.token_ids, result.reading.confidence, strict=True)
    parts = []
    for doubtful, run in groupby(read, lambda one: one[1] < _DOUBTFUL):
        tokens = [token for token, _ in run]
        text = model.decode(tokens)
        shown = " ".join(map(str, tokens)) if text is None else text
        parts.append(f"[{shown}?]" if doubtful else shown)
    return "".join(parts) if model.tokenizer is not None else " ".join(parts)
