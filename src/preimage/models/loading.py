"""``preimage.load``: an alias, a hub id, a folder, a GGUF file or a loaded transformers object."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from preimage.errors import ModelError, OptionError
from preimage.models.aliases import ALIASES, ensure_converted
from preimage.models.language_model import LanguageModel

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16}
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_HUB_SECONDS = 3.0  # an unknown name must fail at once, not after a chain of retries


def load(
    model: str | os.PathLike[str] | nn.Module | LanguageModel = "smollm2",
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "auto",
    tokenizer: Any = None,
    revision: str | None = None,
) -> LanguageModel:
    """Load a decoder-only model and map its layers.

    ``model`` is the alias ``smollm2``, a Hugging Face hub id, a local folder of safetensors, a GGUF file, or
    a transformers model already in memory. One in memory keeps its dtype and device and is put into eval
    mode. ``dtype`` is always explicit, because a checkpoint's own default would silently be bfloat16.
    Code from the hub is never run and pickled weights are never opened.
    """
    if isinstance(model, LanguageModel):
        return model
    if isinstance(model, nn.Module):
        config = getattr(model, "config", None)
        name = getattr(config, "name_or_path", "") or type(model).__name__
        return LanguageModel(model, tokenizer, name=str(name), revision=revision)
    torch_dtype, target = parse_dtype(dtype), parse_device(device)
    name = os.fspath(model)
    path, revision = locate(name, revision)
    reader = _from_gguf if path.is_file() else _from_folder
    module, found = reader(path, torch_dtype)
    module = module.requires_grad_(False).to(target)
    return LanguageModel(module, tokenizer or found, name=name, revision=revision)


def locate(name: str, revision: str | None = None) -> tuple[Path, str | None]:
    """The folder or GGUF file behind a model's name, fetched first where it must be, and its revision."""
    if name in ALIASES:
        return ensure_converted(ALIASES[name]), f"sha256:{ALIASES[name].sha256}"
    path = Path(name)
    if name.lower().endswith(".gguf"):
        _check_gguf(path)
        return path, revision
    if not path.exists():
        path = _hub_folder(name, revision)
        revision = path.name  # snapshots are named by their commit
    _check_folder(path)
    return path, revision


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch dtype from its name."""
    known = _DTYPES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise OptionError(f"dtype {str(dtype)!r} is not known.", f"Use one of {', '.join(_DTYPES)}.")
    return known


def parse_device(device: str | torch.device) -> torch.device:
    """A device from its name; ``auto`` is CUDA where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(
            f"Device {str(device)!r} cannot be used here.",
            "Use auto, cpu, or cuda where there is one.",
        ) from error
    return target


def _from_folder(folder: Path, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    local = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, **local)
        module = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, **local
        )
    except Exception as error:  # transformers raises many kinds; the user needs one line
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{folder} cannot be loaded as a causal language model: {reason}",
            "Check that the folder holds config.json and unbroken safetensors of a transformers model.",
        ) from error
    return module, read_tokenizer(folder)


def read_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None where it has none (token ids still work)."""
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _check_folder(folder: Path) -> None:
    """Refuse before anything is read: no folder, no config, or only pickled weights."""
    if folder.is_file():
        if folder.suffix.lower() in _PICKLED:
            raise _pickled(folder)
        raise ModelError(
            f"{folder} is a file preimage cannot load.",
            "Give a GGUF file, or the folder that holds config.json and *.safetensors.",
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json.", "Give a folder in Hugging Face's layout.")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path for path in folder.iterdir() if path.suffix.lower() in _PICKLED)
        if pickled:
            raise _pickled(pickled[0])
        raise ModelError(f"{folder} holds no *.safetensors.", "Save the model with save_pretrained().")


def _pickled(path: Path) -> ModelError:
    return ModelError(
        f"{path} is a pickled file, which can run code when opened; preimage never opens one.",
        "Convert it to safetensors (save_pretrained does) and load that.",
    )


def _from_gguf(path: Path, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    from preimage.models.gguf_files import read_gguf

    return read_gguf(path, dtype)


def _check_gguf(path: Path) -> None:
    if not path.is_file():
        raise ModelError(f"There is no file {path}.", "Check the path.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file.", "Its first four bytes should be GGUF.")


def _hub_folder(name: str, revision: str | None) -> Path:
    """The local snapshot of a hub model: from the hub's cache, else downloaded (safetensors only)."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    tried = f"{name!r} is no alias ({', '.join(ALIASES)}), no file or folder here"
    hint = "Use an alias, a path, or a hub id such as HuggingFaceTB/SmolLM2-135M; see `preimage models`."
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except HFValidationError as error:
        raise ModelError(f"{tried}, and not a hub id.", hint) from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelError(f"{tried}, and not in the hub's cache (offline).", hint) from error
    _ask_hub(name, revision, tried, hint)
    log.info("downloading %s from the hub", name)
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def _ask_hub(name: str, revision: str | None, tried: str, hint: str) -> None:
    """One quick question to the hub before a download: is it there, and does it have safetensors?"""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().model_info(name, revision=revision, timeout=_HUB_SECONDS)
    except HfHubHTTPError as error:
        raise ModelError(f"{tried}, and the hub does not have it (or not for you).", hint) from error
    except Exception as error:  # no route, no name, time-out: each client version has its own kinds
        raise ModelError(f"{tried}, and the hub cannot be reached.", hint) from error
    files = [sibling.rfilename for sibling in info.siblings or []]
    if not any(file.endswith(".safetensors") for file in files):
        raise ModelError(
            f"{name} has no safetensors on the hub, and preimage never opens pickled weights.",
            "Ask its owner to convert it, or convert it yourself and give the folder.",
        )
