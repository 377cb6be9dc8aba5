"""Why a worker goes, in the words that the daemon keeps.

Law: whoever fails says so, and what it failed of. Whoever is interrupted, exits or breaks out of its loop has not
failed, and neither has the worker of a job that is over. What a worker says first of its going is said, though it be
interrupted in that; but whoever interrupts it waits for that no longer than for any goodbye.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import anyio

from forged.errors import describe
from forged.worker.errors import JobEnded, WorkerEvicted


class LeaveReason(NamedTuple):
    """What a worker says when it goes."""

    reason: str
    failed: bool = False
    done: bool = False
    """Whether it goes because the training is done."""


class Say(Protocol):
    """Says a farewell; in a moment only where `is_again`."""

    async def __call__(self, last: LeaveReason, /, *, is_again: bool) -> None: ...


class Goodbye:
    """Says one farewell, with `say`, until that has come to its end once; `is_again` where it was interrupted."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._words: LeaveReason | None = None
        self._was_tried = self._is_said = False
        self._turn = anyio.Lock()

    @property
    def is_begun(self) -> bool:
        """Whether the worker goes."""
        return self._words is not None

    async def say(self, words: LeaveReason) -> None:
        """Say it, or what could not be said to its end before."""
        words = self._words = self._words or words
        async with self._turn:
            if not self._is_said:
                is_again, self._was_tried = self._was_tried, True
                await self._say(words, is_again=is_again)
                self._is_said = True


def farewell(error: BaseException | None) -> LeaveReason:
    """What follows from how its script has ended; None: with nothing that was raised."""
    match error:
        case None:
            return LeaveReason("it left its loop")
        case JobEnded(code="job_removed"):
            return LeaveReason("the job was removed")
        case JobEnded():
            return LeaveReason("the job was aborted")
        case WorkerEvicted():
            return LeaveReason("it counts as dead")
        case SystemExit():
            return LeaveReason(f"its script exited with {_exit_code(error)}")
        case Exception():
            return LeaveReason(f"its script failed: {_in_one_line(error)}", failed=True)
        case _:
            return LeaveReason("it was interrupted")


def _exit_code(error: SystemExit) -> str:
    """What its process ends with, as Python has it: anything but a number is shown, and counts as 1."""
    if error.code is None:
        return "0"
    said = _in_one_line(error).removeprefix(f"{type(error).__name__}: ")
    return said if isinstance(error.code, int) else f"1: {said}"


def _in_one_line(error: BaseException) -> str:
    return " ".join(describe(error).split())
