"""What jobs do: a prompt or a file inverted while somebody looks on, with noise, at every layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from preimage.distances import norms
from preimage.errors import PreimageError, PromptError, StatesError
from preimage.inversion import Inversion, invert
from preimage.inversion.engine.first_states import first_states
from preimage.layers import Layer, all_layers, parse_layer
from preimage.leak import Exposure
from preimage.leak.margins import margin_at
from preimage.models import LanguageModel
from preimage.preparation import Preparation
from preimage.progress import told_of_stages, watched_by
from preimage.states import States, capture, encode_all, noise_of
from preimage.web.asking import Ask
from preimage.web.options import Limits
from preimage.web.queue import Job, told
from preimage.web.telling import EnoughError, Onlooker, end_of, result_of, stages_to, token_text
from preimage.web.uploads import Uploads, states_in

log = logging.getLogger(__name__)

_A_LAYER = 30.0  # seconds one layer may take where all are asked for
_WARM = "The quick brown fox jumps over the lazy dog."


class Bench:
    """A model and what jobs do with it; ``state`` and ``problem`` say how far it is."""

    def __init__(self, prepared: Preparation, uploads: Uploads, limits: Limits) -> None:
        self._prepared, self._uploads, self._limits = prepared, uploads, limits
        self.state, self.problem = "loading", dict[str, str]()
        self.work: dict[str, Callable[[Job], None]] = {
            "prompt": self._prompt, "noise": self._noise, "margins": self._margins,
            "layers": self._layers, "file": self._file,
        }  # fmt: skip

    @property
    def model(self) -> LanguageModel:
        """The model, loaded."""
        if self.problem:
            raise PreimageError(self.problem["message"], self.problem["hint"])
        return self._prepared.model

    @property
    def about(self) -> dict[str, Any]:
        """What the page shows of it."""
        known: dict[str, Any] = {"state": self.state, "name": self._prepared.name, "problem": self.problem}
        if self.state == "loading" or self.problem:
            return known
        model = self._prepared.model
        layers = [str(layer) for layer in all_layers(model.n_layers)]
        dtype = str(model.dtype).removeprefix("torch.")
        return known | {
            "layers": layers, "middle": str((model.n_layers + 1) // 2), "dtype": dtype,
            "device": str(model.device), "vocabulary": model.vocab_size, "width": model.d_model,
            "shipped": self._shipped(),
        }  # fmt: skip

    def _shipped(self) -> bool:
        return self._prepared.name == "smollm2"

    def load(self) -> None:
        """Load the model and make it ready: noise at every layer, and what proposes at the middle one."""
        try:
            model = self._prepared.model
            self.state = "warming"
            noise_of(model, "all")
            middle = (model.n_layers + 1) // 2
            ids = encode_all(model, [_WARM if model.tokenizer is not None else [0, 1, 2]])
            invert(model, capture(model, ids, [middle]), middle, timeout=_A_LAYER)
            self.state = "ready"
        except PreimageError as error:
            self.problem, self.state = told(error), "failed"
        except Exception:
            log.exception("the model could not be loaded")
            self.problem = {"message": "The model could not be loaded.", "hint": "The terminal says why."}
            self.state = "failed"

    def _prompt(self, job: Job) -> None:
        """States of a prompt, and nothing else of it, inverted; SIPIT beside it where that was asked."""
        ask: Ask = job.asked
        model, ids, layer = self._typed(job, ask)
        states = self._states(job, ids, layer)
        job.tell("prompt", index=0, of=1, length=len(ids), truth=[token_text(model, one) for one in ids])
        self._inverted(job, states, layer, ids)
        if ask.sipit != "none":
            self._sipit(job, ask, states, layer, ids)

    def _noise(self, job: Job) -> None:
        """How far other tokens are, then the same states moved by noise and read."""
        ask: Ask = job.asked
        model, ids, layer = self._typed(job, ask)
        states = self._states(job, ids, layer)
        job.tell("prompt", index=0, of=1, length=len(ids), truth=[token_text(model, one) for one in ids])
        with watched_by(end_of(job)), told_of_stages(stages_to(job)):
            (found,) = invert(model, States.from_tensor(states, layer), layer)
        lengths = _lengths(states)
        tested = {one.index: one.runner_up_distance for one in found.positions if one.runner_up_distance}
        nearest = [tested[at] / lengths[at] if at in tested else None for at in range(len(ids))]
        job.tell(
            "bounds", nearest=[one if one is not None and one < float("inf") else None for one in nearest]
        )
        if ask.percent > 0:
            self._remember(job, layer)
            (noisy,), _ = Exposure.parse(f"noise:{ask.percent:g}").of([states], 0)
            self._inverted(job, noisy.to(states.dtype), layer, ids)
        else:
            job.tell("result", by="fast", **result_of(model, found, lengths, ids))

    def _remember(self, job: Job, layer: Layer) -> None:
        """Every token's state at the first position, once for a layer: with them noise is read far sooner."""
        job.tell("stage", text="every token at the first position, once for this layer", done=0, total=1)
        with watched_by(end_of(job)):
            first_states(self.model, layer, patiently=True)

    def _margins(self, job: Job) -> None:
        """D over the whole vocabulary, position after position."""
        model, ids, layer = self._typed(job, job.asked)
        states = self._states(job, ids, layer)
        lengths = _lengths(states)
        job.tell("prompt", index=0, of=1, length=len(ids), truth=[token_text(model, one) for one in ids])
        with watched_by(end_of(job)):
            for at in range(len(ids)):
                job.tell("stage", text="positions measured", done=at, total=len(ids))
                job.tell("margin", position=at, share=margin_at(model, ids, layer, at) / lengths[at])

    def _layers(self, job: Job) -> None:
        """Which layers give back which positions."""
        model, ids, _ = self._typed(job, job.asked)
        layers = all_layers(model.n_layers)
        with watched_by(end_of(job)), told_of_stages(stages_to(job)):
            states = capture(model, [ids], list(layers))
        job.tell("prompt", index=0, of=1, length=len(ids), truth=[token_text(model, one) for one in ids])
        for done, layer in enumerate(layers):
            job.tell("stage", text="layers read", done=done, total=len(layers))
            rows = states.at(0, layer)
            with watched_by(end_of(job)):
                (found,) = invert(model, States.from_tensor(rows, layer), layer, timeout=_A_LAYER)
            job.tell("row", **result_of(model, found, _lengths(rows), ids))

    def _file(self, job: Job) -> None:
        """The prompts of a file, one after another."""
        ask: Ask = job.asked
        model = self.model
        with told_of_stages(stages_to(job)):
            states, layer = states_in(self._uploads.folder(ask.upload), ask, model)
        if max(states.lengths, default=0) > self._limits.tokens:
            raise StatesError(
                f"It has a prompt of {max(states.lengths)} positions; the page takes {self._limits.tokens}.",
                "Use preimage invert, which takes any.",
            )
        count = min(len(states), self._limits.prompts)
        job.tell("file", prompts=len(states), read=count, layer=str(layer), seen=states.observation.place)
        for index in range(count):
            rows = states.at(index, layer)
            truth = None if states.token_ids is None else states.token_ids[index]
            job.tell("prompt", index=index, of=count, length=len(rows), truth=None)
            one = States.from_tensor([rows], layer, observation=states.observation)
            self._inverted(job, rows, layer, truth, one)

    def _typed(self, job: Job, ask: Ask) -> tuple[LanguageModel, tuple[int, ...], Layer]:
        """The model, the ids of the prompt that was typed, and the layer."""
        model = self.model
        layer = parse_layer(ask.layer or str((model.n_layers + 1) // 2), model.n_layers)
        (ids,) = encode_all(model, [ask.prompt])
        if len(ids) > self._limits.tokens:
            raise PromptError(
                f"The prompt has {len(ids):,} tokens.", f"The page takes {self._limits.tokens}; shorten it."
            )
        return model, ids, layer

    def _states(self, job: Job, ids: Sequence[int], layer: Layer) -> Float[Tensor, "position d_model"]:
        job.tell("stage", text="the model runs the prompt", done=0, total=1)
        with watched_by(end_of(job)), told_of_stages(stages_to(job)):
            return capture(self.model, [ids], [layer]).at(0, layer)

    def _inverted(
        self,
        job: Job,
        rows: Float[Tensor, "position d"],
        layer: Layer,
        truth: Sequence[int] | None,
        states: States | None = None,
    ) -> None:
        """One prompt by the default method, told as it goes."""
        onlooker = Onlooker(job, self.model, "fast", len(rows))
        given = States.from_tensor(rows, layer) if states is None else states
        with watched_by(onlooker.watch):
            (found,) = invert(self.model, given, layer, progress=stages_to(job))
        onlooker.finish()
        told = result_of(self.model, found, _lengths(rows), truth)
        job.tell("result", by="fast", **told, **onlooker.spent | {"seconds": found.seconds})

    def _sipit(
        self, job: Job, ask: Ask, rows: Float[Tensor, "position d"], layer: Layer, ids: Sequence[int]
    ) -> None:
        """SIPIT on the same states for so many seconds: how many tokens it verifies, in how many passes."""
        onlooker = Onlooker(job, self.model, "sipit", len(rows), ask.sipit_seconds)
        job.tell("sipit", way=ask.sipit, most=ask.sipit_seconds)
        options: dict[str, Any] = (
            {"published_cost": True, "patience": None} if ask.sipit == "published" else {}
        )
        found: Inversion | None = None
        try:
            with watched_by(onlooker.watch):
                (found,) = invert(
                    self.model, States.from_tensor(rows, layer), layer, method="sipit", **options
                )
        except EnoughError:
            pass
        onlooker.finish()
        verified = onlooker.settled if found is None else len(found.token_ids)
        exact = found is not None and found.claims(ids)
        status = "stopped" if found is None else found.status
        job.tell(
            "sipit_end", status=status, verified=verified, exact=exact, length=len(ids), **onlooker.spent
        )


def _lengths(rows: Float[Tensor, "position d"]) -> list[float]:
    found: list[float] = norms(rows.double()).tolist()
    return found
