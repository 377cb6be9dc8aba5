"""A request for blocks, and what it has got so far.

Invariants:
- Blocks that an attempt has got stay, also if the caller goes away: the same names get them again.
- With `all_or_none` an attempt has all of its blocks or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forged.errors import ForgedError
from forged.memory.messages import Allocated, AllocateMemory, Wanted

if TYPE_CHECKING:
    from forged.memory.book.device import Owner


@dataclass(eq=False, slots=True)
class Attempt:
    """A request for blocks that is being served, or waits."""

    request: AllocateMemory
    owner: Owner
    missing: list[Wanted]
    found: dict[str, Allocated] = field(default_factory=dict)
    error: ForgedError | None = None
    """Why it has ended without an answer: its device or worker is gone."""
    waits: bool = False
    """Whether it has been queued: it is tried again whenever its device changes."""
    wake: Callable[[], None] = lambda: None
    """Called when it has ended."""

    @property
    def is_done(self) -> bool:
        return not self.missing or self.error is not None

    @property
    def priority(self) -> int:
        """Of the most important block that is wanted."""
        return max(wanted.request.priority for wanted in self.request.wanted)

    def replies(self) -> list[Allocated]:
        """In the order of the request."""
        return [self.found[wanted.name] for wanted in self.request.wanted]
