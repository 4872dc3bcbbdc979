"""``preimage collisions`` and ``preimage continuations``."""

from __future__ import annotations

from dataclasses import replace
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
from preimage.errors import OptionError

if TYPE_CHECKING:
    from preimage.collisions.result import CollisionAudit, ComparedPair, ContinuationScan, Spacing

Thresholds = Annotated[
    list[float] | None,
    typer.Option("--threshold", help="Count pairs nearer than this, beside 1e-6; may be repeated."),
]
Closest = Annotated[int, typer.Option(help="How many of the closest pairs to list.")]
_SHOWN = 60  # characters of a prompt in a table


def collisions(
    model: arg.Model = "smollm2",
    text: arg.Texts = None,
    prompts: arg.Source = None,
    count: arg.Count = None,
    length: arg.Length = None,
    lengths: Annotated[
        str | None, typer.Option(help="Search at several lengths, 8,16,32 …, over equally many prompts.")
    ] = None,
    seed: arg.Seed = 0,
    bos: arg.Bos = None,
    layers: arg.Layers = "all",
    threshold: Thresholds = None,
    closest: Closest = 10,
    hard_bases: Annotated[int, typer.Option(help="Prompts that hard pairs are made from.")] = 4,
    out: arg.Out = None,
    cluster: ClusterAddress = None,
    workers: WorkerCount = None,
    plan: OnlyPlan = False,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    device_map: arg.DeviceMap = None,
    json: arg.Json = False,
) -> int:
    """Compare the last states of many prompts, every pair, at every layer."""
    import preimage
    from preimage.collisions import CollisionOptions

    options = CollisionOptions(tuple(threshold or ()), closest, hard_bases, seed)
    check_cluster(cluster, workers, plan=plan)
    if text and (count or length):
        raise OptionError("--count and --length cut --prompts.", "Leave them out with --text.")
    choice = arg.PromptChoice(text, prompts, count, length, seed, bos).unless_told(arg.MANY)
    sizes = _lengths(lengths, choice)
    choices = [replace(choice, length=size) for size in sizes] or [choice]
    loaded, sets = arg.prepare(
        model, *choices, layers=layers, dtype=dtype, device=device, device_map=device_map
    )
    if plan:
        from preimage.layers import parse_layers
        from preimage.planning import plan_collisions

        lengths_of = [length for one in sets for length in one.lengths]
        wanted = parse_layers(layers, loaded.n_layers)
        show_plan(
            plan_collisions(
                loaded, lengths_of, wanted, hard_bases=hard_bases, load_seconds=load_seconds(),
                workers=planned_workers(workers),
            ),
            json,
        )  # fmt: skip
        return DONE
    with working_on(cluster, workers, device), progress_bar() as progress:
        if sizes:
            by_length = dict(zip(sizes, sets, strict=True))
            audits = preimage.sweep_lengths(
                loaded, by_length, layers, options=options, out=out, progress=progress
            )
        else:
            audit = preimage.find_collisions(
                loaded, sets[0], layers, options=options, out=out, progress=progress
            )
            audits = {0: audit}
    if out is not None:
        from preimage.figures import made_now, save_figures, spacing_figure

        for size, audit in audits.items():
            folder = out / f"length-{size}" if sizes else out
            save_figures({"spacing": spacing_figure(audit)}, folder, about=made_now(audit.model))
    if json:
        results: Any = {str(size): audit.to_dict() for size, audit in audits.items()}
        print_result("collisions", {"results": results if sizes else results["0"]})
    else:
        for audit in audits.values():
            _show_audit(audit)
        print_lines(_counted(sum(audit.unexplained for audit in audits.values())))
        print_written(out)
    return FINDINGS if any(audit.unexplained for audit in audits.values()) else DONE


def continuations(
    model: arg.Model = "smollm2",
    text: arg.Texts = None,
    audit: Annotated[
        Path | None, typer.Option(help="Run folder of preimage collisions: continue its closest prompts.")
    ] = None,
    prompts: arg.Source = None,
    count: arg.Count = None,
    length: arg.Length = None,
    seed: arg.Seed = 0,
    bos: arg.Bos = None,
    layer: Annotated[str, typer.Option(help="The layer to compare at.")] = "final",
    threshold: Thresholds = None,
    closest: Closest = 10,
    out: arg.Out = None,
    cluster: ClusterAddress = None,
    workers: WorkerCount = None,
    plan: OnlyPlan = False,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    device_map: arg.DeviceMap = None,
    json: arg.Json = False,
) -> int:
    """Try every vocabulary token after a prefix and compare every two of their states."""
    import preimage
    from preimage.collisions import CollisionOptions

    options = CollisionOptions(tuple(threshold or ()), closest, 0, seed)
    check_cluster(cluster, workers, plan=plan)
    if sum(map(bool, (text, audit, prompts))) != 1:
        raise OptionError("A scan needs prefixes.", "Give one of --text, --audit and --prompts.")
    if audit and (length is not None or bos is not None):
        raise OptionError("--length and --bos change prompts, an audit's are given.", "Leave them out.")
    if audit:
        from preimage.collisions import closest_prompts

        prefixes = closest_prompts(audit, None, 10 if count is None else count)
    choices = [] if audit else [arg.PromptChoice(text, prompts, count, length, seed, bos)]
    loaded, sets = arg.prepare(
        model, *choices, layer=layer, dtype=dtype, device=device, device_map=device_map
    )
    given = prefixes if audit else sets[0]
    if plan:
        from preimage.planning import plan_continuations

        lengths = [len(ids) for ids in given]
        count = planned_workers(workers)
        show_plan(plan_continuations(loaded, lengths, load_seconds=load_seconds(), workers=count), json)
        return DONE
    with working_on(cluster, workers, device), progress_bar() as progress:
        scan = preimage.scan_continuations(loaded, given, layer, options=options, out=out, progress=progress)
    if json:
        print_result("continuations", {"results": scan.to_dict()})
    else:
        _show_scan(scan)
        print_lines(_counted(scan.unexplained))
        print_written(out)
    return FINDINGS if scan.unexplained else DONE


