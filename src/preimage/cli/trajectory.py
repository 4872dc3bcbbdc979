"""``preimage trajectory``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preimage.cli import DONE, FINDINGS
from preimage.cli.arguments import Bits, Device, Figures, Json, Out, Seed, parse_bits
from preimage.cli.ending import print_written
from preimage.cli.terminal import print_lines, print_result, print_table, progress_bar
from preimage.errors import OptionError, PromptError

if TYPE_CHECKING:
    from preimage.progress import Progress
    from preimage.training.options import TrajectoryOptions
    from preimage.training.result import Trajectory


def trajectory(
    family: Annotated[str, typer.Option(help="gpt2 or llama.")] = "gpt2",
    size: Annotated[
        str, typer.Option(help="tiny, small, medium, large, xlarge; or d_model,n_layers,n_heads.")
    ] = "small",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 600,
    batch: Annotated[int, typer.Option(help="Windows a step.")] = 16,
    window: Annotated[int, typer.Option(help="Tokens a window.")] = 128,
    learning_rate: Annotated[float | None, typer.Option(help="The highest; default: by the width.")] = None,
    checkpoints: Annotated[int, typer.Option(help="How many times to measure, at log-spaced steps.")] = 12,
    probes: Annotated[int, typer.Option(help="Prompts to measure on.")] = 1000,
    length: Annotated[int, typer.Option(help="Tokens a probe.")] = 32,
    text: Annotated[Path | None, typer.Option(help="Train on this .txt, .jsonl or .parquet file.")] = None,
    text_from: Annotated[
        str | None, typer.Option(help="Train on text that this model writes: smollm2, a hub id, a folder.")
    ] = None,
    text_tokens: Annotated[
        int, typer.Option(help="How many tokens it writes; kept in OUT.text.")
    ] = 20_000_000,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the tokenizer, which is trained first.")] = 4096,
    bits: Bits = "none",
    tf32: Annotated[bool, typer.Option("--tf32", help="Allow TF32 products in training, on a GPU.")] = False,
    seed: Seed = 0,
    device: Device = "auto",
    out: Out = None,
    figures: Figures = "html",
    json: Json = False,
) -> int:
    """Train a small model from scratch and watch its margins and co-Lipschitz constants as it learns."""
    from preimage.training import TrajectoryOptions

    options = TrajectoryOptions(
        family=family, size=_size(size), steps=steps, batch=batch, window=window,
        learning_rate=learning_rate, checkpoints=checkpoints, probes=probes, length=length,
        vocabulary=vocabulary, bits=parse_bits(bits), tf32=tf32, seed=seed,
    )  # fmt: skip
    if text is not None and text_from is not None:
        raise OptionError("--text and --text-from were given.", "Train on one of them.")
    texts = None if text is None else _read(text)
    import preimage
    from preimage.figures import made_now, parse_formats, save_figures, trajectory_figure

    formats = parse_formats(figures)
    with progress_bar() as progress:
        if text_from is not None:
            texts = _written(text_from, text_tokens, options, out, device, progress)
        run = preimage.train_trajectory(options, texts=texts, out=out, device=device, progress=progress)
    if out is not None:
        about = made_now(run.model | {"dtype": "states in float64"})
        save_figures({"trajectory": trajectory_figure({run.model["name"]: run})}, out, formats, about)
    if json:
        print_result("trajectory", run.to_dict())
    else:
        _show(run)
        print_written(out)
    return FINDINGS if any(at.geometry.unexplained for at in run.checkpoints) else DONE


def _size(given: str) -> str | tuple[int, ...]:
    if "," not in given:
        return given
    try:
        d_model, n_layers, n_heads = map(int, given.split(","))
    except ValueError:
        raise OptionError(f"--size is {given!r}.", "Give a preset, or three numbers: 256,6,4.") from None
    return d_model, n_layers, n_heads


def _read(path: Path) -> list[str]:
    from preimage.prompts.files import read_file

    texts = []
    for name, prompt in read_file(path, whole=True):
        if not isinstance(prompt, str):
            raise PromptError(f"{name} holds token ids.", "Give text: its own tokenizer is trained on it.")
        texts.append(prompt)
    return texts


def _written(
    name: str, tokens: int, options: TrajectoryOptions, out: Path | None, device: str, progress: Progress
) -> list[str]:
    """What a model writes, in documents at least as long as the windows that are trained on."""
    import preimage
    from preimage.training import texts_written_by

    kept = None if out is None else out.with_name(f"{out.name}.text")
    length = 2 * max(options.window, options.length)
    writer = preimage.load(name, device=device)
    return texts_written_by(writer, tokens, length=length, seed=options.seed, out=kept, progress=progress)


def _show(run: Trajectory) -> None:
    columns = ["step", "loss", "held out", "margin", "at layer", "margin 1 % / norm", "last layer",
               "co-Lipschitz 1 % / norm", "last layer", "collisions"]  # fmt: skip
    rows = []
    for at in run.checkpoints:
        layer, margin = at.smallest("margin")
        numbers = (
            at.smallest("normalised_margin_quantile")[1], at.last.normalised_margin_quantile,
            at.smallest("normalised_colipschitz_quantile")[1], at.last.normalised_colipschitz_quantile,
        )  # fmt: skip
        loss = "-" if at.training_loss is None else f"{at.training_loss:.3f}"
        rows.append([str(at.step), loss, f"{at.held_out_loss:.3f}", f"{margin:.3g}", str(layer),
                     *(f"{number:.3g}" for number in numbers), str(at.collisions)])  # fmt: skip
    model, options = run.model, run.options
    title = (
        f"{model['name']}, {model['parameters']:,} parameters, {options['probes']} probes of "
        f"{options['length']} tokens; smallest over the layers above 0"
    )
    print_table(title, columns, rows)
    least = run.smallest
    lines = [f"Smallest margin of all: {least.margin:.4g} at step {least.step}, layer {least.layer}."]
    for name, title in (("margin", "margin"), ("colipschitz", "co-Lipschitz")):
        drift = run.drift(f"normalised_{name}_quantile")
        lines.append(
            f"Drift of the normalised {title} quantile: {_percent(drift.from_start)} from initialisation, "
            f"{_percent(drift.second_half)} since step {drift.half_step}."
        )
    print_lines(*lines)


def _percent(change: float | None) -> str:
    return "-" if change is None else f"{100 * change:+.1f} %"
