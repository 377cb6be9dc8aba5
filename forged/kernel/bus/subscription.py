"""The options under which a handler receives facts through a mailbox.

Built-in handlers are lossless. A plugin's handler has a deadline, a failure limit and a bounded mailbox.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from forged.kernel.messages import Decision, Fact, Gap, Record

FactHandler = Callable[[Record], Awaitable[Decision[Any] | None] | Decision[Any] | None]


@dataclass(frozen=True, slots=True)
class Subscription:
    """A handler, the fact types it receives (empty: all), and its limits.

    A `durable` handler may return decisions and continues at its stored position after a restart. A handler that is not
    `lossless` has at most `mailbox_max` facts waiting; `on_gap` is called with the dropped ones. A call that exceeds
    `deadline_s` is cancelled; after `failures_max` failures in a row the handler is quarantined.
    """

    name: str
    handler: FactHandler
    types: frozenset[type[Fact]]
    lossless: bool = True
    durable: bool = False
    deadline_s: float | None = None
    failures_max: int | None = None
    mailbox_max: int = 10_000
    on_gap: Callable[[Gap], None] | None = None

    @property
    def needs_checks(self) -> bool:
        """Whether the mailbox must do more per fact than call the handler."""
        plain = self.lossless and not self.durable
        return not plain or self.failures_max is not None or self.deadline_s is not None
