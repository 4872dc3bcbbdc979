"""``preimage capture``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from preimage.cli.terminal import print_lines, print_result, print_whole, progress_bar
from preimage.errors import OptionError
from preimage.observations import Observation

if TYPE_CHECKING:
    from preimage.states import States


def capture(
    out: Annotated[Path, typer.Option(help="Folder of the bundle to make.")],
    model: arg.Model = "smollm2",
    text: arg.Texts = None,
    prompts: arg.Source = None,
    count: arg.Count = None,
    length: arg.Length = None,
    seed: arg.Seed = 0,
    bos: arg.Bos = None,
    layers: arg.Layers = "all",
    observe: arg.Observe = None,
    rotary: arg.Rotary = None,
    positions: Annotated[
        str, typer.Option(help="all, or last; of --from-tensor also mean, shuffled.")
    ] = "all",
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens in one pass.")] = None,
    withhold_ids: Annotated[bool, typer.Option(help="Leave the token ids out of the bundle.")] = False,
    from_tensor: Annotated[
        Path | None, typer.Option(help="Make the bundle from this .safetensors, .npy, .npz or .pt instead.")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="The layer of --from-tensor.")] = None,
    key: arg.Key = None,
    mask_key: arg.MaskKey = None,
    scale_key: arg.ScaleKey = None,
    cluster: ClusterAddress = None,
    workers: WorkerCount = None,
    plan: OnlyPlan = False,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    device_map: arg.DeviceMap = None,
    json: arg.Json = False,
) -> None:
    """Run prompts through a model and keep their hidden states in a bundle."""
    told = arg.StatesChoice(
        key,
        mask_key,
        observe,
        rotary=rotary,
        positions=None if positions == "all" else positions,
        scale_key=scale_key,
    )
    check_cluster(cluster, workers, plan=plan)
    if from_tensor is not None:
        if cluster or plan:
            raise OptionError("--from-tensor runs no model.", "Leave out --cluster and --plan.")
        _from_tensor(from_tensor, layer, told, model, out, json)
        return
    told.refuse("key", "mask_key", "scale_key", hint="Give --from-tensor.")
    observation = Observation(observe or "residual", rotary or "after")
    if layer is not None:
        raise OptionError("--layer goes with --from-tensor.", "Use --layers to choose layers.")
    if positions not in ("all", "last"):
        raise OptionError(f"positions {positions!r} is not known.", "Use all or last.")
    if batch_tokens is not None and batch_tokens < 1:
        raise OptionError(f"batch_tokens is {batch_tokens}.", "Give at least 1.")
    import preimage

    choice = arg.PromptChoice(text, prompts, count, length, seed, bos)
    loaded, (given,) = arg.prepare(
        model, choice, layers=layers, observe=observation, dtype=dtype, device=device, device_map=device_map
    )
    if plan:
        from preimage.planning import plan_capture

        show_plan(
            plan_capture(
                loaded, given.lengths, observation.layers(layers, loaded.n_layers), positions=positions,
                batch_tokens=batch_tokens, load_seconds=load_seconds(), workers=planned_workers(workers),
            ),
            json,
        )  # fmt: skip
        return
    with working_on(cluster, workers, device), progress_bar() as progress:
        states = preimage.capture(
            loaded, given, layers, observe=observation, positions=positions, out=out, progress=progress,
            batch_tokens=batch_tokens, withhold_ids=withhold_ids,
        )  # fmt: skip
    _report(states, out, json)


def _from_tensor(
    path: Path, layer: str | None, told: arg.StatesChoice, model: str, out: Path, json: bool
) -> None:
    """A bundle of states from elsewhere. Which model made them is not claimed; their sizes are checked."""
    from preimage.preparation import Preparation

    told.check(path, layer)
    states, _ = told.read(path, layer, Preparation(model))
    states.save(out)
    _report(states, out, json)


def _report(states: States, out: Path, json: bool) -> None:
    document = {
        "bundle": str(out), "model": states.model,
        "prompts": len(states), "layers": list(states.layers), "positions": states.positions,
        "observation": states.observation.where,
        "noise_floor": {str(k): v for k, v in states.noise_floor.items()},
    }  # fmt: skip
    if json:
        print_result("capture", document)
        return
    print_lines(f"{states!r}", f"Written to {out}. What can be read from it:")
    print_whole(f"  preimage invert {shlex.quote(str(out))} --layer {states.layers[-1]}")
