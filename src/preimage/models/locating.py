"""From a model's name to the folder or file that holds it. Nothing here needs torch."""

from __future__ import annotations

import logging
import re
import reprlib
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from preimage.errors import MissingExtraError, ModelError, OptionError, clip, first_line, shown
from preimage.models.aliases import ALIASES, converted_folder, ensure_converted
from preimage.models.identity import hash_files
from preimage.storage import parse_json

log = logging.getLogger(__name__)

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
DTYPES = {
    "float32": "float32", "fp32": "float32", "float64": "float64", "fp64": "float64",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16", "half": "float16",
    "auto": "auto",
}  # what a model is loaded in, by the names people use  # fmt: skip
_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # accelerate's, by their names
HUB_SECONDS = 3.0  # an unknown name must fail at once, not after a chain of retries


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are: a folder in Hugging Face's layout, or a GGUF file."""

    name: str
    path: Path
    revision: str | None

    @cached_property
    def hash(self) -> str | None:
        """SHA-256 over the tensors in the files, computed once; None where they are not safetensors."""
        return hash_files(self.path)

    @property
    def dtype(self) -> str:
        """The dtype that config.json names; float32 where it names none, and of a GGUF file."""
        try:
            config = parse_json((self.path / "config.json").read_text(encoding="utf-8"))
            inner = config.get("text_config") or {}
            named = [part.get(key) for part in (config, inner) for key in ("dtype", "torch_dtype")]
        except (OSError, ValueError, AttributeError):  # a GGUF file; else loading will say it properly
            return "float32"
        name = next((str(one) for one in named if one), "float32")
        if DTYPES.get(name, "auto") == "auto":
            named_so = f"names the dtype {reprlib.repr(name)}, in which models are not loaded"
            raise ModelError(f"{self.path}/config.json {named_so}.", "Give a dtype other than auto.")
        return DTYPES[name]


def locate(name: str, revision: str | None = None) -> ModelFiles:
    """The files behind a model's name, fetched first where they must be."""
    if name in ALIASES:
        return ModelFiles(name, ensure_converted(ALIASES[name]), f"sha256:{ALIASES[name].sha256}")
    path = Path(name)
    if name.lower().endswith(".gguf"):
        _check_gguf(path)
        return ModelFiles(name, path, revision)
    if not _exists(path):
        path = _hub_folder(name, revision)
        revision = path.name  # snapshots are named by their commit
    _check_folder(path)
    return ModelFiles(name, path, revision)


def folder_here(name: str) -> Path | None:
    """The folder of a model that is on this disk already; None where it would have to be fetched first."""
    if name in ALIASES:
        folder = converted_folder(ALIASES[name])
    elif _exists(Path(name)):
        folder = Path(name)
    else:
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except Exception:  # no name of a model, or none that is here: each client version has its own kinds
            return None
    return folder if folder.is_dir() else None


def check_dtype(name: str) -> str:
    """A dtype's full name, or auto; refused where models are not loaded in it."""
    known = DTYPES.get(name.removeprefix("torch."))
    if known is None:
        raise OptionError(f"dtype {name!r} is not known.", f"Use one of {', '.join(DTYPES)}.")
    return known


def check_device(name: str) -> str:
    """Refuse what cannot be the name of a device, whatever this machine has."""
    if not re.fullmatch(r"auto|[a-z]+(:\d+)?", name):
        raise unusable_device(name)
    return name


def check_device_map(device_map: object, device: object) -> None:
    """Refuse a device map beside a device, and where nothing here can follow it."""
    if device_map is None:
        return
    if isinstance(device_map, str) and device_map not in _DEVICE_MAPS:
        raise OptionError(f"Device map {device_map!r} is not known.", f"Use {', '.join(_DEVICE_MAPS)}.")
    if device != "auto":
        raise OptionError(f"device {device} and a device map were given.", "Give one of them.")
    if find_spec("accelerate") is None:
        raise MissingExtraError("A device map needs accelerate, which is not installed.",
                                "Install it: pip install accelerate")  # fmt: skip


def unusable_device(name: str) -> OptionError:
    """The error for a device that is not here."""
    return OptionError(f"Device {name!r} cannot be used here.", "Use auto, cpu, or cuda where there is one.")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for any file
        return False


def _check_folder(folder: Path) -> None:
    """Refuse before any weight is read: no folder, no config, pickled weights."""
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
    for index in folder.rglob("*.safetensors.index.json"):
        for file in _shards(index):
            if not file.endswith(".safetensors"):  # transformers would open it, whatever it is
                raise _pickled(index.parent / shown(file))


def _shards(index: Path) -> set[str]:
    """The files a sharded model names."""
    try:
        return set(map(str, parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(f"{index} cannot be read as an index of weights.", "Get the model again.") from error


def _pickled(path: Path) -> ModelError:
    return ModelError(
        f"{path} is a pickled file, which can run code when opened; preimage never opens one.",
        "Convert it to safetensors (save_pretrained does) and load that.",
    )


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

    tried = f"{clip(repr(name))} is not an alias ({', '.join(ALIASES)}), no file or folder here"
    hint = "Use an alias, a path, or a hub id such as HuggingFaceTB/SmolLM2-135M; see `preimage models`."
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        cached = Path(snapshot_download(name, revision=revision, local_files_only=True))
        if constants.HF_HUB_OFFLINE or any(cached.glob("*.safetensors")):
            return cached  # else somebody fetched only config or tokenizer so far
    except HFValidationError as error:
        raise ModelError(f"{tried}, and not a hub id.", hint) from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelError(f"{tried}, and not in the hub's cache (offline).", hint) from error
    _ask_hub(name, revision, tried, hint)
    log.info("downloading %s from the hub", name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the network went away, the disk is full: each client has its own kinds
        failed = f"The download of {name} failed: {first_line(error)}"
        raise ModelError(failed, "Try again; it continues.") from error


def _ask_hub(name: str, revision: str | None, tried: str, hint: str) -> None:
    """One quick question to the hub before a download: is it there, and does it have safetensors?"""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)
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
