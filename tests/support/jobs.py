"""Jobs that keep their work in a folder: small ones of every kind, what they leave, a kill -9 at any step."""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import preimage
from preimage.geometry.sweeping import measure_model
from preimage.models import LanguageModel
from preimage.prompts import PromptSet
from preimage.states import States, bundle
from preimage.storage import Run
from support.run_folders import lines_of
from support.tiny import random_ids, tiny

batches = importlib.import_module("preimage.states.batches")

PROMPTS = [random_ids(length, seed) for seed, length in enumerate((5, 2, 5, 1, 9, 2))]
PREFIXES = [[3], random_ids(4, 1), [7] * 3]
Ids = list[list[int]]
_SECONDS = 240.0  # a child that takes longer hangs
_MEASURED = re.compile(rb'"(setup_)?seconds": [-+.e\d]+|"sha256": "[0-9a-f]+"')  # a checksum is of times, too


def capture(out: Path, model: LanguageModel | None = None, prompts: Ids = PROMPTS, **more: Any) -> object:
    """A bundle; every prompt is a piece of its own."""
    before, batches._KEPT_TOKENS = batches._KEPT_TOKENS, 1
    try:
        return preimage.capture(model or tiny("llama"), prompts, out=out, **more)
    finally:
        batches._KEPT_TOKENS = before


def collisions(out: Path, model: LanguageModel | None = None, prompts: Ids = PROMPTS) -> object:
    """All pairs at five layers."""
    return preimage.find_collisions(model or tiny("llama"), prompts, hard_bases=1, closest=3, out=out)


def continuations(out: Path, model: LanguageModel | None = None, prompts: Ids = PREFIXES) -> object:
    """Every token after three prefixes."""
    return preimage.scan_continuations(model or tiny("llama"), prompts, 2, closest=3, out=out)


def geometry(out: Path, model: LanguageModel | None = None, prompts: Ids = PROMPTS) -> object:
    """Five layers in two precisions, captured first."""
    options = preimage.GeometryOptions(bits=(None, 4), subsets=2)
    ids = PromptSet(tuple(map(tuple, prompts)), "list", 0, 0)
    return measure_model(model or tiny("llama"), ids, options=options, out=out)


def invert(out: Path, model: LanguageModel | None = None, prompts: Ids = PROMPTS) -> object:
    """Six prompts, each from its states at one layer."""
    model = model or tiny("llama")
    states = preimage.capture(model, prompts, 2)
    return preimage.invert(model, states, method="brute-force", out=out)


Job = Callable[..., Any]
JOBS: dict[str, Job] = {job.__name__: job for job in (capture, collisions, continuations, geometry, invert)}
PIECES = {"capture": 6, "collisions": 5, "continuations": 3, "geometry": 5, "invert": 6}


def left_by(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, but for who made it, how long that took, and what nobody reads any more.

    A process that is killed may leave a file with a temporary name, or the list of pieces of a capture whose
    manifest is there already.
    """
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    kept = [path for path in files if path.name != "record.jsonl" and path.suffix != ".partial"]
    kept = [path for path in kept if "capture" not in path.parts]
    return {str(path): _MEASURED.sub(b"", (folder / path).read_bytes()) for path in kept}


def outcome(result: Any) -> Any:
    """What a job returned, but for how long it took."""
    if isinstance(result, States):
        at = [(prompt, layer) for prompt in range(len(result)) for layer in result.layers]
        numbers = [result.at(*place).tolist() for place in at]
        return result.token_ids, result.model, result.noise_floor, result.lengths, result.layers, numbers
    results = result if isinstance(result, list) else [result]
    return [_MEASURED.sub(b"", json.dumps(one.to_dict()).encode()) for one in results]


def finished_pieces(out: Path) -> list[bytes]:
    """The lines of every finished piece, of a capture that is under way too."""
    return lines_of(out / "capture") or lines_of(out)


def keys_of(lines: list[bytes]) -> list[str]:
    return [json.loads(line)["key"] for line in lines]


# --- kill -9 ----------------------------------------------------------------------------------


class Steps(NamedTuple):
    """Calls that a process made, Python's and C's: when it had its folder, began to finish, and ended."""

    opened: int
    finishing: int
    ended: int
    written: int  # times it opened a file to write, renamed or removed one
    passed: int  # tokens that went through the model


def steps_of(job: Job, out: Path) -> Steps:
    """How many steps a job makes that nobody disturbs, in a fork of this process."""
    status, said = in_fork(lambda: _stepping(job, out, {}))
    assert status == 0, said
    return Steps(*map(int, said.split()))


def kill_at(job: Job, out: Path, **moment: int) -> bool:
    """Whether a job, begun in a fork of this process, was ended by SIGKILL at one of its steps.

    The moment: ``call``, ``write`` (the n-th time it opens a file to write, renames or removes one) or
    ``piece`` (once so many are finished).
    """
    status, said = in_fork(lambda: _stepping(job, out, moment))
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, said
    return killed


def in_fork(work: Callable[[], str]) -> tuple[int, str]:
    """The exit status of a fork of this process that does some work, and what it says at its end.

    It shares what was computed already, and nothing later. There is one thread of torch and no parallel
    tokenizer, so that a fork loses no thread that it needs. Nothing here may hold the lock of a folder, as
    the fork would have it too.
    """
    return end_fork(*begin_fork(work))


def begin_fork(work: Callable[[], str]) -> tuple[int, int]:
    """The process id of a fork that has begun to work, and the pipe through which it speaks."""
    gc.collect()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _never_return(work, writing)
    os.close(writing)
    return child, reading


def end_fork(child: int, reading: int) -> tuple[int, str]:
    """The same as :func:`in_fork`, of a fork that has begun."""
    limit = time.monotonic() + _SECONDS
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert time.monotonic() < limit, f"a fork took more than {_SECONDS} s"
    return status, said


def _never_return(work: Callable[[], str], pipe: int) -> None:
    try:
        gc.disable()  # which makes calls of its own, now and then
        os.write(pipe, work().encode())
        os._exit(0)
    except BaseException:
        os.write(pipe, traceback.format_exc()[-4000:].encode())
    os._exit(1)


def _stepping(job: Job, out: Path, moment: dict[str, int]) -> str:
    """Do the job and count its steps; die at one of them."""
    made = {"call": 0, "write": 0, "piece": 0}
    opened = finishing = 0
    beginning, ending = Run._open.__code__, (Run.finish.__code__, bundle.finish_bundle.__code__)
    pieces = Run.keep

    def one_more(kind: str) -> None:
        made[kind] += 1
        if made[kind] == moment.get(kind):
            os.kill(os.getpid(), signal.SIGKILL)

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal opened, finishing
        if event in ("call", "c_call"):
            one_more("call")
        if event == "call" and frame.f_code is beginning:
            opened = opened or made["call"]
        if event == "call" and frame.f_code in ending:
            finishing = made["call"]

    def audit(event: str, given: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate") or (
            event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            one_more("write")

    def keep(run: Run, *given: Any) -> None:
        pieces(run, *given)
        if run.path in (out, out / "capture"):
            one_more("piece")

    before = tiny("llama").forward_tokens
    Run.keep = keep  # type: ignore[method-assign]  # of this process alone
    sys.addaudithook(audit)
    if "write" not in moment and "piece" not in moment:
        sys.setprofile(look)
    job(out)
    sys.setprofile(None)
    return f"{opened} {finishing} {made['call']} {made['write']} {tiny('llama').forward_tokens - before}"
