"""``preimage lens``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preimage.cli import DONE, FINDINGS
from preimage.cli import arguments as arg
from preimage.cli.elsewhere import ClusterAddress, WorkerCount, check_cluster, working_on
from preimage.cli.terminal import print_either, print_result, print_table, progress_bar
from preimage.errors import OptionError
from preimage.layers import Layer, parse_layer
from preimage.observations import Observation, Site, in_words

if TYPE_CHECKING:
    from preimage.inversion import LensCheck
    from preimage.inversion.proposers.lens_files import LensInfo
    from preimage.models import LanguageModel

app = typer.Typer(help="Train, list, describe and hand on lenses.", no_args_is_help=True)

_PLACE = "A folder, or owner/name on the Hugging Face hub; write a folder as ./name."


@app.command("train")
def train(
    layer: Annotated[str, typer.Option(help="The layer the lens is for.")],
    observe: arg.Observe = None,
    model: arg.Model = "smollm2",
    prompts: Annotated[
        str, typer.Option(help="self (what the model writes), default, random, or a source of your own text.")
    ] = "self",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1200,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens a step; default: 8,192 on a GPU, else 2,048.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Width of queries and keys.")] = 512,
    hidden: Annotated[int, typer.Option(help="Width of the hidden layer.")] = 2304,
    neighbours: Annotated[int, typer.Option(help="States seen before and after a position.")] = 1,
    key_hidden: Annotated[
        int, typer.Option(help="Keys of embeddings alone, through a hidden layer so wide; 0: of features.")
    ] = 0,
    prior: Annotated[
        bool | None,
        typer.Option(help="Weigh in what the model expects, or not; default: near the top of a model."),
    ] = None,
    sampled_tokens: Annotated[
        int | None, typer.Option(help="Tokens of self; default: 4,000,000 on a GPU, else 100,000.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: the user's cache.")] = None,
    cluster: ClusterAddress = None,
    workers: WorkerCount = None,
    seed: arg.Seed = 0,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    device_map: arg.DeviceMap = None,
    json: arg.Json = False,
) -> None:
    """Train a lens for a layer, or for what is seen inside a block; run again, it continues."""
    check_cluster(cluster, workers)
    from preimage.training import LensOptions

    options = LensOptions(
        steps=steps, batch_tokens=batch_tokens, rank=rank, hidden=hidden, neighbours=neighbours,
        key_hidden=key_hidden, prior=prior,
        sampled_tokens=sampled_tokens, seed=seed,
    )  # fmt: skip
    if sampled_tokens is not None and prompts != "self":
        raise OptionError("--sampled-tokens goes with --prompts self.", "Leave one of them out.")
    seen = Observation(observe or "residual")
    if observe == "final" and layer != "final":
        raise OptionError(f"--layer {layer} and --observe final were given.", "Give --layer final alone.")
    loaded, _ = arg.prepare(
        model, layer=layer, observe=seen, dtype=dtype, device=device, device_map=device_map
    )
    from preimage.inversion.proposers.lens_files import default_path
    from preimage.training import train_lens

    tap = seen.tap(layer, loaded.n_layers)
    path = out or default_path(loaded, tap)
    with working_on(cluster, workers, device), progress_bar() as progress:
        ranks = train_lens(loaded, tap, prompts, options, out=path, progress=progress).held_out
    at = tap.block if isinstance(tap, Site) else tap
    document = {"path": str(path), "layer": at, "place": seen.place, "held_out": ranks}
    print_either(json, "lens train", document, f"lens for {in_words(tap)} in {path}", *_held_out(ranks))


@app.command("list")
def list_(json: arg.Json = False) -> None:
    """The lenses that come with preimage and those in the user's cache."""
    from preimage.inversion.proposers.lens_files import known_lenses

    lenses = known_lenses()
    if json:
        print_result("lens list", {"lenses": [_about(lens) for lens in lenses]})
        return
    rows = [[i.model, str(i.layer), i.place, i.weight_hash[:12], str(i.path)] for i in lenses]
    print_table("Lenses", ["model", "layer", "place", "weights", "file"], rows, prose=["file"])


@app.command("info")
def info(path: Annotated[Path, typer.Argument(help="A lens file.")], json: arg.Json = False) -> None:
    """What a lens was trained on and how well it ranks held-out tokens."""
    from preimage.inversion.proposers.lens_files import read_info

    lens = read_info(path)
    shape = lens.shape.to_dict()
    about = _about(lens) | {"shape": shape, "training": lens.training, "held_out": lens.ranks}
    print_either(
        json, "lens info", about,
        f"file: {lens.path}",
        f"model: {lens.model}, weights {lens.weight_hash}",
        f"layer: {lens.layer}",
        f"place: {lens.place}",
        f"tokenizer: {lens.tokenizer_hash or 'unknown'}",
        f"shape: {_listed(shape)}",
        f"training: {_listed(lens.training)}",
        *_held_out(lens.ranks),
    )  # fmt: skip


