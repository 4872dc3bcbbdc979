"""A result with what is known of its making, as a page shows it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from preimage.figures.style import brief_commit, made_by
from preimage.report.parts import Bullets, Details, Facts, Notice, Part, Preformatted, Tone

Record = Mapping[str, Any]
_TOLD = 4  # models, dtypes and commits in one title
_MODELS = 20  # whose facts are listed


@dataclass(frozen=True)
class Opened:
    """One result on a page.

    ``name``: what it is called there. ``kind``: as it was saved (``KINDS`` of the registry). ``models``: the
    identity of every model in it. ``records``: who began or continued it. ``unfinished``: what it lacks, in
    words, of work that is not done.
    """

    name: str
    kind: str
    result: Any
    models: tuple[Mapping[str, Any], ...] = ()
    records: tuple[Record, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    unfinished: str = ""

    @property
    def commit(self) -> str | None:
        """The commit of the sources that it was made with, the last where there are several."""
        return next((str(one["commit"]) for one in reversed(self.records) if one.get("commit")), None)

    @property
    def about(self) -> str:
        """Model, dtype and commit, as every title has them."""
        told = dict.fromkeys(made_by(model, None).rpartition(", ")[0] for model in self.models)
        return ", ".join([*(told or [made_by(None, None).rpartition(", ")[0]]), brief_commit(self.commit)])

    @property
    def date(self) -> str:
        """When it was last worked on; empty where that is not known."""
        return str(self.records[-1].get("date") or "")[:10] if self.records else ""


def made_together(runs: Sequence[Opened]) -> str:
    """Model, dtype and commit of several results, for what is drawn of them together."""
    told = list(dict.fromkeys(run.about for run in runs))
    return "; ".join(told[:_TOLD]) + (f" and {len(told) - _TOLD} more" if len(told) > _TOLD else "")


@dataclass(frozen=True)
class Summary:
    """A result in plain words: one sentence, and what it rests on."""

    headline: str
    findings: Sequence[str]
    tone: Tone = "plain"

    @property
    def parts(self) -> list[Part]:
        """As a page has it."""
        return [Notice(self.headline, "", self.tone), *([Bullets(self.findings)] if self.findings else [])]


def provenance(opened: Opened, command: str = "") -> list[Part]:
    """Where a result comes from: model, versions, hardware, date, command (given, or as it was kept)."""
    facts: list[tuple[str, str]] = []
    for model in opened.models[:_MODELS]:
        facts += _of_model(model)
    records = opened.records
    if records:
        first, last = records[0], records[-1]
        dates = dict.fromkeys(str(one.get("date")) for one in (first, last))
        facts.append(("date", " to ".join(dates) + _times(len(records))))
        commits = dict.fromkeys(str(one.get("commit") or "not known") for one in records)
        facts.append(("commit", ", ".join(commits)))
        facts += [
            (name, flat(last[name])) for name in ("machine", "processor", "gpu", "threads") if last.get(name)
        ]
        if not last.get("gpu"):
            facts.append(("gpu", "none"))
        facts.append(("versions", flat(last.get("versions") or "not known")))
    else:
        facts.append(("date, hardware and command", "not kept with this file; a run folder has them"))
    parts: list[Part] = [Facts(facts)]
    commands = dict.fromkeys([command] if command else map(_command, records))
    parts += [Preformatted(one, "The command") for one in commands if one]
    if opened.options:
        parts.append(
            Details("Options", [Facts([(name, flat(value)) for name, value in opened.options.items()])])
        )
    return parts


def flat(value: Any) -> str:
    """A value of json in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {flat(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(flat, value)) or "none"
    return "none" if value is None else str(value)


def _of_model(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    named = [model.get("name"), model.get("architecture"), model.get("dtype")]
    facts = [("model", ", ".join(str(one) for one in named if one))]
    sizes = {"n_layers": "layers", "d_model": "wide", "vocab_size": "tokens", "parameters": "parameters"}
    told = [f"{model[key]:,} {word}" for key, word in sizes.items() if isinstance(model.get(key), int)]
    if told:
        facts.append(("sizes", ", ".join(told)))
    if model.get("revision"):
        facts.append(("revision", str(model["revision"])))
    if model.get("weight_hash"):
        facts.append(("weights", f"sha256 {model['weight_hash']}"))
    return facts


def _times(count: int) -> str:
    return f", begun and continued {count - 1} times" if count > 1 else ""


def _command(record: Record) -> str:
    """The command as somebody would type it; empty where it was not kept."""
    given = record.get("command")
    if not isinstance(given, list) or not given:
        return ""
    first = PurePath(str(given[0])).name
    return shlex.join(["preimage" if first in ("preimage", "__main__.py") else first, *map(str, given[1:])])
