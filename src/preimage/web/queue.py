"""Jobs: one at a time, so many waiting, each with an end and a way to end it sooner."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from preimage.errors import PreimageError, clip
from preimage.markup import plainly
from preimage.web.guard import RequestError

log = logging.getLogger(__name__)

State: TypeAlias = Literal["waiting", "running", "done", "failed", "cancelled"]
_KEPT = 32  # jobs that are over
_MOST_EVENTS = 20_000
_OURS = "The server met an error of its own."
_HINT = "What it was is in the terminal where preimage serve runs."


class Stopped(BaseException):  # a signal; no `except Exception` may take it for an error
    """Raised inside a job that is to end now; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Job:
    """One job: what is asked, how far it is, and everything it has said so far."""

    def __init__(self, kind: str, asked: Any, seconds: float, unwatched: float) -> None:
        self.id, self.kind, self.asked = secrets.token_urlsafe(9), kind, asked
        self.state: State = "waiting"
        self._events: list[dict[str, Any]] = []
        self._seconds, self._unwatched = seconds, unwatched
        self._cancelled = threading.Event()
        self._until = float("inf")
        self._looked = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, one way or another."""
        return self.state not in ("waiting", "running")

    def since(self, count: int) -> tuple[list[dict[str, Any]], bool]:
        """What was said after so many events, and whether that is all there will be; who asks looks on."""
        self._looked = time.monotonic()
        over = self.is_over  # first: what is said last is said before it is over
        return self._events[count:], over

    def tell(self, kind: str, **more: Any) -> None:
        """Say something to whoever looks on."""
        if len(self._events) < _MOST_EVENTS or kind in ("error", "end"):
            self._events.append({"type": kind, **more})

    def check(self) -> None:
        """Raise where the job is to end: cancelled, out of time, or watched by nobody."""
        now = time.monotonic()
        if self._cancelled.is_set():
            raise Stopped("Cancelled.")
        if now > self._until:
            raise Stopped(f"Stopped: a job has {self._seconds:g} seconds.")
        if now - self._looked > self._unwatched:
            raise Stopped("Stopped: nobody looks on any more.")

    def cancel(self) -> None:
        """End it, now or as soon as its pass is over."""
        self._cancelled.set()

    def run(self, work: Callable[[Job], None]) -> None:
        """Do the work; whatever comes of it ends in a word for the page."""
        state: State = "done"
        try:
            self.check()
            self.state, self._until = "running", time.monotonic() + self._seconds
            self.tell("state", state="running")
            work(self)
        except Stopped as stopped:
            state = "cancelled"
            self.tell("error", code="cancelled", message=stopped.reason, hint="")
        except PreimageError as error:
            state = "failed"
            self.tell("error", **told(error))
        except Exception:
            state = "failed"
            log.exception("a job of the page failed")
            self.tell("error", code="internal", message=_OURS, hint=_HINT)
        self.tell("end", state=state)
        self.state, self.asked = state, None


class JobQueue:
    """Jobs in the order they came, done by one thread."""

    def __init__(
        self,
        first: Callable[[], None],
        work: Mapping[str, Callable[[Job], None]],
        *,
        waiting: int,
        seconds: float,
        unwatched: float,
    ) -> None:
        """``first`` is done before any job; ``work`` says how each kind is done."""
        self._first, self._work, self._most = first, work, waiting
        self._times = seconds, unwatched
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._left: deque[Job] = deque()
        self._changed = threading.Condition()
        self.closed = False
        self._thread = threading.Thread(target=self._run, name="preimage-jobs", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def add(self, kind: str, asked: Any) -> Job:
        """Put a job at the end of the queue, or refuse it where that is full."""
        with self._changed:
            if len(self._left) >= self._most or self.closed:
                raise RequestError(
                    f"{len(self._left)} jobs are waiting already.",
                    "Try again when one has ended.",
                    status=429,
                )
            job = Job(kind, asked, *self._times)
            self._jobs[job.id] = job
            self._left.append(job)
            over = [one.id for one in self._jobs.values() if one.is_over]
            for old in over[: max(0, len(over) - _KEPT)]:
                del self._jobs[old]
            self._changed.notify()
        return job

    def get(self, name: str) -> Job:
        """The job of this name."""
        job = self._jobs.get(name)
        if job is None:
            raise RequestError("There is no such job.", "It may be over for long.", status=404)
        return job

    def cancel(self, name: str) -> None:
        """End a job; one that waits leaves the queue at once."""
        job = self.get(name)
        job.cancel()
        with self._changed:
            waits = job in self._left
            if waits:
                self._left.remove(job)
        if waits:
            job.run(lambda _: None)  # which says that it was cancelled

    def before(self, job: Job) -> int:
        """How many jobs come before it."""
        with self._changed:
            running = any(one.state == "running" for one in self._jobs.values())
            return self._left.index(job) + running if job in self._left else 0

    def open(self) -> list[Job]:
        """Jobs that run or wait."""
        return [job for job in list(self._jobs.values()) if not job.is_over]

    def close(self) -> None:
        """Take no more jobs, and end those there are."""
        with self._changed:
            self.closed = True
            self._changed.notify()
        for job in self.open():
            self.cancel(job.id)

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end; whether it did."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._first()
        while True:
            with self._changed:
                while not self._left and not self.closed:
                    self._changed.wait()
                if self.closed:
                    return
                job = self._left.popleft()
            job.run(self._work[job.kind])


def told(error: PreimageError) -> dict[str, str]:
    """An error as the page has it: all of it text that can be seen."""
    return {name: plainly(clip(text, 600)) for name, text in error.to_dict().items()}