@app.command("push")
def push(
    files: Annotated[list[Path], typer.Argument(help="Lens files.")],
    to: Annotated[str, typer.Option(help=_PLACE)],
    json: arg.Json = False,
) -> None:
    """Put lenses into a repository of lenses, and list them in its registry."""
    from preimage.inversion import push_lenses
    from preimage.inversion.proposers.lens_places import place_of

    place = place_of(to)
    pushed = push_lenses(files, to)
    document = {"to": to, "kind": place.kind, "lenses": [entry.to_dict() for entry in pushed]}
    lines = [f"{in_words(entry.facts.tap)} of {entry.facts.model}: {entry.file}" for entry in pushed]
    print_either(json, "lens push", document, f"pushed to {place}:", *lines)


@app.command("pull")
def pull(
    source: Annotated[str, typer.Option("--from", help=_PLACE)],
    model: Annotated[str | None, typer.Option(help="The model the lenses are for; default: smollm2.")] = None,
    layer: Annotated[str | None, typer.Option(help="Of this layer alone.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="For any weights, without looking at a model.")
    ] = False,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> None:
    """Take the lenses for a model from a repository of lenses, checked, into the user's cache."""
    if every and (model or layer):
        raise OptionError("--all goes without --model and --layer.", "Leave it out, or leave them out.")
    loaded, at = (None, None) if every else _chosen(model or "smollm2", layer, dtype, device)
    from preimage.inversion import pull_lenses
    from preimage.inversion.proposers.lens_places import place_of

    place = place_of(source)
    pulled = pull_lenses(source, loaded, at)
    document = {"from": source, "kind": place.kind, "lenses": [_about(lens) for lens in pulled]}
    lines = [f"{in_words(lens.tap)} of {lens.model}: {lens.path}" for lens in pulled]
    print_either(json, "lens pull", document, f"pulled from {place}:", *lines)


@app.command("verify")
def verify(
    path: Annotated[Path, typer.Argument(help="A lens file, or a folder with lenses.json.")],
    model: Annotated[str | None, typer.Option(help="Check also against this model.")] = None,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> int:
    """Check lens files against their registry, and against a model: weights, tokenizer, held-out ranks."""
    loaded = None if model is None else _chosen(model, None, dtype, device)[0]
    from preimage.inversion import verify_lenses
    from preimage.training.lenses import held_out

    checks = verify_lenses(path, loaded, held_out)
    holds = not any(check.problems for check in checks)
    document = {"path": str(path), "holds": holds, "lenses": [check.to_dict() for check in checks]}
    print_either(json, "lens verify", document, *(line for check in checks for line in _verdict(check)))
    return DONE if holds else FINDINGS


def _chosen(model: str, layer: str | None, dtype: str, device: str) -> tuple[LanguageModel, Layer | None]:
    loaded, _ = arg.prepare(model, layer=layer, dtype=dtype, device=device)
    return loaded, None if layer is None else parse_layer(layer, loaded.n_layers)


def _verdict(check: LensCheck) -> list[str]:
    stated, measured = check.stated or {}, check.measured or {}
    return [
        f"{check.file}: {'; '.join(check.problems) or 'holds'}",
        *(
            f"  held-out {kind}: {row['rank0']:.2%} named first"
            + (f", {stated[kind]['rank0']:.2%} stated" if kind in stated else "")
            for kind, row in measured.items()
        ),
    ]


def _about(lens: LensInfo) -> dict[str, Any]:
    hashes = {"weight_hash": lens.weight_hash, "tokenizer_hash": lens.tokenizer_hash}
    return {"path": str(lens.path), "layer": lens.layer, "place": lens.place, "model": lens.model, **hashes}


def _listed(values: dict[str, Any]) -> str:
    said = {name.replace("_", " "): value for name, value in values.items() if value is not None}
    return ", ".join(f"{name} {value}" for name, value in said.items())


def _held_out(ranks: dict[str, dict[str, float]]) -> list[str]:
    """Shares of held-out tokens by the rank the lens gives them, a line a kind of text."""
    return [
        f"held-out {kind}: {row['rank0']:.2%} named first, {row['within8']:.2%} within 8, "
        f"{row['within64']:.2%} within 64, worst rank {row['worst']:.0f}; "
        f"first position {row['first']:.2%} named first"
        for kind, row in ranks.items()
    ]
