"""Files people drop: kept while the server runs, and opened as files of strangers are everywhere."""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

from preimage.errors import OptionError, PreimageError, StatesError
from preimage.layers import Layer, parse_layer
from preimage.models import LanguageModel
from preimage.observations import Observation
from preimage.states import States, read_states_file, states_from
from preimage.states.bundle import open_bundle
from preimage.storage import MANIFEST, TENSORS, read_manifest, write_bytes
from preimage.web.asking import Ask
from preimage.web.guard import RequestError
from preimage.web.options import Limits

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_KINDS = (".safetensors", ".npy", ".npz")
_OTHERS = {
    ".zip": "Unpack it and drop what is in it.",
    ".pt": "Save the tensor with safetensors.torch.save_file, or use preimage invert.",
    ".gz": "Unpack it first.",
    ".gguf": "That is a model: start preimage serve --model with it.",
}
_OTHERS |= dict.fromkeys((".pth", ".bin", ".pkl", ".ckpt"), _OTHERS[".pt"])
_OTHERS |= dict.fromkeys((".tar", ".tgz", ".7z", ".xz", ".zst"), _OTHERS[".gz"])
_HINT = "Drop one .safetensors, .npy or .npz file, or the manifest.json and states.safetensors of a bundle."


class Uploads:
    """What was dropped, each upload in a folder of its own; the oldest makes room for the newest."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._lock = limits, threading.Lock()
        self._root = Path(tempfile.mkdtemp(prefix="preimage-serve-"))
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def check_name(self, name: str) -> None:
        """Refuse a file that cannot be states, before any of it is read."""
        suffix = Path(name).suffix.lower() if len(name) < 1000 else ""
        if name == MANIFEST or suffix in _KINDS:
            return
        raise RequestError(
            f"A {suffix} file is not opened here."
            if suffix in _OTHERS
            else "This file holds no states that can be read.",
            _OTHERS.get(suffix, _HINT),
            status=415,
        )

    def room(self, upload: str | None) -> int:
        """How many bytes the next file of an upload may have."""
        return self._limits.upload - (self._sizes[self._known(upload)] if upload else 0)

    def add(self, upload: str | None, name: str, content: bytes | bytearray) -> str:
        """Keep a file, in an upload of its own or beside others; the upload's name."""
        self.check_name(name)
        with self._lock:
            if upload is None:
                upload = secrets.token_hex(8)
                self._sizes[upload] = 0
                while len(self._sizes) > self._limits.uploads:
                    self._remove(self._sizes.popitem(last=False)[0])
            self._known(upload)
            self._sizes[upload] += len(content)
        plain = name if _PLAIN.fullmatch(name) else f"tensor{Path(name).suffix.lower()}"
        write_bytes(self._root / upload / plain, content)
        return upload

    def folder(self, upload: str) -> Path:
        """Where an upload lies."""
        return self._root / self._known(upload)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _known(self, upload: str | None) -> str:
        if upload is None or upload not in self._sizes:
            raise RequestError("This upload is not here any more.", "Drop the file again.", status=404)
        return upload

    def _remove(self, upload: str) -> None:
        shutil.rmtree(self._root / upload, ignore_errors=True)


def states_in(folder: Path, ask: Ask, model: LanguageModel) -> tuple[States, Layer]:
    """The states of an upload and the layer they are of; errors name files as they were dropped."""
    try:
        if (folder / MANIFEST).is_file():
            return _of_bundle(folder, ask, model)
        return _of_file(folder, ask, model)
    except PreimageError as error:
        error.message = error.message.replace(f"{folder}/", "").replace(str(folder), "The bundle")
        raise


def _observation(ask: Ask) -> Observation:
    return Observation(place=ask.observe, positions=ask.positions)


def _of_bundle(folder: Path, ask: Ask, model: LanguageModel) -> tuple[States, Layer]:
    states = states_from(open_bundle(folder, read_manifest(folder)), model)
    states.require_width(model)
    if not ask.any_model:
        states.require_made_by(model)
    if ask.layer:
        layer = parse_layer(ask.layer, model.n_layers)
    elif len(states.layers) == 1:
        layer = states.layers[0]
    else:
        held = ", ".join(map(str, states.layers))
        raise OptionError(f"This bundle holds {len(states.layers)} layers.", f"Choose one of {held}.")
    if layer not in states.layers:
        held = ", ".join(map(str, states.layers))
        raise OptionError(f"This bundle does not hold layer {layer}.", f"Choose one of {held}.")
    return states, layer


def _of_file(folder: Path, ask: Ask, model: LanguageModel) -> tuple[States, Layer]:
    files = sorted(path for path in folder.iterdir() if path.suffix in _KINDS)
    if len(files) != 1:
        raise StatesError(f"{len(files)} tensor files were dropped, and no {MANIFEST}.", _HINT)
    if files[0].name == TENSORS and not ask.layer:
        raise OptionError(
            f"{TENSORS} came without its {MANIFEST}.", "Drop both, or choose the layer of its states."
        )
    if not ask.layer and ask.observe != "final":
        raise OptionError("A tensor does not say its layer.", "Choose the layer it is of.")
    layer = "final" if ask.observe == "final" else parse_layer(ask.layer, model.n_layers)
    held = read_states_file(files[0], ask.key or None, None, layer)
    states = states_from(held.states, model, layer, observe=_observation(ask), attention_mask=held.mask)
    return states, states.layers[0]
