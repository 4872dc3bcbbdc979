"""State bundles of preimage itself: a folder with a manifest, in which token ids may stand."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from preimage.errors import shown
from preimage.leak.holdings import Clear, Holding, Piece, Seen, Told
from preimage.states import open_states
from preimage.storage import MANIFEST

_BEGINS = b'"preimage/'  # the schema, which stands first in a manifest


def is_bundle(folder: Path) -> bool:
    """Whether a folder has the manifest of a bundle, be it damaged or not."""
    manifest = folder / MANIFEST
    if manifest.is_symlink() or not manifest.is_file():
        return False
    with manifest.open("rb") as file:
        return _BEGINS in file.read(1 << 12)


def read(path: Path, told: Told) -> Holding | None:
    """What a bundle holds, which says of itself all there is to know; None where the folder is none."""
    if not path.is_dir() or not is_bundle(path):
        return None
    states = open_states(path)
    ids, about = states.token_ids, states.observation
    pieces = tuple(
        Piece(
            f"{path.name}, prompt {prompt}",
            length or None,
            0,
            tuple(Seen(layer, about, partial(states.at, prompt, layer)) for layer in states.layers),
            () if ids is None else (Clear("the manifest", token_ids=tuple(ids[prompt])),),
        )
        for prompt, length in enumerate(states.lengths)
    )
    by = f" by {shown(states.model['name'])}" if states.model else ""
    withheld = ids is None and states.prompts
    notes = (
        ("Token ids are withheld, but the manifest says where the prompts came from.",) if withheld else ()
    )
    return Holding(
        (path,), "preimage bundle", f"A bundle of states{by}, known by its manifest.", pieces, notes
    )
