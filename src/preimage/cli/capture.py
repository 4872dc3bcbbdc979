"""``preimage capture``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preimage.cli import arguments as arg
from preimage.cli.terminal import print_either, progress_bar
from preimage.errors import OptionError, StatesError
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
    observe: arg.Observe = "residual",
    rotary: arg.Rotary = "after",
    positions: Annotated[str, typer.Option(help="all, or last.")] = "all",
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens in one pass.")] = None,
    withhold_ids: Annotated[bool, typer.Option(help="Leave the token ids out of the bundle.")] = False,
    from_tensor: Annotated[
        Path | None, typer.Option(help="Make the bundle from this .safetensors or .npy instead.")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="The layer of --from-tensor.")] = None,
    key: Annotated[str | None, typer.Option(help="The tensor's name in --from-tensor.")] = None,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> None:
    """Run prompts through a model and keep their hidden states in a bundle."""
    observation = Observation(observe, rotary)
    if from_tensor is not None:
        _from_tensor(from_tensor, layer, key, model, out, observation, json)
        return
    if layer is not None or key is not None:
        raise OptionError("--layer and --key go with --from-tensor.", "Use --layers to choose layers.")
    if positions not in ("all", "last"):
        raise OptionError(f"positions {positions!r} is not known.", "Use all or last.")
    if batch_tokens is not None and batch_tokens < 1:
        raise OptionError(f"batch_tokens is {batch_tokens}.", "Give at least 1.")
    import preimage

    choice = arg.PromptChoice(text, prompts, count, length, seed, bos)
    loaded, (given,) = arg.prepare(
        model, choice, layers=layers, observe=observation, dtype=dtype, device=device
    )
    with progress_bar() as progress:
        states = preimage.capture(
            loaded, given, layers, observe=observation, positions=positions, out=out, progress=progress,
            batch_tokens=batch_tokens, withhold_ids=withhold_ids,
        )  # fmt: skip
    _report(states, out, json)


def _from_tensor(
    path: Path,
    layer: str | None,
    key: str | None,
    model: str,
    out: Path,
    observation: Observation,
    json: bool,
) -> None:
    """A bundle of a tensor from elsewhere. Which model made it is not claimed; its layers are checked."""
    from preimage.layers import parse_layer
    from preimage.models import read_preview

    if layer is None:
        raise OptionError("--from-tensor needs --layer.", "Say at which layer the states were taken.")
    if not path.is_file():  # before torch is imported
        raise StatesError(f"There is no file {path}.", "Check the path.")
    known = read_preview(model)
    number = parse_layer(layer, known.n_layers if known else 10**6)
    from preimage.states import States, read_tensor

    observation.tap(number, known.n_layers if known else 10**6)  # which refuses keys of layer 0
    states = States.from_tensor(read_tensor(path, key), number, observe=observation)
    if known is not None and observation.place == "residual" and states.d_model != known.d_model:
        raise OptionError(
            f"{path.name} holds states {states.d_model} wide, those of {model} are {known.d_model}.",
            "Name the model that made them with --model.",
        )
    if known is not None:
        states.require_sizes(model, known.d_model, known.max_length)
    states.save(out)
    _report(states, out, json)


def _report(states: States, out: Path, json: bool) -> None:
    document = {
        "bundle": str(out), "model": states.model,
        "prompts": len(states), "layers": list(states.layers), "positions": states.positions,
        "observation": states.observation.where,
        "noise_floor": {str(k): v for k, v in states.noise_floor.items()},
    }  # fmt: skip
    following = f"Next: preimage invert {out} --layer {states.layers[-1]}"
    print_either(json, "capture", document, f"{states!r} in {out}", following)
