"""Budgets: how many tests and how many seconds one prompt may cost."""

from __future__ import annotations

import time


class BudgetSpentError(Exception):
    """The budget of a prompt ran out; caught by the search, which keeps what it has."""


class Budget:
    """Counts verifier tests and watches the clock."""

    def __init__(self, max_tests: int, timeout: float | None) -> None:
        self.tests = 0
        self._max_tests = max_tests
        self._timeout = timeout
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._start

    @property
    def tests_left(self) -> int:
        """Tests that may still be made."""
        return self._max_tests - self.tests

    @property
    def over(self) -> bool:
        """Whether its time has passed."""
        return self._timeout is not None and self.seconds > self._timeout

    def at_most(self, seconds: float) -> Budget:
        """What is left of it, and no more than so many seconds."""
        left = seconds if self._timeout is None else min(seconds, self._timeout - self.seconds)
        return Budget(self.tests_left, left)

    def check(self, tests: int = 1) -> None:
        """Raise when so many tests, or any more time, may not be spent."""
        if self.tests_left < tests:
            raise BudgetSpentError(f"the budget of {self._max_tests} tests is spent")
        if self.over:
            raise BudgetSpentError(f"the time limit of {self._timeout:g} s has passed")
