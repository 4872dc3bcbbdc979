"""Who looks on while a prompt is inverted: what is told, and that work ends where it is told to."""

from collections.abc import Sequence

import pytest

import preimage
from preimage.progress import Watch, watched_by
from support.tiny import random_ids, tiny


class _Enough(BaseException):
    pass


class Onlooker:
    def __init__(self, most: int = 10**9) -> None:
        self.passes, self.blocks, self.told, self._most = 0, 0, list[tuple[list[int], int]](), most

    def passing(self) -> None:
        self.passes += 1
        if self.passes > self._most:
            raise _Enough

    def between(self) -> None:
        self.blocks += 1

    def settled(self, ids: Sequence[int], count: int) -> None:
        self.told.append((list(ids), count))

    @property
    def watch(self) -> Watch:
        return Watch(self.passing, self.between, self.settled)


@pytest.mark.parametrize("method", ["fast", "sipit", "brute-force"])
def test_what_is_settled_is_told_up_to_the_whole_prompt(method: str) -> None:
    model, ids = tiny("llama"), random_ids(6)
    states = preimage.capture(model, [ids], [2])
    onlooker = Onlooker()
    with watched_by(onlooker.watch):
        (found,) = preimage.invert(model, states, 2, method=method)
    assert found.status == "recovered"
    assert onlooker.told[-1][0][:6] == ids
    assert max(count for _, count in onlooker.told) == 6
    assert all(told[:count] == ids[:count] for told, count in onlooker.told), "settled tokens are right ones"
    assert onlooker.told[0][1] == 0, "first what is proposed, before any of it is verified"
    assert onlooker.blocks >= onlooker.passes, "every pass runs a block at least"
    assert onlooker.passes >= len({count for _, count in onlooker.told}) - 1


def test_a_reading_of_noisy_states_is_told_position_by_position() -> None:
    model, ids = tiny("llama"), random_ids(12)
    states = preimage.capture(model, [ids], [1])
    from preimage.leak import Exposure

    (noisy,), _ = Exposure.parse("noise:5").of([states.at(0, 1)], 0)
    onlooker = Onlooker()
    with watched_by(onlooker.watch):
        (found,) = preimage.invert(model, preimage.states_from(noisy, model, 1))
    assert found.status != "recovered"
    counts = {count for _, count in onlooker.told}
    assert counts >= set(range(2, 13))


@pytest.mark.parametrize("most", [0, 1, 5])
@pytest.mark.parametrize("method", ["fast", "sipit"])
def test_what_an_onlooker_raises_ends_the_work_there_and_nothing_is_left_behind(
    method: str, most: int
) -> None:
    model, ids = tiny("gpt2"), random_ids(8)
    states = preimage.capture(model, [ids], [3])
    onlooker = Onlooker(most)
    with pytest.raises(_Enough), watched_by(onlooker.watch):
        preimage.invert(model, states, 3, method=method, proposers="prior" if method == "fast" else None)
    assert onlooker.passes == most + 1
    (again,) = preimage.invert(model, states, 3)
    assert onlooker.passes == most + 1, "nobody looks on any more"
    assert list(again.token_ids) == ids


def test_a_pass_can_be_ended_between_two_blocks() -> None:
    model, ids = tiny("llama"), random_ids(5)

    class Ends(Onlooker):
        def between(self) -> None:
            super().between()
            if self.blocks == 2:
                raise _Enough

    onlooker, ran = Ends(), list[int]()
    handles = [
        block.register_forward_hook(lambda *_, n=number: ran.append(n))
        for number, block in enumerate(model.anatomy.blocks)
    ]
    try:
        with pytest.raises(_Enough), watched_by(onlooker.watch):
            preimage.capture(model, [ids], "final")
    finally:
        for handle in handles:
            handle.remove()
    assert ran == [0]
    assert len(preimage.capture(model, [ids], "final").at(0, "final")) == 5
