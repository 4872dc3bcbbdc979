"""What an audit found: cells of a table, each a layer and what was seen there; and what files gave away."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from preimage.inversion.result import Status
from preimage.layers import Layer
from preimage.markup import Markup
from preimage.storage import Saved, dataframe
from preimage.views import Shown, details, named, percent, table

SURE = 0.99  # confidence from which a token is called sure
VERIFIED = ("recovered", "ambiguous")  # statuses of what reproduces the states


@dataclass(frozen=True)
class PromptRead:
    """What one prompt gave away: the status of its inversion, and its reading beside the truth.

    ``right``: tokens of the reading that are the prompt's, in place. ``sure``: tokens the reading is at least
    ``SURE`` of, ``sure_right`` those of them that are right. ``confidence``: the mean over positions.
    ``hurried``: its time was over before it was read to the end, and some of it is only what is proposed.
    ``glanced``: it was given less time than reading it to the end may take, or that was not enough.
    """

    status: Status
    tokens: int
    right: int
    exact: bool
    sure: int
    sure_right: int
    confidence: float
    seconds: float
    forward_tokens: int
    hurried: bool = False
    glanced: bool = False


@dataclass(frozen=True)
class Utility:
    """What a model that goes on with changed states has lost, over all positions of the prompts.

    ``kl``: mean divergence of its next-token distribution from the unchanged one, in nats.
    ``top1_changed``: share of positions whose likeliest next token is another. ``perplexity``: of the
    prompts' own next tokens, ``perplexity_before`` without the change.
    """

    kl: float
    top1_changed: float
    perplexity: float
    perplexity_before: float


@dataclass(frozen=True)
class LeakCell(Saved):
    """One exposure at one layer. ``untried``: prompts left out (``why``: time, or all alike refused).

    Shares are of the prompts that were read to the end (``sample``): what could be read of the others in
    haste says less than an attacker with more time could.
    """

    _kind = "leak cell"

    exposure: str
    about: str
    layer: Layer
    prompts: tuple[PromptRead, ...]
    untried: int
    why: str
    setup_seconds: float
    seconds: float
    utility: Utility | None

    @property
    def tried(self) -> int:
        """Prompts that were inverted."""
        return len(self.prompts)

    @property
    def hurried(self) -> int:
        """Prompts of which the time was over before they were read to the end."""
        return sum(one.hurried for one in self.prompts)

    @property
    def sample(self) -> tuple[PromptRead, ...]:
        """The prompts that shares are of: all, or where some were hurried those that were given their time.

        Of the others those that a glance was enough for are left out too: they are the easy ones.
        """
        given = tuple(one for one in self.prompts if not one.glanced) if self.hurried else ()
        return given or self.prompts

    @property
    def every(self) -> bool:
        """Whether every prompt was read whole, in haste or not."""
        return bool(self.prompts) and not self.untried and all(one.exact for one in self.prompts)

    @property
    def in_haste(self) -> float:
        """The share of tokens read of prompts that were hurried."""
        some = [one for one in self.prompts if one.hurried]
        return _share(sum(one.right for one in some), sum(one.tokens for one in some))

    @property
    def exact(self) -> float:
        """The share of prompts read whole, verified or not."""
        return _share(sum(one.exact for one in self.sample), len(self.sample))

    @property
    def verified(self) -> float:
        """The share of prompts read whole and verified against the states."""
        whole = sum(one.exact and one.status in VERIFIED for one in self.sample)
        return _share(whole, len(self.sample))

    @property
    def tokens(self) -> float:
        """The share of tokens read."""
        return _share(sum(one.right for one in self.sample), sum(one.tokens for one in self.sample))

    @property
    def wrong(self) -> int:
        """Prompts called recovered that are others: there should be none."""
        return sum(one.status == "recovered" and not one.exact for one in self.prompts)

    @property
    def sure_right(self) -> float:
        """Of the tokens a reading is sure of, the share that is right."""
        return _share(sum(one.sure_right for one in self.prompts), sum(one.sure for one in self.prompts))

    @property
    def seconds_a_prompt(self) -> float:
        """The mean over prompts, set-up left out."""
        return _share(sum(one.seconds for one in self.sample), len(self.sample))

    @property
    def passes(self) -> float:
        """Forward passes over a prompt that reading it took, on average."""
        return _share(sum(one.forward_tokens for one in self.sample), sum(one.tokens for one in self.sample))

    def row(self) -> dict[str, Any]:
        """One row of the table."""
        counts = {
            f"{status}": sum(one.status == status for one in self.prompts)
            for status in ("recovered", "ambiguous", "likely", "not_recovered")
        }
        utility = {} if self.utility is None else asdict(self.utility)
        return {
            "exposure": self.exposure, "layer": str(self.layer), "tried": self.tried, "untried": self.untried,
            "sampled": len(self.sample), "hurried": self.hurried, "in_haste": self.in_haste,
            "exact": self.exact, "verified": self.verified, "tokens": self.tokens, "wrong": self.wrong,
            **counts, "sure_right": self.sure_right,
            "confidence": _share(sum(one.confidence for one in self.prompts), self.tried),
            "seconds_a_prompt": self.seconds_a_prompt, "passes": self.passes,
            "setup_seconds": self.setup_seconds,
            **{field.name: utility.get(field.name) for field in fields(Utility)},
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class LeakAudit(Saved, Shown):
    """What a model's states give away of a set of prompts, for every exposure and layer.

    ``baseline``: the share of tokens that guessing gives, the model's own likeliest next token at every
    position behind the true ones, which needs no states at all. ``margins``: at some positions of each layer
    the distance D to the state of the nearest other token, relative to the state's length.
    """

    _kind = "leak audit"

    model: dict[str, Any]
    prompts: int
    lengths: tuple[int, int]
    source: str
    fingerprint: str
    options: dict[str, Any]
    cells: tuple[LeakCell, ...]
    baseline: float
    margins: dict[Layer, tuple[float, ...]]
    samples: tuple[str, ...]  # the first prompts, as text where there is a tokenizer

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers, in their order."""
        return tuple(dict.fromkeys(cell.layer for cell in self.cells))

    @property
    def exposures(self) -> tuple[str, ...]:
        """Exposures, in their order."""
        return tuple(dict.fromkeys(cell.exposure for cell in self.cells))

    def at(self, exposure: str, layer: Layer) -> LeakCell | None:
        """The cell of an exposure and a layer; None where there is none."""
        found = (cell for cell in self.cells if (cell.exposure, cell.layer) == (exposure, layer))
        return next(found, None)

    def curve(self, family: str, layer: Layer) -> tuple[LeakCell, ...]:
        """The cells of a family at a layer, by value."""
        found = [
            cell for cell in self.cells if cell.layer == layer and cell.exposure.startswith(f"{family}:")
        ]
        return tuple(sorted(found, key=lambda cell: float(cell.exposure.partition(":")[2])))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table, a row a cell."""
        return [cell.row() for cell in self.cells]

    def to_dict(self) -> dict[str, Any]:
        """Plain json types, the table beside the cells."""
        return super().to_dict() | {"table": self.rows}

    def to_dataframe(self) -> Any:
        """The rows as a DataFrame of pandas: one an exposure and layer."""
        return dataframe(self.rows)

    def _line(self) -> str:
        most = max((cell for cell in self.cells if cell.tried), key=lambda cell: cell.tokens, default=None)
        model = named(self.model)
        if most is None:
            return f"nothing was tried on {self.prompts:,} prompts of {model}"
        return (
            f"up to {percent(most.tokens)} of the tokens of {self.prompts:,} prompts read from {model}: "
            f"{most.exposure} at layer {most.layer}; guessing gives {percent(self.baseline)}"
        )

    def _parts(self) -> Iterable[Markup]:
        rows = []
        for exposure in self.exposures:
            cells = ((layer, self.at(exposure, layer)) for layer in self.layers)
            shares = {
                f"layer {layer}": None if cell is None or not cell.tried else percent(cell.tokens)
                for layer, cell in cells
            }
            rows.append({"exposure": exposure, **shares})
        yield table(rows, "Share of tokens read, by what was stored.")


@dataclass(frozen=True)
class FilePrompt:
    """A prompt that was found in files. ``how``: in the clear, inverted from where, or by names.

    ``status``: ``clear``, or that of an inversion. ``proof``: how it is known that these are its ids.
    """

    name: str
    kind: str
    how: str
    status: str
    token_ids: tuple[int, ...]
    text: str | None
    confidence: float
    proof: str
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether these are the ids beyond doubt."""
        return self.status in ("clear", "recovered")


