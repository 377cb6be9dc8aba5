"""How far a job is, by what its workers say of themselves.

Law: a step is committed by all of a world or by nobody, so a second worker can tell of it, too. What one alone says is
not believed: its library may be out of its mind. Who is alone in its world has no other witness.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Witnesses:
    """What the members of a world have said."""

    _furthest: str = ""
    """Who says that most is committed."""
    _step: int = 0

    def hear(self, worker: str, step: int, world: int) -> int:
        """Take a worker's word in a world of that size; returns how many steps it bears out to be committed."""
        if world <= 1:
            return step
        before, others = self._step, self._furthest not in ("", worker)
        if step > before:
            self._furthest, self._step = worker, step
        return min(step, before) if others else 0

    def begin_anew(self) -> None:
        """Another world holds."""
        self._furthest, self._step = "", 0
