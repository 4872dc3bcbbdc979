"""``preimage theory``: what the theory states, checked on a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preimage.cli import DONE, FINDINGS
from preimage.cli import arguments as arg
from preimage.cli.ending import print_written
from preimage.cli.terminal import print_lines, print_result, print_table, progress_bar
from preimage.errors import OptionError, PromptError, RunFolderError
from preimage.storage import SCHEMA
from preimage.theory.registry import CHECKS, SMALL_PROMPTS

if TYPE_CHECKING:
    from preimage.models import LanguageModel
    from preimage.theory.result import TheoryReport, Verdict

Out = Annotated[Path | None, typer.Option(help="Folder to write report.json into.")]
LearningRate = Annotated[float, typer.Option(help="Of the optimiser.")]
_FEW, _SHORT = 8, 16  # prompts of a source without an end, and their tokens
_REPORT = "report.json"
_WORDS = {True: "yes", False: "NO", None: "undecided"}


app = typer.Typer(help="Check on a model what the theory states.", no_args_is_help=True)


@app.command("analyticity", help=CHECKS["analyticity"].asks)
def analyticity(
    model: Annotated[str, typer.Argument(help="Alias, hub id, folder or GGUF file.")] = "smollm2",
    out: Out = None,
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> int:
    """Run ``check_analyticity``."""
    _check_folder(out)
    loaded, _ = arg.prepare(model, device=device)
    from preimage.theory import check_analyticity

    return _finish("analyticity", loaded, check_analyticity(loaded), out, json)


@app.command("dichotomy", help=f"{CHECKS['dichotomy'].asks} Without prompts: all short ones.")
def dichotomy(
    model: arg.Model = "smollm2",
    text: arg.Texts = None,
    prompts: arg.Source = None,
    count: arg.Count = None,
    length: arg.Length = None,
    bos: arg.Bos = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens of the short prompts searched; 3.")] = None,
    longest: Annotated[int | None, typer.Option(help="Tokens of the longest of them; 4.")] = None,
    bos_id: Annotated[int | None, typer.Option(help="A token id to put in front of each of them.")] = None,
    layers: arg.Layers = "all",
    draws: Annotated[int, typer.Option(help="Random parameters that a pair is tried on.")] = 3,
    seed: arg.Seed = 0,
    out: Out = None,
    json: arg.Json = False,
) -> int:
    """Run ``check_dichotomy``, without prompts ``search_structure``."""
    _check_folder(out)
    given = {"vocabulary": vocabulary, "longest": longest, "bos": bos_id}
    search: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    listed = bool(text or prompts)
    if listed and search:
        raise OptionError(
            "--vocabulary, --longest and --bos-id belong to the search over all short prompts.",
            "Leave them out, or --text and --prompts.",
        )
    if not listed and not count is length is bos is None:
        raise OptionError("--count, --length and --bos belong to given prompts.", "Give --text or --prompts.")
    choices = [_few(arg.PromptChoice(text, prompts, count, length, seed, bos))] if listed else []
    loaded, sets = arg.prepare(model, *choices, layers=layers, device="cpu", at_least=2)
    from preimage.theory import check_dichotomy, search_structure

    with progress_bar() as progress:
        if listed:
            report = check_dichotomy(loaded, list(sets[0]), layers, draws=draws, seed=seed, progress=progress)
        else:
            report = search_structure(
                loaded, layers=layers, draws=draws, seed=seed, progress=progress, **search
            )
    return _finish("dichotomy", loaded, report, out, json)


@app.command("symmetry", help=CHECKS["symmetry"].asks)
def symmetry(
    model: arg.Model = "smollm2",
    text: arg.Texts = None,
    prompts: arg.Source = None,
    count: arg.Count = None,
    length: arg.Length = None,
    bos: arg.Bos = None,
    seed: arg.Seed = 0,
    out: Out = None,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> int:
    """Run ``check_symmetry``."""
    _check_folder(out)
    choice = _few(arg.PromptChoice(text, prompts, count, length, seed, bos))
    loaded, (ids,) = arg.prepare(model, choice, dtype=dtype, device=device, at_least=2)
    from preimage.theory import check_symmetry

    with progress_bar() as progress:
        report = check_symmetry(loaded, list(ids), seed=seed, progress=progress)
    return _finish("symmetry", loaded, report, out, json)


@app.command("optimizer", help=CHECKS["optimiser"].asks, hidden=True)  # as torch spells it
@app.command("optimiser", help=CHECKS["optimiser"].asks)
def optimiser(
    model: Annotated[
        str | None, typer.Option(help="Alias, hub id, folder or GGUF file; default: a small random Llama.")
    ] = None,
    text: arg.Texts = None,
    prompts: arg.Source = None,
    count: arg.Count = None,
    length: arg.Length = None,
    bos: arg.Bos = None,
    kind: Annotated[
        str, typer.Option("--optimiser", "--optimizer", help="gradient-descent, heavy-ball or adamw.")
    ] = "gradient-descent",
    method: Annotated[
        str, typer.Option(help="exact: dense Jacobians, up to 2,000 parameters; lanczos: larger models.")
    ] = "exact",
    steps: Annotated[int, typer.Option(help="Steps to follow.")] = 3,
    learning_rate: LearningRate = 1e-3,
    momentum: Annotated[float, typer.Option(help="Of heavy ball.")] = 0.9,
    betas: Annotated[tuple[float, float], typer.Option(help="Of AdamW.")] = (0.9, 0.999),
    eps: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-8,
    weight_decay: Annotated[float, typer.Option(help="Decoupled in AdamW, in the gradient elsewhere.")] = 0.0,
    seed: arg.Seed = 0,
    out: Out = None,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> int:
    """Run ``check_optimiser``."""
    from preimage.theory import OptimiserOptions

    _check_folder(out)
    options = OptimiserOptions(kind, steps, learning_rate, momentum, betas, eps, weight_decay, method)
    given = bool(text or prompts) or not count is length is bos is None
    if model is None and given:
        raise OptionError("The small model has prompts of its own.", "Give --model too, or no prompts.")
    ids: Sequence[tuple[int, ...]]
    if model is None:
        from preimage.theory.verification import small_model

        loaded, ids = small_model("llama", seed), SMALL_PROMPTS
    else:
        choice = _few(arg.PromptChoice(text, prompts, count, length, seed, bos))
        loaded, (chosen,) = arg.prepare(model, choice, dtype=dtype, device=device)
        ids = list(chosen)
    from preimage.theory import check_optimiser

    with progress_bar() as progress:
        report = check_optimiser(loaded, ids, options=options, progress=progress)
    return _finish("optimiser", loaded, report, out, json)


@app.command("discriminant", help=f"{CHECKS['discriminant'].asks} Give --text A --text B.")
def discriminant(
    model: arg.Model = "smollm2",
    text: arg.Texts = None,
    prompts: arg.Source = None,
    bos: arg.Bos = None,
    layer: Annotated[str, typer.Option(help="The layer at which the two prompts are to collide.")] = "final",
    learning_rate: LearningRate = 1e-3,
    only: Annotated[
        str | None, typer.Option(help="A regular expression for the names of the parameters that may move.")
    ] = None,
    out: Out = None,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> int:
    """Run ``distance_to_collision``."""
    _check_folder(out)
    if text:
        _pair(text)
    choice = arg.PromptChoice(text, prompts, bos=bos)
    loaded, (ids,) = arg.prepare(model, choice, layer=layer, dtype=dtype, device=device)
    first, second = _pair(list(ids))
    from preimage.theory import distance_to_collision

    with progress_bar() as progress:
        report = distance_to_collision(
            loaded, first, second, layer, learning_rate=learning_rate, only=only, progress=progress
        )
    return _finish("discriminant", loaded, report, out, json)


@app.command("verify")
def verify(seed: arg.Seed = 0, out: Out = None, json: arg.Json = False) -> int:
    """Every check on a small Llama and a small GPT-2, in seconds."""
    from preimage.storage import write_json
    from preimage.theory import verify

    _check_folder(out)
    with progress_bar() as progress:
        reports = verify(seed=seed, progress=progress)
    holds = all(report.holds for report in reports)
    document = {"seed": seed, "holds": holds, "reports": [report.to_dict() for report in reports]}
    if out is not None:
        write_json(out / _REPORT, {"schema": SCHEMA, "command": "theory verify", **document})
    if json:
        print_result("theory verify", document)
    else:
        _show_verdicts("A small Llama and a small GPT-2", reports)
        print_written(out, _REPORT)
    return DONE if holds else FINDINGS  # here what is undecided is a failure too


def _check_folder(out: Path | None) -> None:
    """Refuse before the work what could not be written after it."""
    if out is not None and out.exists() and not out.is_dir():
        raise RunFolderError(f"{out} is not a folder.", "Give another place.")


def _few(choice: arg.PromptChoice) -> arg.PromptChoice:
    """The prompts that were given; a few short ones of the default corpus unless told."""
    if choice.texts and not choice.count is choice.length is None:
        raise OptionError("--count and --length cut --prompts.", "Leave them out with --text.")
    return choice.unless_told(_FEW, _SHORT)


def _pair(prompts: Sequence[Any]) -> Sequence[Any]:
    if len(prompts) != 2:
        raise PromptError(
            f"The prompts are {len(prompts)}, not two.", "Give --text twice, or --prompts with two."
        )
    return prompts


def _finish(command: str, model: LanguageModel, report: TheoryReport, out: Path | None, json: bool) -> int:
    if out is not None:
        report.save(out / _REPORT)
    if json:
        identity = model.identity.to_dict()
        print_result(f"theory {command}", {"model": identity, **report.to_dict()})
    else:
        for name in CHECKS[report.check].tables:  # the others are in the json
            _show_rows(name, report.tables.get(name, []))
        _show_verdicts(model.name, [report])
        print_written(out, _REPORT)
    return FINDINGS if report.refuted else DONE


def _show_rows(title: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        columns = [name.replace("_", " ") for name in rows[0]]
        print_table(title.capitalize(), columns, [[_cell(value) for value in row.values()] for row in rows])
        print_lines("")


def _show_verdicts(title: str, reports: Sequence[TheoryReport]) -> None:
    """One line a statement, those of several reports together, and below what they do not show."""
    together: dict[tuple[str, str, str], list[Verdict]] = {}
    for report in reports:
        for verdict in report.verdicts:
            together.setdefault((report.check, verdict.id, verdict.statement), []).append(verdict)
    order = dict.fromkeys(report.check for report in reports)
    together = {key: together[key] for check in order for key in together if key[0] == check}
    notes = dict.fromkeys(verdict.not_shown for verdicts in together.values() for verdict in verdicts)
    numbers = {note: str(number) for number, note in enumerate(notes, 1)}
    rows = [
        [
            check,
            _holds(verdicts),
            statement,
            str(len(verdicts)),
            _range([verdict.value for verdict in verdicts]),
            _range([verdict.bound for verdict in verdicts]),
            ", ".join(dict.fromkeys(numbers[verdict.not_shown] for verdict in verdicts)),
        ]
        for (check, _, statement), verdicts in together.items()
    ]
    columns = ["check", "holds", "statement", "runs", "value", "bound", "note"]
    print_table(title, columns, rows, prose=["statement"])
    print_lines("", "Not shown:", *(f"{number}. {note}" for note, number in numbers.items()))


def _holds(verdicts: Sequence[Verdict]) -> str:
    answers = {verdict.holds for verdict in verdicts}
    answer = False if False in answers else None if None in answers else True
    descriptive = answer is False and all(verdict.descriptive for verdict in verdicts)
    return "no, as it may be" if descriptive else _WORDS[answer]


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return " to ".join(dict.fromkeys(_number(end) for end in (min(known), max(known))))


def _number(value: float) -> str:
    """Counts as they are, measurements to two digits."""
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e6 else f"{value:.2g}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
