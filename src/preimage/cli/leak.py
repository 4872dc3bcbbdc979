"""``preimage leak``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preimage.cli import DONE, FINDINGS
from preimage.cli import arguments as arg
from preimage.cli.elsewhere import ClusterAddress, WorkerCount, check_cluster, working_on
from preimage.cli.ending import print_written
from preimage.cli.terminal import print_lines, print_result, print_table, progress_bar
from preimage.errors import OptionError, PreimageError, StatesError
from preimage.leak.exposures import FAMILIES
from preimage.leak.options import DEFENCES, STANDARD
from preimage.observations import STORED
from preimage.storage import Place, is_remote, place_of, read_manifest, record

if TYPE_CHECKING:
    from preimage.leak.holdings import Told
    from preimage.leak.result import FilesAudit, LeakAudit, LeakCell
    from preimage.leak.verdict import Verdict
    from preimage.models import LanguageModel
    from preimage.report import Page

_COUNT, _LENGTH = 100, 16  # prompts of the default corpus, and tokens each
_SHOWN = 70  # characters of a prompt in a table
_ORDERS = (
    "NHD, HND … (vLLM), page_first, layer_first … (SGLang), T2D or 2TD (LMCache), pairs or halves (llama.cpp)"
)

_Given = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL | FILES…]", help="A model to audit, or files and folders somebody has."),
]
_Exposures = Annotated[
    str | None,
    typer.Option(
        help=f"What is seen of states, separated by commas: {', '.join(FAMILIES)}; noise:20, keys:int8."
    ),
]


def leak(
    given: _Given = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model; for files: the one that made them.")
    ] = None,
    text: arg.Texts = None,
    prompts: arg.Source = None,
    count: arg.Count = None,
    length: arg.Length = None,
    seed: arg.Seed = 0,
    bos: arg.Bos = None,
    layers: Annotated[
        str | None, typer.Option(help="1,8,final …; of files: those they hold, where they do not say it.")
    ] = None,
    exposures: _Exposures = None,
    defences: Annotated[
        bool, typer.Option("--defences", help="Also noise and cuts of growing strength.")
    ] = False,
    margins: Annotated[
        int, typer.Option(help="Positions a layer at which D is measured over the whole vocabulary; slow.")
    ] = 0,
    minutes: Annotated[
        float, typer.Option(help="For all cells; with too few, prompts are read in haste, and it is said.")
    ] = 25.0,
    searched: Annotated[int, typer.Option(help="Prompts that are searched for from one vector.")] = 10,
    timeout: Annotated[float, typer.Option(help="Of files: seconds a prompt may cost.")] = 60.0,
    stored: Annotated[
        str | None, typer.Option(help=f"Of files: the numbers' type, {', '.join(STORED)}.")
    ] = None,
    order: Annotated[
        str | None, typer.Option(help=f"Of raw pages: the order of their axes: {_ORDERS}.")
    ] = None,
    page: Annotated[int | None, typer.Option(help="Of raw pages: tokens a page.")] = None,
    rotary: arg.Rotary = None,
    scale: Annotated[
        float | None, typer.Option(help="Of raw pages: what fp8 codes are multiplied by.")
    ] = None,
    out: arg.Out = None,
    cluster: ClusterAddress = None,
    workers: WorkerCount = None,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    device_map: arg.DeviceMap = None,
    json: arg.Json = False,
) -> int:
    """What a model's states, or files somebody has, give away of prompts; what would stop it, at what price.

    With a model: prompts are run, their states exposed in many ways and read back. With files: what stands in
    them in the clear, and what can be inverted. --out makes one page, leak.html, and the same as leak.pdf.
    """
    check_cluster(cluster, workers)
    files, named = _sorted_out(given or [], model)
    if files:
        _refuse(
            {"--text": text, "--prompts": prompts, "--count": count, "--length": length,
             "--exposures": exposures, "--defences": defences, "--margins": margins},
            "They are for an audit of a model; give no files.",
        )  # fmt: skip
        told = _told(stored, order, page, rotary, scale, layers)
        with progress_bar() as progress:
            progress(0, 1, "loading")
            loaded = _model_of(files, named, dtype, device, device_map)
            from preimage.leak import read_files

            found = read_files(files, loaded, told=told, timeout=timeout, progress=progress)
        return _finish_files(found, out, json)
    _refuse(
        {"--stored": stored, "--order": order, "--page": page, "--rotary": rotary, "--scale": scale},
        "They say what files hold; give files.",
    )
    from preimage.leak import LeakOptions, measure_leak

    specs = list(STANDARD) if exposures is None else [one for one in exposures.split(",") if one.strip()]
    options = LeakOptions(
        exposures=tuple(dict.fromkeys([*specs, *(DEFENCES if defences else ())])), searched=searched,
        minutes=minutes, margins=margins, seed=seed,
    )  # fmt: skip
    choice = arg.PromptChoice(text, prompts, count, length, seed, bos).unless_told(_COUNT, _LENGTH)
    if choice.source == "default":  # what reads like prompts, and what no shipped lens was trained on
        choice = arg.PromptChoice(text, "default:prose:test", choice.count, choice.length, seed, bos)
    loaded, (chosen,) = arg.prepare(
        named or "smollm2", choice, layers=layers, dtype=dtype, device=device, device_map=device_map
    )
    with working_on(cluster, workers, device), progress_bar() as progress:
        audit = measure_leak(loaded, chosen, layers, options=options, out=out, progress=progress)
    return _finish(audit, out, json)


def _sorted_out(given: list[str], model: str | None) -> tuple[list[Path], str | None]:
    """Files that were given, or the model; what is on the disk and no model is files."""
    files = [Path(one) for one in given if _is_there(one) and not _is_model(Path(one))]
    models = [one for one in given if not (_is_there(one) and not _is_model(Path(one)))]
    if files and models:
        raise OptionError(
            f"{models[0][:80]!r} is no file or folder here.", "Check the path; name a model with --model."
        )
    if len(models) > 1 or (models and model is not None):
        raise OptionError("Several models were given.", "Give one, or files.")
    return files, models[0] if models else model


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return (path / "config.json").is_file() and any(
            one.name.startswith("model") and one.suffix in (".safetensors", ".json", ".bin")
            for one in path.iterdir()
        )
    return path.suffix == ".gguf"


def _refuse(options: dict[str, Any], hint: str) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise OptionError(f"{' and '.join(given)} cannot be used here.", hint)


def _told(
    stored: str | None,
    order: str | None,
    page: int | None,
    rotary: str | None,
    scale: float | None,
    layers: str | None,
) -> Told:
    from preimage.leak.holdings import Told

    if stored is not None and stored not in (*STORED, "fp8_e5m2"):
        raise OptionError(f"--stored is {stored[:40]!r}.", f"Use {', '.join(STORED)}.")
    if page is not None and not 0 < page <= 1 << 20:
        raise OptionError(f"--page is {page}.", "Give the tokens of a page.")
    if rotary not in (None, "after", "before"):
        raise OptionError(f"--rotary is {rotary!r}.", "Use after or before.")
    named = None if layers is None else tuple(map(_layer, layers.split(",")))
    return Told(stored=stored, order=order, page=page, rotary=rotary, scale=scale, layers=named)


def _layer(name: str) -> int | str:
    name = name.strip()
    if name != "final" and not name.isdecimal():
        raise OptionError(f"{name[:40]!r} is no layer.", "Give those that the files hold: 1,15,final.")
    return "final" if name == "final" else int(name)


def _model_of(
    files: list[Path], named: str | None, dtype: str, device: str, device_map: str | None
) -> LanguageModel | None:
    """The model that was named, or that made the bundle; without either what needs none is read."""
    if named is None:
        for path in files:
            if path.is_dir() and (path / "manifest.json").is_file():
                named = ((read_manifest(path) or {}).get("model") or {}).get("name")
    if named is None:
        return None
    import preimage

    return preimage.load(named, dtype=dtype, device=device, device_map=device_map)


def _finish(audit: LeakAudit, out: Path | None, json: bool) -> int:
    from preimage.leak.verdict import judge

    verdict = judge(audit)
    if out is not None:
        from preimage.report.leak import leak_page

        _write(leak_page(audit, record(command=False), _command()), out)
    if json:
        print_result("leak", {"verdict": verdict._asdict(), "results": audit.to_dict()})
        return DONE
    print_lines(verdict.headline, "")
    columns = ["tokens read (prompts whole)", *(str(layer) for layer in audit.layers)]
    rows = [
        [exposure, *(_cell(audit.at(exposure, layer)) for layer in audit.layers)]
        for exposure in audit.exposures
    ]
    print_table(f"{audit.prompts} prompts, {audit.model['name']}, {audit.model['dtype']}", columns, rows)
    _say(verdict)
    print_written(out, first="leak.html")
    return DONE


def _cell(cell: LeakCell | None) -> str:
    if cell is None:
        return ""
    if not cell.tried:
        return "not tried"
    some = len(cell.sample) if cell.untried or len(cell.sample) < cell.tried else 0
    return (
        f"{cell.tokens:.1%} ({cell.exact:.0%})"
        + (f" of {some}" if some else "")
        + (f"; {cell.hurried} in haste: {cell.in_haste:.0%}" if cell.hurried else "")
    )


def _finish_files(audit: FilesAudit, out: Path | None, json: bool) -> int:
    from preimage.leak.verdict import judge_files

    if not audit.kinds and audit.unread:
        path, why = audit.unread[0]
        raise StatesError(f"Nothing could be read, {path} among it: {why}", "Give other files.")
    verdict = judge_files(audit)
    if out is not None:
        from preimage.report.leak import files_page

        _write(files_page(audit, record(command=False), _command()), out)
        _keep(audit, place_of(out))
    if json:
        print_result("leak", {"verdict": verdict._asdict(), "results": audit.to_dict()})
    else:
        print_lines(verdict.headline, "")
        rows = [
            [one.name, one.how, one.status, (one.text or " ".join(map(str, one.token_ids)))[:_SHOWN]]
            for one in audit.prompts
        ]
        if rows:
            columns = ["where", "how", "status", "prompt"]
            print_table(f"{audit.total} prompts", columns, rows, prose=["where", "how", "prompt"])
        _say(verdict)
        print_written(out, first="leak.html")
    return DONE if audit.complete else FINDINGS


def _keep(audit: FilesAudit, place: Place) -> None:
    """The result as json and as a table."""
    from preimage.storage import write_table

    audit.save(place / "leak.json")
    write_table(place / "prompts.parquet", audit.rows)


def _say(verdict: Verdict) -> None:
    for title, lines in (
        ("What was found", verdict.findings), ("What to do", verdict.advice),
        ("Not tried", verdict.not_tried),
    ):  # fmt: skip
        if lines:
            print_lines("", f"{title}:", *(f"  - {line}" for line in lines))


def _write(page: Page, out: Path) -> None:
    """The page, and the same printed; without a browser the page alone."""
    from preimage.report import print_pdf, save_page

    place = place_of(out)
    written = save_page(place / "leak.html", page)
    if is_remote(place):
        return
    try:
        print_pdf(str(written), str(place / "leak.pdf"))
    except PreimageError as error:
        typer.echo(f"No pdf was made: {error}", err=True)


def _command() -> str:
    """The command as it was given; texts of prompts are on the page anyway."""
    return shlex.join(["preimage", *sys.argv[1:]])
