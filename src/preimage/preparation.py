"""From the names a command is given to a model and its prompts, each step made once.

What is wrong is refused on what a model's files say of themselves, before torch is imported. Prompts are
gathered with the tokenizer in those files and kept, with their provenance, while the weights are loaded.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING

from preimage.errors import PromptError
from preimage.layers import Layer, LayerSpec, parse_layers
from preimage.models import check_device, check_device_map, check_dtype, locate, read_preview
from preimage.prompts import PromptOptions, PromptSet, gather
from preimage.prompts.gathering import Source

if TYPE_CHECKING:
    from preimage.models import LanguageModel, ModelPreview


class Preparation:
    """One model: located on construction, previewed from its files, loaded when ``model`` is first asked for.

    ``name``: as in :func:`preimage.load`. A model in memory is taken as it is.
    """

    def __init__(
        self,
        model: str | LanguageModel,
        *,
        dtype: str = "float32",
        device: str = "auto",
        device_map: str | None = None,
    ) -> None:
        self._dtype, self._device, self._device_map = check_dtype(dtype), check_device(device), device_map
        check_device_map(device_map, device)
        if not isinstance(model, str):
            from preimage.models import require_model  # which imports torch

            require_model(model)
        self._gathered: dict[tuple[str, PromptOptions], PromptSet] = {}
        self.name = model if isinstance(model, str) else model.name
        self.files = locate(model) if isinstance(model, str) else None
        self._preview = read_preview(self.files) if self.files is not None else None
        if not isinstance(model, str):
            self.model = model

    @property
    def known(self) -> LanguageModel | ModelPreview:
        """What says the model's sizes: its files, or itself where they do not tell."""
        return self._preview or self.model

    @cached_property
    def model(self) -> LanguageModel:
        """The model, loaded."""
        from preimage.models import load  # which imports torch

        model = load(
            self.files or self.name, dtype=self._dtype, device=self._device, device_map=self._device_map
        )
        if self._preview is not None and not self._preview.describes(model):
            self._gathered.clear()  # transformers reads the files in another way
            self._preview = None
        return model

    def with_dtype(self, dtype: str) -> Preparation:
        """The same for another dtype; what is known of the files and the prompts is shared."""
        other = copy(self)
        if check_dtype(dtype) != self._dtype:
            other._dtype = check_dtype(dtype)
            other.__dict__.pop("model", None)
        return other

    def layers(self, layers: LayerSpec) -> tuple[Layer, ...]:
        """The layers meant, refused where the model does not have them."""
        return parse_layers(layers, self.known.n_layers)

    def prompts(self, source: Source, options: PromptOptions, *, at_least: int = 1) -> PromptSet:
        """Prompts for this model, gathered once for a source and its options (:func:`preimage.gather`)."""
        asked = repr(source), options
        if asked not in self._gathered:
            self._gathered[asked] = gather(source, self.known, options)
        prompts = self._gathered[asked]
        if len(prompts) < at_least:
            raise PromptError(f"The source gives {len(prompts)} prompts.", f"Give {at_least} or more.")
        return prompts
