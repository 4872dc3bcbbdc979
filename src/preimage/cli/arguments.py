"""Arguments that several commands share, and what they turn into."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preimage.cli.terminal import naming
from preimage.errors import OptionError, StatesError
from preimage.layers import parse_layer
from preimage.observations import PLACES, POSITIONS, STORED, Observation
from preimage.storage import place_of

if TYPE_CHECKING:
    from preimage.models import LanguageModel
    from preimage.preparation import Preparation
    from preimage.prompts import PromptSet
    from preimage.states import States

MANY = 2000  # prompts of a source without an end, where a command is about many
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Model = Annotated[str, typer.Option("--model", help="Alias, hub id, folder of safetensors, or GGUF file.")]
Dtype = Annotated[str, typer.Option(help="float32, float64, bf16, fp16, or auto: the checkpoint's own.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")]
DeviceMap = Annotated[
    str | None, typer.Option(help="auto: spread the weights over GPUs, memory and disk (accelerate).")
]
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
Layers = Annotated[str, typer.Option(help="all, 15, 0-4, 1,8,final …")]
Bits = Annotated[str, typer.Option(help="Quantise the states to so many bits, 8,4 …; or none.")]
Out = Annotated[
    Path | None,
    typer.Option(
        parser=place_of, metavar="PLACE", help="Run folder, or s3://… (extra remote); rerunning continues it."
    ),
]
Figures = Annotated[str, typer.Option(help="Form of the figures of --out: html, svg, pdf, or several.")]
Proposers = Annotated[
    str | None, typer.Option(help="Of lens, codebook, peel, prior, gradient; default: the best there is.")
]
Bos = Annotated[
    bool | None, typer.Option("--bos/--no-bos", help="Begin with BOS or not; default: the tokenizer's way.")
]
Key = Annotated[str | None, typer.Option(help="The name of the states in a file that holds several tensors.")]
MaskKey = Annotated[
    str | None,
    typer.Option(help="The name of the attention mask beside them; default: attention_mask, mask."),
]
ScaleKey = Annotated[
    str | None, typer.Option(help="The name of the scales of 8-bit codes; default: their own with _scale.")
]
Observe = Annotated[str | None, typer.Option(help=f"What was seen: {', '.join(PLACES)}; default: residual.")]
Stored = Annotated[
    str | None, typer.Option(help=f"The type it was kept in: {', '.join(STORED)}; default: found out.")
]
Rotary = Annotated[str | None, typer.Option(help="Keys after or before rotary positions; default: after.")]
Permuted = Annotated[bool, typer.Option("--permuted", help="Coordinates come in an unknown order.")]
Rotated = Annotated[bool, typer.Option("--rotated", help="Coordinates were turned by an unknown rotation.")]
At = Annotated[
    str | None, typer.Option("--at", help="The positions whose states were kept, from 0: 0-15,20,24-31.")
]
SeenPositions = Annotated[
    str | None, typer.Option("--positions", help=f"{', '.join(POSITIONS)}; default: all.")
]


def parse_positions(given: str) -> tuple[int, ...]:
    """Positions as they are told: 0-15,20."""
    found: list[int] = []
    for part in given.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(max(first, last, key=len)) > 6:
            raise OptionError(f"--at {given!r} names no positions.", "Give numbers and ranges: 0-15,20.")
        some = range(int(first), int(last if dash else first) + 1)
        if not some:
            raise OptionError(
                f"--at {part.strip()!r} counts backwards.", "Give ranges from low to high: 0-15."
            )
        found += some
    return tuple(found)


@dataclass(frozen=True)
class StatesChoice:
    """What a command was told of states that came from elsewhere."""

    key: str | None = None
    mask_key: str | None = None
    observe: str | None = None
    stored: str | None = None
    positions: str | None = None
    rotary: str | None = None
    permuted: bool = False
    rotated: bool = False
    scale_key: str | None = None
    at: str | None = None

    def refuse(self, *names: str, hint: str) -> None:
        """Refuse these options where they were given."""
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]
        if given:
            raise OptionError(f"{' and '.join(given)} cannot be used here.", hint)

    @property
    def observation(self) -> Observation | None:
        """What was seen, where anything was said of it."""
        told = {"place": self.observe, "stored": self.stored, "positions": self.positions,
                "rotary": self.rotary, "permuted": self.permuted, "rotated": self.rotated,
                "at": None if self.at is None else parse_positions(self.at)}  # fmt: skip
        told = {name: value for name, value in told.items() if value}
        return Observation(**told) if told else None  # type: ignore[arg-type]  # each has its own type

    def check(self, path: Path, layer: str | None) -> None:
        """Refuse a file that is not there, and states of which nobody said the layer."""
        final = self.observation is not None and self.observation.place == "final"
        if not path.is_file():
            raise StatesError(f"There is no file {path}.", "Check the path.")
        if layer is None and not final:
            raise OptionError(f"{path.name} does not say its layer.", "Give --layer, or --observe final.")
        if layer not in (None, "final") and final:
            raise OptionError(f"--layer {layer} and --observe final were given.", "Give one of them.")

    def read(self, path: Path, layer: str | None, prepared: Preparation) -> tuple[States, str | None]:
        """The states in a file and the name they have there; loads the model where only it tells sizes."""
        at = parse_layer(layer or "final", prepared.known.n_layers)
        observation = self.observation
        if observation is not None:
            observation.tap(at, prepared.known.n_layers)
        from preimage.states import IN_A_CACHE, read_states_file, states_from

        held = read_states_file(path, self.key, self.mask_key, at, self.scale_key)
        in_a_cache = self.observe in IN_A_CACHE or isinstance(held.states, list)
        sizes = load_named(prepared) if in_a_cache else prepared.known
        states = states_from(held.states, sizes, at, observe=observation, attention_mask=held.mask)
        return states, held.key


@dataclass(frozen=True)
class PromptChoice:
    """Which prompts a command was given."""

    texts: list[str] | None
    source: str | None
    count: int | None = None
    length: int | None = None
    seed: int = 0
    bos: bool | None = None

    def unless_told(self, count: int, length: int | None = None) -> PromptChoice:
        """The default corpus where nothing is named; so many prompts, so long, of what has no end."""
        if self.texts or (self.source or "default").split(":")[0] not in ("default", "random"):
            return self
        count = count if self.count is None else self.count
        length = length if self.length is None else self.length
        return replace(self, source=self.source or "default", count=count, length=length)

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


def load_named(prepared: Preparation) -> LanguageModel:
    """The model, loaded while the terminal says so."""
    with naming(f"loading {prepared.name}"):
        return prepared.model


def prepare(
    model: str,
    *choices: PromptChoice,
    layers: str | None = None,
    layer: str | None = None,
    observe: Observation | None = None,
    dtype: str = "float32",
    device: str = "auto",
    device_map: str | None = None,
    at_least: int = 1,
) -> tuple[LanguageModel, list[PromptSet]]:
    """A model and the prompts of every choice; what is wrong is refused before the weights are read."""
    from preimage.preparation import Preparation

    prepared = Preparation(model, dtype=dtype, device=device, device_map=device_map)
    if layers is not None:
        (observe or Observation()).layers(layers, prepared.known.n_layers)
    if layer is not None:
        (observe or Observation()).tap(layer, prepared.known.n_layers)
    for choice in choices:
        choice.of(prepared, at_least=at_least)
    loaded = load_named(prepared)
    return loaded, [choice.of(prepared) for choice in choices]


def whole_numbers(option: str, given: str, hint: str) -> list[int]:
    """A list such as 8,16,32."""
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise OptionError(f"{option} is {given!r}.", hint) from None


def parse_bits(given: str) -> tuple[int | None, ...]:
    """Full precision, and the numbers of bits in a list such as 8,4; or none of them."""
    if given == "none":
        return (None,)
    return (None, *whole_numbers("--bits", given, "Give numbers such as 8,4, or none."))