@dataclass(frozen=True)
class FileKind:
    """Files of one kind: how many, with how many prompts or pages, ``clear`` of them with ids or text."""

    kind: str
    files: int
    pieces: int
    clear: int
    about: str
    notes: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class FilesAudit(Saved, Shown):
    """What files give away. ``total``: prompts found, of which ``prompts`` lists the first thousand.

    ``unread``: files and pieces that could not be read, each with the reason; ``others``: files of no kind
    that is known.
    """

    _kind = "files audit"

    model: dict[str, Any] | None
    paths: tuple[str, ...]
    kinds: tuple[FileKind, ...]
    prompts: tuple[FilePrompt, ...]
    total: int
    unread: tuple[tuple[str, str], ...]
    others: int
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether everything that was recognised was read, each prompt at least as likely."""
        return not self.unread and all(one.status != "not_recovered" for one in self.prompts)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row a prompt."""
        return [asdict(one) | {"token_ids": list(one.token_ids)} for one in self.prompts]

    def to_dataframe(self) -> Any:
        """The rows as a DataFrame of pandas: one a prompt."""
        return dataframe(self.rows)

    def _line(self) -> str:
        exact = sum(one.exact for one in self.prompts)
        unread = f", {len(self.unread)} files or parts not read" if self.unread else ""
        kinds = "1 kind" if len(self.kinds) == 1 else f"{len(self.kinds)} kinds"
        return f"{self.total:,} prompts found in {kinds} of files, {exact:,} of those listed exactly{unread}"

    def _parts(self) -> Iterable[Markup]:
        rows = [row | {"text": _opening(row)} for row in self.rows]
        yield table(rows, columns=("name", "how", "status", "confidence", "text"))
        if self.unread:
            unread = [{"name": name, "reason": reason} for name, reason in self.unread]
            yield details(f"{len(unread)} not read", table(unread))


def _opening(row: dict[str, Any]) -> str:
    return str(row["text"] or " ".join(map(str, row["token_ids"][:32])))


def _share(part: int | float, whole: int | float) -> float:
    return part / whole if whole else 0.0


def total(cells: Iterable[LeakCell]) -> int:
    """Prompts tried, over cells."""
    return sum(cell.tried for cell in cells)
