"""Bundles of any shape: what is saved is opened again, to the bit."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preimage.layers import Layer, parse_layers
from preimage.states import States, open_states
from preimage.states.layout import KeptPositions, Layout, group_by_length
from preimage.states.states import DTYPES, MemoryStore

DEPTH = 4


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """What states are made of; made outside, as the checks of their shapes use ``random``."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    chosen = draw(st.lists(st.integers(0, DEPTH) | st.just("final"), min_size=1, max_size=3))
    layers = parse_layers(chosen, DEPTH)
    ids = [draw(st.lists(st.integers(0, 2**31), min_size=n, max_size=n)) for n in lengths]
    identity = {"name": draw(st.text(max_size=8)), "weight_hash": "0" * 64, "dtype": "float32"}
    floors = st.floats(0, 1, exclude_max=True)
    return {
        "lengths": lengths,
        "layers": layers,
        "positions": draw(st.sampled_from(["all", "last"])),
        "width": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 2**31)),
        "token_ids": draw(st.sampled_from([None, ids])),
        "model": draw(st.sampled_from([None, identity])),
        "noise_floor": {layer: draw(floors) for layer in layers if draw(st.booleans())},
        "dtype": DTYPES[draw(st.sampled_from(sorted(DTYPES)))],
    }


def made(
    lengths: list[int],
    layers: tuple[Layer, ...],
    positions: KeptPositions,
    width: int,
    seed: int,
    **given: Any,
) -> States:
    """Random bits, NaN and infinity included, for prompts of mixed length."""
    layout = Layout(group_by_length(lengths), layers, positions, width)
    generator = torch.Generator().manual_seed(seed)
    size = torch.finfo(given["dtype"]).bits // 8
    tensors = {}
    for name, shape in layout.names().items():
        raw = torch.randint(256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8)
        tensors[name] = raw.view(given["dtype"])
    return States(layout, MemoryStore(tensors), **given)


def bits_of(states: States) -> dict[str, bytes]:
    rows = {name: states.store.rows(name, 0, shape[0]) for name, shape in states.layout.names().items()}
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in rows.items()}


@settings(max_examples=40)
@given(recipe=recipes(), withheld=st.booleans())
def test_what_is_saved_is_opened_again(recipe: dict[str, Any], withheld: bool) -> None:
    states = made(**recipe)
    with tempfile.TemporaryDirectory() as folder:
        states.save(Path(folder) / "one", withhold_ids=withheld)
        opened = open_states(Path(folder) / "one")
        assert bits_of(opened) == bits_of(states)
        assert (opened.layout, opened.dtype) == (states.layout, states.dtype)
        assert opened.token_ids == (None if withheld else states.token_ids)
        assert (opened.model, opened.noise_floor) == (states.model, states.noise_floor)
        assert opened.lengths == states.lengths
        opened.save(Path(folder) / "two")  # and a copy of it is the same
        again = [Path(folder) / name / "states.safetensors" for name in ("one", "two")]
        assert again[0].read_bytes() == again[1].read_bytes()
