"""A bundle of states on a page: what was kept, its noise, its prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preimage.report.opened import Opened, Summary, flat
from preimage.report.page import Section
from preimage.report.parts import Column, Facts, Paragraph, Part, Preformatted, Table
from preimage.report.spelling import Speller

_PROMPTS = 200  # that are spelled


def summary(opened: Opened) -> Summary:
    """What was kept of how many prompts."""
    manifest: Mapping[str, Any] = opened.result
    count = sum(
        len(group.get("prompts", ())) for group in manifest.get("groups", ()) if isinstance(group, dict)
    )
    ids = manifest.get("token_ids")
    count = len(ids) if isinstance(ids, list) else count
    layers = ", ".join(map(str, manifest.get("layers", ())))
    findings = [
        "The token ids lie beside the states, in the clear." if ids is not None
        else "The token ids were withheld: what lies here is the states alone.",
        "Whoever has the model can try to invert them (preimage invert).",
    ]  # fmt: skip
    return Summary(f"States of {count:,} prompts at layers {layers}, {manifest.get('dtype')}.", findings)


def sections(opened: Opened) -> list[Section]:
    """How it was captured, its noise, its prompts."""
    manifest: Mapping[str, Any] = opened.result
    names = ("dtype", "d_model", "positions", "layer_convention", "observation", "bytes")
    facts = [
        (name.replace("_", " "), flat(manifest[name])) for name in names if manifest.get(name) is not None
    ]
    noise = manifest.get("noise_floor") or {}
    rows = [[str(layer), f"{value:.3g}"] for layer, value in noise.items() if isinstance(value, int | float)]
    found = [
        Section("What was kept", [Facts(facts)]),
        Section("Noise", [Table(
            ["layer", Column("noise floor", numeric=True)], rows,
            "How far a state lies off itself, computed in another shape, relative to its length",
        )]),
    ]  # fmt: skip
    ids = manifest.get("token_ids")
    if isinstance(ids, list) and ids:
        speller = Speller(opened.models[0] if opened.models else None)
        texts: list[Part] = [
            Preformatted("".join(speller.pieces(row)), f"Prompt {number}, {len(row)} tokens")
            for number, row in enumerate(ids[:_PROMPTS])
        ]
        if len(ids) > _PROMPTS:
            texts.append(Paragraph(f"{len(ids) - _PROMPTS:,} more are in the bundle alone."))
        found.append(Section("The prompts", texts))
    return found
