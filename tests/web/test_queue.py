"""Jobs: one at a time, so many, each with an end; and nothing of an error but words (W6)."""

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from preimage.errors import StatesError
from preimage.web.guard import RequestError
from preimage.web.queue import Job, JobQueue

Made = Callable[..., JobQueue]


@pytest.fixture
def queue() -> Iterator[Made]:
    made: list[JobQueue] = []

    def make(work: Callable[[Job], None], **limits: float) -> JobQueue:
        known = {"waiting": 3, "seconds": 60.0, "unwatched": 60.0} | limits
        one = JobQueue(lambda: None, {"work": work}, **known)  # type: ignore[arg-type]
        made.append(one)
        one.start()
        return one

    yield make
    for one in made:
        one.close()
        assert one.join(20)


def ended(job: Job, seconds: float = 20.0) -> list[dict[str, object]]:
    until = time.monotonic() + seconds
    while not job.is_over:
        assert time.monotonic() < until, "the job goes on"
        time.sleep(0.005)
    return job.since(0)[0]


def until_told(job: Job) -> None:
    while True:
        job.check()
        time.sleep(0.002)


def test_one_runs_at_a_time_and_in_order(queue: Made) -> None:
    order: list[tuple[str, str]] = []

    def work(job: Job) -> None:
        order.append(("begin", job.id))
        time.sleep(0.02)
        order.append(("end", job.id))

    line = queue(work)
    jobs = [line.add("work", None) for _ in range(3)]
    for job in jobs:
        ended(job)
    assert order == [(what, job.id) for job in jobs for what in ("begin", "end")]
    assert len({job.id for job in jobs}) == 3


def test_a_full_queue_refuses(queue: Made) -> None:  # W6
    going = threading.Event()

    def work(job: Job) -> None:
        going.set()
        until_told(job)

    line = queue(work)
    first = line.add("work", None)
    assert going.wait(20)
    waiting = [line.add("work", None) for _ in range(3)]
    with pytest.raises(RequestError) as refused:
        line.add("work", None)
    assert refused.value.status == 429
    assert [line.before(job) for job in waiting] == [1, 2, 3]
    line.cancel(waiting[0].id)
    assert ended(waiting[0])[-1] == {"type": "end", "state": "cancelled"}
    assert [line.before(job) for job in waiting[1:]] == [1, 2]
    line.add("work", None)
    line.cancel(first.id)
    assert ended(first)[-1]["state"] == "cancelled"


def test_a_job_ends_with_its_time(queue: Made) -> None:  # W6
    events = ended(queue(until_told, seconds=0.1).add("work", None))
    assert events[-2]["message"] == "Stopped: a job has 0.1 seconds."


def test_a_job_that_nobody_looks_at_ends(queue: Made) -> None:
    job = queue(until_told, unwatched=0.2).add("work", None)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        job.since(0)
        time.sleep(0.01)
    assert job.state == "running"
    time.sleep(1)
    assert ended(job)[-2]["message"] == "Stopped: nobody looks on any more."


def test_errors_are_words_and_those_nobody_expects_are_not_told(
    queue: Made, caplog: pytest.LogCaptureFixture
) -> None:  # W6
    def refuse(job: Job) -> None:
        raise StatesError("Not \x1b[31m this \u202e<b>.", "Another.")

    events = ended(queue(refuse).add("work", None))
    assert events[-2] == {
        "type": "error", "code": "bad_states", "message": "Not ␛[31m this \\u202e<b>.", "hint": "Another."
    }  # fmt: skip

    def fail(job: Job) -> None:
        secret = "/home/somebody/secret"
        raise RuntimeError(secret)

    with caplog.at_level(logging.ERROR):
        told = str(ended(queue(fail).add("work", None)))
    assert "internal" in told
    assert "secret" not in told
    assert "Traceback" not in told
    assert "secret" in caplog.text


def test_after_an_error_the_next_job_runs(queue: Made) -> None:
    def work(job: Job) -> None:
        if job.asked == "fail":
            raise ValueError("no")
        job.tell("fine")

    line = queue(work)
    first, second = line.add("work", "fail"), line.add("work", "go")
    assert ended(first)[-1]["state"] == "failed"
    assert [event["type"] for event in ended(second)] == ["state", "fine", "end"]


def test_what_is_over_for_long_is_forgotten(queue: Made) -> None:
    line = queue(lambda job: None)
    jobs = []
    for _ in range(40):
        jobs.append(line.add("work", "prompt"))
        ended(jobs[-1])
    assert jobs[-1].asked is None, "what was asked is not kept"
    assert line.get(jobs[-1].id) is jobs[-1]
    with pytest.raises(RequestError) as gone:
        line.get(jobs[0].id)
    assert gone.value.status == 404


def test_closed_it_takes_nothing_and_ends_what_runs(queue: Made) -> None:
    line = queue(until_told)
    jobs = [line.add("work", None) for _ in range(3)]
    line.close()
    assert all(ended(job)[-1]["state"] == "cancelled" for job in jobs)
    with pytest.raises(RequestError):
        line.add("work", None)
