"""Layers as text and numbers: what is written is read again, and what is no layer is refused."""

from hypothesis import assume, given
from hypothesis import strategies as st

from preimage.errors import LayerError
from preimage.layers import Layer, parse_layer, parse_layers
from support.refusing import refused

DEPTH = 12
layers: st.SearchStrategy[Layer] = st.integers(0, DEPTH) | st.just("final")


def in_order(chosen: list[Layer]) -> tuple[Layer, ...]:
    return tuple(layer for layer in (*range(DEPTH + 1), "final") if layer in chosen)


@given(chosen=st.lists(layers, min_size=1, max_size=8), blanks=st.sampled_from(["", " ", "  "]))
def test_what_is_written_is_read_again(chosen: list[Layer], blanks: str) -> None:
    expected = in_order(chosen)
    assert parse_layers(chosen, DEPTH) == expected
    assert parse_layers(f"{blanks},{blanks}".join(map(str, chosen)), DEPTH) == expected
    assert parse_layers(expected, DEPTH) == expected
    for layer in expected:
        assert parse_layer(layer, DEPTH) == parse_layer(str(layer), DEPTH) == layer
    if len(expected) > 1:
        error = refused(LayerError, lambda: parse_layer(",".join(map(str, expected)), DEPTH))
        assert f"names {len(expected)}" in error.message


@given(first=st.integers(0, DEPTH), last=st.integers(0, DEPTH), depth=st.integers(DEPTH, 99))
def test_a_range_has_both_its_ends(first: int, last: int, depth: int) -> None:
    low, high = sorted((first, last))
    assert parse_layers(f"{low}-{high}", depth) == tuple(range(low, high + 1))
    assert parse_layers(f"final,{low}-{high}", depth) == (*range(low, high + 1), "final")
    assert parse_layers("all", depth) == (*range(depth + 1), "final")
    if low < high:
        refused(LayerError, lambda: parse_layers(f"{high}-{low}", depth))


@given(
    given=st.integers(max_value=-1) | st.integers(DEPTH + 1) | st.floats() | st.booleans() | st.none(),
    others=st.lists(layers, max_size=3),
)
def test_numbers_that_are_no_layers_are_refused(given: object, others: list[Layer]) -> None:
    for spec in (given, [*others, given]):
        error = refused(LayerError, lambda spec=spec: parse_layers(spec, DEPTH))  # type: ignore[misc]
        assert error.hint == f'This model has layers 0..{DEPTH} and "final".'


@given(text=st.text(max_size=12))
def test_other_text_is_refused(text: str) -> None:
    words = [word.strip() for part in text.split(",") for word in part.split("-")]
    assume(not all(word.isdecimal() or word in ("all", "final") for word in words))
    refused(LayerError, lambda: parse_layers(text, DEPTH))
