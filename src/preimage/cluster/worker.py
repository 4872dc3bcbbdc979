"""What runs on a cluster: one worker, which makes a job from what it is told and does its pieces.

All that a worker gets and gives is text (json) and bytes (safetensors): nothing of ours is pickled.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from preimage.errors import PreimageError, first_line
from preimage.storage import Errand
from preimage.storage.shelf import Shelf

DONE, REFUSED, FAILED = "done", "refused", "failed"
_PACKAGES = ("preimage", "torch", "transformers")
_KEPT_JOBS = 2  # made ready at once: the one under way and the one before it


class Answer(NamedTuple):
    """What came of a group of pieces.

    ``kind``: done, refused (by us, for good) or failed (in any other way); ``content``: json of what is kept
    of each piece, or of the error.
    """

    kind: str
    content: bytes
    seconds: float
    peak_bytes: int  # of the worker, so far


class Job(Protocol):
    """Work of which a worker does pieces; its class has ``made(spec, attached, shelf)``."""

    def do(self, keys: Sequence[str], inputs: bytes) -> Sequence[Any]:
        """Some pieces together: what is to be kept of each."""


class Worker:
    """One process with its own model. A job is made when its first piece comes, and kept for the others."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._jobs: dict[str, Job] = {}

    def hello(self) -> str:
        """Have everything imported that jobs need; who this is, as json."""
        import torch

        importlib.import_module("preimage.inversion.inverting")
        torch.set_num_threads(self._threads)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return json.dumps({"facts": facts(), "pid": os.getpid(), "device": kind})

    def do(self, digest: str, told: bytes, shelf: Shelf, keys: Sequence[str], inputs: bytes) -> Answer:
        """Some pieces of the job of this digest, which is made of ``told`` if it is new."""
        began = time.perf_counter()
        try:
            if digest not in self._jobs:
                while len(self._jobs) >= _KEPT_JOBS:
                    del self._jobs[next(iter(self._jobs))]
                self._jobs[digest] = _make(told, shelf)
            kind, content = DONE, json.dumps(list(self._jobs[digest].do(keys, inputs))).encode()
        except PreimageError as error:
            kind, content = REFUSED, json.dumps({"type": type(error).__name__, **error.to_dict()}).encode()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {first_line(error)} ({where.name}, line {where.lineno})"
            kind, content = FAILED, said.encode(errors="replace")
        return Answer(kind, content, time.perf_counter() - began, peak_bytes())


def facts() -> dict[str, str | None]:
    """What must be the same wherever one run is worked at."""
    from importlib import metadata

    import torch

    found: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:2]))}
    found["threads"] = str(torch.get_num_threads())  # the last bits of a product may depend on it
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def peak_bytes() -> int:
    """The most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def packed(errand: Errand) -> tuple[str, bytes]:
    """An errand as workers are told of it, and the name it has there."""
    spec = json.dumps({"job": errand.job, "spec": errand.spec}).encode()
    told = len(spec).to_bytes(8, "little") + spec + errand.attached
    return hashlib.sha256(told).hexdigest(), told


def _make(told: bytes, shelf: Shelf) -> Job:
    """The job of an errand: one of preimage's own classes, by its name."""
    end = 8 + int.from_bytes(told[:8], "little")
    said = json.loads(told[8:end])
    module, _, name = str(said["job"]).partition(":")
    if not module.startswith("preimage."):
        raise ValueError(f"{module} is none of preimage's modules")
    made: Job = getattr(importlib.import_module(module), name).made(said["spec"], bytes(told[end:]), shelf)
    return made
