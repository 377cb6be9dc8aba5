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
    _is_void: Callable[[], bool]
    _was_aborted: bool | None

    @classmethod
    def numbered(cls, number: int, entered: Callable[[], None], is_void: Callable[[], bool]) -> Self:
        """`entered` is called when the script says that it can be broken off; `is_void` tells of the present step."""
        step = cls(number)
        step._entered, step._is_void, step._was_aborted = entered, is_void, None
        return step

    @property
    def aborted(self) -> bool:
        """Whether it was broken off, so that nothing of it counts: it is done again."""
        return self._is_void() if self._was_aborted is None else self._was_aborted

    def end(self) -> None:
        """The script is through with it, and may keep it; the present step is another from now on."""
        self._was_aborted = self.aborted

    def __enter__(self) -> Self:
        self._entered()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, StepAborted)
