"""Every table and figure of both papers by a name, and what measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from preimage.errors import OptionError
from preimage.progress import Progress
from preimage.reproduce.options import PRESETS, Sizes

if TYPE_CHECKING:
    from preimage.models import LanguageModel
    from preimage.reproduce.result import Measured

SIPIT = "arXiv 2510.15511"
GEOMETRY = "arXiv 2511.14808"

Work: TypeAlias = "Callable[[LanguageModel, Sizes, Progress], Measured]"


@dataclass(frozen=True)
class Item:
    """A table or figure: where it stands, what it shows, the sizes of both presets, and its caveats.

    ``work``: module and function within this room. ``differs``: what of our set-up is not the paper's,
    whatever the model.
    """

    name: str
    paper: str
    title: str
    work: str
    small: Sizes
    full: Sizes
    differs: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

    def sizes(self, preset: str) -> Sizes:
        """The sizes of a preset."""
        if preset not in PRESETS:
            raise OptionError(f"Preset {preset!r} is not known.", f"Use {' or '.join(PRESETS)}.")
        return self.small if preset == "small" else self.full

    def measure(self) -> Work:
        """What measures it."""
        module, _, function = self.work.partition(":")
        work: Work = getattr(import_module(f"preimage.reproduce.{module}"), function)
        return work


_PROMPTS = (
    "Natural prompts are windows of English prose that comes with Python, which no shipped lens was trained "
    "on; the paper's are of Wikipedia, C4, The Pile and code."
)
_HARDWARE = "The paper ran on one A100 of 64 GB; times compare methods within one run, not machines."
_STRUCTURE = (
    "Pairs that are the same for all parameters (constant prompts without a beginning of sequence, twins of "
    "embeddings) are named and left out of the margin; the paper does not look for them."
)
_FLOOR = (
    "A distance is read against the measured noise floor; the published line of 1e-6 lies below the noise of "
    "most layers."
)
_DEDUPED = "Prompts are de-duplicated on token ids; the paper's shortest distances look like duplicates."
_EQUAL = "Nearest distances shrink with the number of prompts: compare at equal numbers only."
_COLLIDING = (_STRUCTURE, _FLOOR, _DEDUPED, _EQUAL)

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        Item(
            "inversion", SIPIT, "Inversion table: SIPIT, BRUTEFORCE, HARDPROMPTS, and ours",
            "inverting:methods",
            Sizes(count=10, length=20, layers="15", slow=1, slow_length=4, steps=100, seconds=120.0),
            Sizes(count=100, length=20, layers="15", slow=100, slow_length=20, seconds=7200.0),
            (_PROMPTS, _HARDWARE),
            (
                "A method's time is over prompts of which its run ended by itself; stopped ones are counted, "
                "never averaged.",
                "Nine prompts of ten are natural, one is of random tokens, as in the paper.",
            ),
        ),
        Item(
            "text", SIPIT, "Inversion of training text, unseen text and random tokens", "inverting:kinds",
            Sizes(count=8, length=50, layers="15"), Sizes(count=50, length=100, layers="15"),
            (_HARDWARE, "Training text cannot be had of most models: what the model writes stands for it."),
        ),
        Item(
            "depth", SIPIT, "Inversion time by layer", "inverting:depth",
            Sizes(count=4, length=20, layers="1,8,15,22,30,final"), Sizes(count=50, length=64),
            (_PROMPTS, _HARDWARE),
        ),
        Item(
            "vocabulary", SIPIT, "The share of the vocabulary that is tried", "inverting:vocabulary",
            Sizes(count=10, length=20, layers="15", slow=1, slow_length=3, seconds=240.0),
            Sizes(count=50, length=20, layers="15", slow=20, slow_length=20, seconds=7200.0),
            (_PROMPTS, _HARDWARE),
        ),
        Item(
            "quantised-inversion", SIPIT, "Inversion with quantised weights on both sides",
            "inverting:quantised", Sizes(count=5, length=10, layers="15"),
            Sizes(count=50, length=10, layers="15"),
            (_PROMPTS, _HARDWARE, "Weights are rounded and computed with in float32: fp4, nf4 and int8 as "
             "functions, without their kernels."),
        ),
        Item(
            "collisions", SIPIT, "Smallest distances among many prompts, by layer", "colliding:prompts",
            Sizes(count=1000, length=32, layers="all"), Sizes(count=100_000, length=32, layers="all"),
            (_PROMPTS,), _COLLIDING,
        ),
        Item(
            "continuations", SIPIT, "Every next token of the closest prefixes", "colliding:continuations",
            Sizes(count=200, length=16, layers="final", slow=1),
            Sizes(count=2000, length=32, layers="final", slow=10),
            (_PROMPTS,), _COLLIDING,
        ),
        Item(
            "length", SIPIT, "Distances by the length of the prompts, last layer", "colliding:lengths",
            Sizes(count=200, length=128, layers="final"), Sizes(count=2000, length=500, layers="final"),
            (_PROMPTS,), _COLLIDING,
        ),
        Item(
            "quantised-weights", SIPIT, "Smallest distances with quantised weights, last layer",
            "colliding:quantised", Sizes(count=500, length=32, layers="final"),
            Sizes(count=100_000, length=32, layers="final"),
            (_PROMPTS, "Weights are rounded and computed with in float32: fp4, nf4 and int8 as functions, "
             "without their kernels."), _COLLIDING,
        ),
        Item(
            "same-next", SIPIT, "Prompts that differ and call for the same next token", "colliding:same_next",
            Sizes(count=300, length=64, layers="1,15,30,final"), Sizes(count=530, length=64, layers="all"),
            ("Few-shot sums and translations are of our own making.",), _COLLIDING,
        ),
        Item(
            "margin", SIPIT, "Margin against anisotropy and intrinsic dimension, over layers",
            "measuring:margin", Sizes(count=500, length=32, layers="all"), Sizes(count=10_000, length=32),
            (_PROMPTS,), (_EQUAL,),
        ),
        Item(
            "geometry-layers", GEOMETRY, "Norm, margin and co-Lipschitz constant by layer",
            "measuring:layers", Sizes(count=500, length=32, layers="all"), Sizes(count=10_000, length=32),
            (_PROMPTS,), (_EQUAL, "The paper's numbers are in figures that are not known to us."),
        ),
        Item(
            "geometry-lengths", GEOMETRY, "Normalised margin and co-Lipschitz constant by length",
            "measuring:lengths", Sizes(count=300, length=64, layers="final"),
            Sizes(count=5000, length=512, layers="final"),
            (_PROMPTS,), (_EQUAL, "With raw Hamming distances the co-Lipschitz constant falls like 1 / "
             "length by itself; divided by the length it does not."),
        ),
        Item(
            "geometry-families", GEOMETRY, "Normalised curves by family", "measuring:families",
            Sizes(count=300, length=32, layers="all"), Sizes(count=5000, length=32, layers="all"),
            ("One trained model, beside untrained GPT-2 and Llama shapes of two sizes: other trained models "
             "need a hub.",), (_EQUAL,),
        ),
        Item(
            "geometry-quantised", GEOMETRY, "States stored in 8 and 4 bits", "measuring:quantised",
            Sizes(count=500, length=32, layers="all"), Sizes(count=10_000, length=32),
            (_PROMPTS, "The quantiser is one step a layer by its largest number; the paper leaves it open."),
            (_EQUAL,),
        ),
        Item(
            "near-collisions", GEOMETRY, "Near-collisions by layer and threshold, full precision and 4 bits",
            "measuring:near", Sizes(count=500, length=32, layers="all"), Sizes(count=10_000, length=32),
            (_PROMPTS,), (_EQUAL, "Thresholds are absolute, as in the paper, and relative to the mean norm."),
        ),
        Item(
            "training", GEOMETRY, "Normalised metrics of a small GPT-2 while it is trained",
            "measuring:training", Sizes(count=100, length=16, slow=120),
            Sizes(count=1000, length=32, slow=2000),
            ("Trained from scratch on text that comes with Python, for as many steps as ``slow`` says; the "
             "model that was asked for is not used.",),
        ),
        Item(
            "theory", GEOMETRY, "The theory's statements, on small models", "measuring:theory",
            Sizes(count=1, length=1), Sizes(count=1, length=1),
            ("Checked in float64 on small models; the model that was asked for is not used.",),
        ),
    )
}  # fmt: skip


def item_of(name: str) -> Item:
    """An item by its name."""
    if name not in ITEMS:
        raise OptionError(f"There is no item {name[:60]!r}.", f"Use one of {', '.join(ITEMS)}.")
    return ITEMS[name]
