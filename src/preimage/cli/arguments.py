"""Arguments that several commands share, and what they turn into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from preimage.errors import OptionError

if TYPE_CHECKING:
    from preimage.preparation import Preparation
    from preimage.prompts import PromptSet

_MANY = 2000
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Model = Annotated[str, typer.Option("--model", help="Alias, hub id, folder of safetensors, or GGUF file.")]
Dtype = Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")]
Texts = Annotated[list[str] | None, typer.Option("--text", help="A prompt; may be repeated.")]
Source = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        help="FILE.txt, .jsonl or .parquet, default, default:prose, default:code, random, "
        "same-next:arithmetic, same-next:translation, or datasets:NAME[:SPLIT[:COLUMN]].",
    ),
]
Count = Annotated[int | None, typer.Option(help="Use so many prompts of --prompts.")]
Length = Annotated[int | None, typer.Option(help="Cut --prompts into windows of so many tokens.")]
Seed = Annotated[int, typer.Option(help="Seed of every random choice; stored in the result.")]
Figures = Annotated[str, typer.Option(help="Form of the figures of --out: html, svg, pdf, or several.")]
Proposers = Annotated[
    str | None, typer.Option(help="Of lens, codebook, prior, gradient; default: the best there is.")
]
Bos = Annotated[
    bool | None, typer.Option("--bos/--no-bos", help="Begin with BOS or not; default: the tokenizer's way.")
]


def many_prompts(
    texts: list[str] | None, source: str | None, count: int | None
) -> tuple[str | None, int | None]:
    """Source and count where a command is about many prompts: 2,000 of the default corpus unless told."""
    if texts:
        return source, count
    source = source or "default"
    if count is None and source.split(":")[0] in ("default", "random"):
        count = _MANY
    return source, count


@dataclass(frozen=True)
class PromptChoice:
    """Which prompts a command was given."""

    texts: list[str] | None
    source: str | None
    count: int | None = None
    length: int | None = None
    seed: int = 0
    bos: bool | None = None

    def of(self, prepared: Preparation, *, at_least: int = 1) -> PromptSet:
        """The prompts, gathered for a model; refused where they are fewer than asked for."""
        from preimage.prompts import PromptOptions

        if bool(self.texts) == bool(self.source):
            given = "both" if self.texts else "neither"
            raise OptionError(f"--text and --prompts: {given} given.", "Give one of them.")
        options = PromptOptions(
            count=self.count, length=self.length, seed=self.seed, bos=self.bos,
            keep_duplicates=bool(self.texts),
        )  # fmt: skip
        return prepared.prompts(list(self.texts or ()) or str(self.source), options, at_least=at_least)
