"""``preimage.load``: an alias, a hub id, a folder, a GGUF file or a loaded transformers object."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from preimage.errors import ModelError, OptionError, clip, first_line
from preimage.models.aliases import converted_gguf
from preimage.models.language_model import LanguageModel
from preimage.models.locating import ModelFiles, check_device_map, check_dtype, locate, unusable_device
from preimage.models.memory import require_layers, require_room


def load(
    model: str | os.PathLike[str] | ModelFiles | nn.Module | LanguageModel = "smollm2",
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "auto",
    device_map: str | dict[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
) -> LanguageModel:
    """Load a decoder-only model and map its layers.

    ``model`` is the alias ``smollm2``, a Hugging Face hub id, a local folder of safetensors, a GGUF file, or
    a transformers model already in memory. One in memory keeps its dtype and device, also where accelerate
    spread it over several, and is put into eval mode. ``dtype`` is always explicit, because a checkpoint's
    own default would silently be bfloat16; ``auto`` is that default. Weights that the device cannot hold are
    refused before they are read.

    ``device_map`` instead of ``device`` spreads them as transformers does it: ``auto``, or devices by the
    names of parts. What is left on the disk is read from there in every pass, and from ``offload_folder``
    where the files do not hold it as it is used. Code from the hub is never run and pickled weights are never
    opened.
    """
    if isinstance(model, LanguageModel):
        return model
    if isinstance(model, nn.Module):
        config = getattr(model, "config", None)
        name = getattr(config, "name_or_path", "") or type(model).__name__
        return LanguageModel(model, tokenizer, name=str(name), revision=revision)
    if not isinstance(model, str | os.PathLike | ModelFiles):
        raise ModelError(
            f"A {type(model).__name__} cannot be loaded.",
            "Give a name, a path, or a transformers model in memory (an instance, not its class or config).",
        )
    asked = check_dtype(str(dtype))
    check_device_map(device_map, device)
    target = None if device_map is not None else parse_device(device)
    files = model if isinstance(model, ModelFiles) else locate(os.fspath(model), revision)
    named = files.dtype if asked == "auto" else asked
    require_room(files, named, target)
    if files.path.is_file():
        module, own_tokenizer = _from_gguf(files.path, named, target)
    else:
        spread = {} if target else {"device_map": device_map, "offload_folder": offload_folder}
        module, own_tokenizer = _from_folder(files.path, named, spread)
    module = module.requires_grad_(False)
    module = module if target is None else module.to(target)
    return LanguageModel(
        module, tokenizer or own_tokenizer, name=files.name, revision=files.revision, files=files
    )


def require_model(model: object) -> None:
    """Refuse what is no model yet: a name, a transformers model as it is, its class or its config."""
    if isinstance(model, LanguageModel):
        return
    what = clip(repr(model), 60) if isinstance(model, str | os.PathLike) else f"A {type(model).__name__}"
    is_a_name = isinstance(model, str | os.PathLike)
    raise ModelError(
        f"{what} is {'the name of a model' if is_a_name else 'no model that preimage loaded'}.",
        "Use model = preimage.load(model) once, with tokenizer= for one in memory, and give that.",
    )


def parse_device(device: str | torch.device) -> torch.device:
    """A device from its name; ``auto`` is CUDA where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise unusable_device(str(device)) from error
    return target


def _from_gguf(path: Path, dtype: str, target: torch.device | None) -> tuple[nn.Module, Any]:
    from preimage.models.gguf_files import read_gguf

    if target is None:
        raise OptionError(f"{path} is a GGUF file, which no device map spreads.", "Give a device.")
    folder = converted_gguf(path)
    return read_gguf(path, getattr(torch, dtype)) if folder is None else _from_folder(folder, dtype, {})


def _from_folder(folder: Path, dtype: str, spread: dict[str, Any]) -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    local = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, **local)
        require_layers(folder, getattr(config.get_text_config(), "num_hidden_layers", None))
        module, info = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), use_safetensors=True,
            output_loading_info=True, **local, **spread,
        )  # fmt: skip
    except ModelError:
        raise
    except Exception as error:  # transformers raises many kinds; the user needs one line
        hint = "Check that the folder holds config.json and unbroken safetensors of a transformers model"
        if spread:
            hint += ", and the device map; give an offload_folder"
        message = f"{folder} cannot be loaded as a causal language model: {first_line(error)}"
        raise ModelError(message, f"{hint}.") from error
    # transformers fills what is missing with random numbers; only the head may be, no state depends on it
    head = [f"{name}." for name, part in module.named_modules() if part is module.get_output_embeddings()]
    absent = sorted(name for name in info["missing_keys"] if not name.startswith(tuple(head)))
    if absent:
        raise ModelError(
            f"{folder} lacks {len(absent)} weights its config.json asks for, {absent[0]!r} first.",
            "Get the whole model again, or correct config.json.",
        )
    return module, _tokenizer(folder)


def _tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None where it has none (token ids still work)."""
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # as above: many kinds, one line
        raise ModelError(
            f"The tokenizer in {folder} cannot be loaded: {first_line(error)}",
            "Get its files again, or remove them to work with token ids alone.",
        ) from error
