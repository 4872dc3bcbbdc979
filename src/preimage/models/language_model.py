"""The layer map F^l of a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from preimage.layers import Layer
from preimage.models.anatomy import Anatomy, block_input, block_output, discover
from preimage.models.coded import is_coded
from preimage.models.identity import ModelIdentity, alterations, fingerprint, weight_hash
from preimage.models.lifting import entering
from preimage.models.locating import ModelFiles
from preimage.models.offloaded import device_of, in_full
from preimage.models.prefix import Prefix, empty_cache
from preimage.models.quirks import quirk_of
from preimage.models.sites import needs_cache, require_keys, unseen, watching
from preimage.observations import Site, Tap
from preimage.progress import passing
from preimage.views import table, view

At = TypeVar("At", bound=Tap)  # whoever asks for layers alone gets layers back


class _Reached(Exception):  # noqa: N818  # a signal, not an error
    """Raised inside a forward pass once everything wanted of it is known; never leaves this file."""


class LanguageModel:
    """A decoder-only transformers model, seen as the maps F^l from prompts to hidden states.

    The wrapped module runs its own ``forward``: numbers equal plain transformers bit for bit, and no weight
    is touched.
    """

    _around_pass: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        *,
        name: str,
        revision: str | None = None,
        files: ModelFiles | None = None,
        anatomy: Anatomy | None = None,  # where it is known already
    ) -> None:
        self.module = module.eval()  # dropout would make every pass another map
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.files = files  # None of a model that was given in memory
        self.anatomy: Anatomy = anatomy or discover(module)
        self.forward_tokens = 0  # token positions run so far, for whoever counts cost
        self._widths: dict[Site, int] = {}
        self._spelled: dict[int, str] = {}
        self._edition, self._fingerprint = 0, fingerprint(module, self.anatomy.embedding)
        self._settled = 0  # calls during which nobody changes it

    def __repr__(self) -> str:
        return (
            f"<{self.name}: {type(self.module).__name__}, {self.n_layers} blocks, d_model {self.d_model}, "
            f"vocabulary {self.vocab_size}, {self.dtype}, {self.device}>"
        )

    def _repr_html_(self) -> str:
        facts = {
            "architecture": type(self.module).__name__,
            "blocks": self.n_layers,
            "d_model": self.d_model,
            "vocabulary": self.vocab_size,
            "longest prompt": self.max_length,
            "type": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "tokenizer": self.tokenizer is not None,
        }
        return view(self.name, table([facts]))

    @property
    def config(self) -> Any:
        """The config of the decoder."""
        return self.module.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]

    @property
    def n_layers(self) -> int:
        """L, the number of blocks."""
        return len(self.anatomy.blocks)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.anatomy.d_model

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table: every id below it is a candidate."""
        return int(self.anatomy.embedding.num_embeddings)  # type: ignore[arg-type]

    @property
    def max_length(self) -> int | None:
        """Longest prompt the model's positions allow; None where it has no limit."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return int(limit) if limit else None

    def receptive_field(self, layer: Layer) -> int | None:
        """How many of the last tokens a state at a layer can depend on, by the config; None where on all.

        A block with a sliding window looks back window - 1 positions further than the block below. What the
        config says is a hypothesis: parts may have been replaced, and not every class reads it.
        """
        window, kinds = quirk_of(self.config).windows(self.config)
        sees = 1
        for block in range(self.n_layers if layer == "final" else layer):
            slides = kinds[block] in ("sliding_attention", "local") if kinds else True
            if not window or not slides:
                return None
            sees += window - 1
        return sees

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type the model computes in."""
        return next(self.anatomy.blocks[0].parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the embedding runs, and so where inputs go; states come back here."""
        return device_of(self.anatomy.embedding)

    @property
    def lasting(self) -> bool:
        """Whether what is measured of it holds for the next process too: it is what its files say.

        A module that came from elsewhere, or in which something was hooked or replaced, may be another map
        under the same weights.
        """
        return self.files is not None and not alterations(self.module)

    @property
    def edition(self) -> int:
        """Another number once weights or hooks were changed in place: what was measured before is void.

        Changes through ``.data``, but for rows of the embedding table, and parts exchanged for others are not
        seen: load such a model again.
        """
        self._forget_what_changed()
        return self._edition

    @contextmanager
    def unchanging(self) -> Iterator[None]:
        """Look once whether weights or hooks were changed, and no more while this lasts: one call's work."""
        self._forget_what_changed()
        self._settled += 1
        try:
            yield
        finally:
            self._settled -= 1

    def _forget_what_changed(self) -> None:
        if self._settled:
            return
        now = fingerprint(self.module, self.anatomy.embedding)
        if now != self._fingerprint:
            self._edition, self._fingerprint = self._edition + 1, now
            for name in ("_identity", "_weight_hash", "_embedding_table", "_head_table"):
                self.__dict__.pop(name, None)

    @property
    def weight_hash(self) -> str:
        """By which weights are known again; hashing them takes about half a second per GB, once."""
        self._forget_what_changed()
        return self._weight_hash

    @cached_property
    def _weight_hash(self) -> str:
        return weight_hash(self.anatomy.backbone)

    @property
    def identity(self) -> ModelIdentity:
        """What ties results to this model; hashing weights and files takes about a second per GB, once."""
        self._forget_what_changed()
        return self._identity

    @cached_property
    def _identity(self) -> ModelIdentity:
        return ModelIdentity(
            name=self.name,
            revision=self.revision,
            architecture=type(self.module).__name__,
            weight_hash=self._weight_hash,
            dtype=str(self.dtype).removeprefix("torch."),
            n_layers=self.n_layers,
            d_model=self.d_model,
            vocab_size=self.vocab_size,
            files_hash=None if self.files is None else self.files.hash,
        )

    def embed(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape d_embedding"]:
        """Input embeddings as the backbone takes them, the model's own scaling included."""
        embedded: Tensor = self.anatomy.embedding(ids.to(self.device))
        return embedded

    @property
    def embedding_table(self) -> Float[Tensor, "vocabulary d_embedding"]:
        """The input embedding of every vocabulary id."""
        self._forget_what_changed()
        return self._embedding_table

    @cached_property
    def _embedding_table(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():  # gradients are taken beside it later
            return self.embed(torch.arange(self.vocab_size))

    def run(
        self,
        ids: Int[Tensor, "batch position"] | None = None,
        *,
        layers: Sequence[At],
        embeddings: Float[Tensor, "batch position d_embedding"] | None = None,
        cache: Any = None,
        **given_along: Tensor,
    ) -> dict[At, Float[Tensor, "batch position _"]]:
        """States at ``layers``; blocks above the deepest of them, and the LM head, do not run.

        A :class:`Site` among them is what a block computes there, heads side by side. Give token ids or
        input embeddings. Gradients flow unless the caller turned them off. What is
        ``given_along`` (a mask, positions) goes to the module as it is.
        """
        inputs = {"inputs_embeds": embeddings} if ids is None else {"input_ids": ids.to(self.device)}
        given = embeddings if ids is None else ids
        assert given is not None, "give ids or embeddings"
        between = passing()
        self.forward_tokens += given.shape[0] * given.shape[1]
        if cache is None and any(map(needs_cache, layers)):
            require_keys(self)
            cache = empty_cache(self.n_layers)  # what it is handed over is seen, and not kept
        states: dict[Tap, Tensor] = {}
        with self._around_pass(), self._taps(layers, cache, states, between):
            try:
                output = self.anatomy.backbone(
                    **inputs, past_key_values=cache, use_cache=cache is not None, **given_along
                )
                states["final"] = output.last_hidden_state
            except _Reached:
                pass
        for tap in layers:
            if isinstance(tap, Site) and tap not in states:
                raise unseen(self, tap)
            if states[tap].ndim == 2:  # some MLPs see rows alone
                states[tap] = states[tap].view(*given.shape[:2], -1)
        device = self.device
        return {tap: states[tap].to(device) for tap in layers}

    def states(
        self, ids: Int[Tensor, "batch position"], layers: Sequence[At]
    ) -> dict[At, Float[Tensor, "batch position _"]]:
        """F^l at every position of equally long prompts, without gradients."""
        with torch.inference_mode():
            return self.run(ids, layers=layers)

    def lift(
        self, states: Float[Tensor, "batch position d_model"], layer: Layer, to: Layer
    ) -> Float[Tensor, "batch position d_model"]:
        """The states at ``to`` of prompts whose states at ``layer``, not above it, are all known."""
        if layer == to:
            return states
        empty = self._embedding_table[:1].expand(*states.shape[:2], -1)
        with torch.inference_mode(), entering(self.anatomy, layer, states.to(empty)):
            return self.run(embeddings=empty, layers=(to,))[to]

    @property
    def has_head(self) -> bool:
        """Whether the module gives next-token logits, and not states alone."""
        return getattr(self.module, "get_output_embeddings", lambda: None)() is not None

    def logits_from(
        self, states: Float[Tensor, "batch position d_model"], layer: Layer
    ) -> Float[Tensor, "batch position vocabulary"]:
        """The module's next-token logits of prompts whose states at ``layer`` are all known."""
        empty = self._embedding_table[:1].expand(*states.shape[:2], -1)
        passing()
        self.forward_tokens += states.shape[0] * states.shape[1]
        with torch.inference_mode(), self._around_pass(), entering(self.anatomy, layer, states.to(empty)):
            logits: Tensor = self.module(inputs_embeds=empty, use_cache=False).logits
        return logits

    @property
    def unembedding(self) -> Float[Tensor, "vocabulary d_model"] | None:
        """The LM head's matrix, one row a vocabulary id; None where there is no such head."""
        head = getattr(self.module, "get_output_embeddings", lambda: None)()
        weight = getattr(head, "weight", None)
        if weight is None or weight.shape[0] < self.vocab_size or weight.shape[1] != self.d_model:
            return None
        if is_coded(weight) or weight.device != self.device:
            self._forget_what_changed()
            return self._head_table[: self.vocab_size]
        table: Tensor = weight.detach()
        return table[: self.vocab_size]

    @cached_property
    def _head_table(self) -> Tensor:
        """The LM head's matrix where it has to be decoded, or brought here."""
        weight: Any = in_full(self.module.get_output_embeddings(), "weight")  # type: ignore[operator]
        table: Tensor = weight.dequantize() if is_coded(weight) else weight.detach()
        return table.to(self.device)

    def prefix(self, tap: Tap) -> Prefix:
        """An empty prefix on which F^l, or what is seen at a site, can be grown and tried."""
        return Prefix(self, tap)

    def width(self, tap: Tap) -> int:
        """How many coordinates are seen at a layer or site; found out once by a pass of one token."""
        if not isinstance(tap, Site):
            return self.d_model
        if tap not in self._widths:
            counted = self.forward_tokens
            self._widths[tap] = self.states(torch.zeros(1, 1, dtype=torch.long), (tap,))[tap].shape[-1]
            self.forward_tokens = counted
        return self._widths[tap]

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of token ids, nothing skipped and nothing cleaned up; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def spell(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each token id by itself, as it stands behind others; none without a tokenizer."""
        if self.tokenizer is None:
            return ()
        for token in {*ids} - self._spelled.keys():
            alone, behind = self.decode([token]) or "", self.decode([token, token]) or ""
            # some tokenizers leave out the space before the first word
            self._spelled[token] = behind.removeprefix(alone) if behind.startswith(alone) else alone
        return tuple(self._spelled[token] for token in ids)

    @contextmanager
    def _taps(
        self,
        taps: Sequence[Tap],
        cache: Any,
        found: dict[Tap, Tensor],
        between: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Hooks that copy the wanted states out of a pass and end it once all are there.

        ``between`` is called before every block, which may end it too.
        """
        wanted = dict.fromkeys(taps)

        def reach(tap: Tap, states: Tensor) -> None:
            found[tap] = states
            if wanted.keys() <= found.keys():
                raise _Reached

        def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            reach(0, block_input(args, kwargs))

        def after(layer: int) -> Any:
            return lambda _module, _args, output: reach(layer, block_output(output))

        blocks = self.anatomy.blocks
        with ExitStack() as stack:
            if between is not None:
                check = between
                for block in blocks:
                    stack.callback(block.register_forward_pre_hook(lambda *_: check()).remove)
            for tap in wanted:
                if isinstance(tap, Site):
                    stack.enter_context(watching(self, tap, cache, partial(reach, tap)))
                elif tap == 0:
                    handle = blocks[0].register_forward_pre_hook(before, with_kwargs=True)
                    stack.callback(handle.remove)
                elif tap != "final":
                    handle = blocks[tap - 1].register_forward_hook(after(tap))
                    stack.callback(handle.remove)
            yield
