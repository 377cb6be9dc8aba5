"""A step of the training, as the script sees it.

Law: it is its number. Inside `with step:` it may be broken off, and is then begun again in the next world; the script
has nothing to undo as long as it changes its state behind the last collective only.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from forged.worker.errors import StepAborted


class Step(int):
    """The number of a step; a context manager that lets it be broken off."""

    _entered: Callable[[], None]

    @classmethod
    def numbered(cls, number: int, entered: Callable[[], None]) -> Self:
        """`entered` is called when the script says that it can be broken off."""
        step = cls(number)
        step._entered = entered
        return step

    def __enter__(self) -> Self:
        self._entered()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, StepAborted)