def _counted(unexplained: int) -> str:
    return f"{unexplained or 'No'} unexplained collision{'' if unexplained == 1 else 's'}."


def _lengths(given: str | None, choice: arg.PromptChoice) -> list[int]:
    if given is None:
        return []
    if choice.source is None or choice.length is not None:
        raise OptionError("--lengths cuts --prompts.", "Leave out --text and --length.")
    return arg.whole_numbers("--lengths", given, "Give whole numbers, 8,16,32.")


def _numbers(spacing: Spacing) -> list[str]:
    quantiles = [f"{values[0]:.4g}" for values in spacing.quantiles.values()]
    margin = "-" if spacing.margin is None else f"{spacing.margin:.4g}"
    normalised = "-" if spacing.normalised_margin is None else f"{spacing.normalised_margin:.3g}"
    radius = f"{spacing.noise_radius:.2g}"
    below = [str(number) for number in spacing.below.values()]
    return [f"{spacing.closest_pair.distance:.4g}", margin, normalised, *quantiles, radius, *below,
            str(spacing.within_noise), str(spacing.unexplained)]  # fmt: skip


def _columns(spacing: Spacing) -> list[str]:
    return ["closest", "margin", "/ norm", "1 %", "median", "maximum", "noise radius",
            *(f"< {threshold}" for threshold in spacing.below), "within noise", "unexplained"]  # fmt: skip


def _show_audit(audit: CollisionAudit) -> None:
    first = audit.layers[0].spacing
    shortest, longest = audit.lengths
    long = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
    title = f"{audit.prompts} prompts of {long} tokens, {first.pairs} pairs a layer"
    rows = [[str(found.layer), *_numbers(found.spacing)] for found in audit.layers]
    print_table(title, ["layer", *_columns(first)], rows)
    print_lines("")
    for found in audit.layers:
        if found.spacing.explained:
            told = ", ".join(f"{number} {reason}" for reason, number in found.spacing.explained.items())
            print_lines(f"layer {found.layer}, within noise: {told}")
    deepest = audit.layers[-1]
    if deepest.hard:
        print_table(
            f"Hard pairs at layer {deepest.layer}",
            ["kind", "pairs", "closest", "noise radius", "within noise", "explained", "unexplained"],
            [
                [kind.kind, str(kind.pairs), f"{kind.closest_pair.distance:.4g}",
                 f"{kind.closest_pair.noise_radius:.2g}",
                 str(kind.within_noise), ", ".join(f"{n} {r}" for r, n in kind.explained.items()) or "-",
                 str(kind.unexplained)]
                for kind in deepest.hard
            ],
            prose=["explained"],
        )  # fmt: skip
    print_lines("")
    if deepest.spacing.closest:
        _show_pair(f"closest at layer {deepest.layer}", deepest.spacing.closest[0])
    for found in audit.layers:
        for pair in found.spacing.listed:
            if pair.explanation == "unexplained":
                _show_pair(f"UNEXPLAINED at layer {found.layer}", pair)


def _show_scan(scan: ContinuationScan) -> None:
    for number, prefix in enumerate(scan.prefixes):
        shown = (prefix.text or str(list(prefix.prefix)))[-_SHOWN:]
        print_lines(f"{number}: …{shown}")
    if scan.prefixes:
        first = scan.prefixes[0].spacing
        rows = [[str(n), *_numbers(prefix.spacing)] for n, prefix in enumerate(scan.prefixes)]
        title = f"Every next token at layer {scan.layer}, {first.pairs} pairs a prefix"
        print_table(title, ["prefix", *_columns(first)], rows)
    for number, prefix in enumerate(scan.prefixes):
        if prefix.spacing.closest:
            _show_pair(f"{number}, closest tokens", prefix.spacing.closest[0])
        for pair in prefix.spacing.listed:
            if pair.explanation == "unexplained":
                _show_pair(f"{number}, UNEXPLAINED", pair)


def _show_pair(what: str, pair: ComparedPair) -> None:
    texts = [
        repr(text[-_SHOWN:]) if text is not None else str(list(ids))
        for text, ids in ((pair.first_text, pair.first_ids), (pair.second_text, pair.second_ids))
    ]
    apart = f"{pair.distance:.4g} apart (noise {pair.noise_radius:.2g})"
    print_lines(f"{what}: {texts[0]} and {texts[1]}, {apart}")
