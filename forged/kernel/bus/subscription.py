"""What a handler of facts asks for.

Law: the terms are fixed when a handler is registered. A built-in one is lossless; a plugin's is bounded in all it may
cost: how long it takes, how often it fails, how far it falls behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from forged.kernel.messages import Decision, Fact, Gap, Record

FactHandler = Callable[[Record], Awaitable[Decision[Any] | None] | Decision[Any] | None]


@dataclass(frozen=True, slots=True)
class Subscription:
    """Which facts, and under which terms.

    One that is `durable` may decide, and goes on after a restart where it was. One that is not `lossless` keeps at most
    `mailbox_max` facts waiting and hears of the others by `on_gap`. A handler over its `deadline_s` is cancelled;
    after `failures_max` failures in a row it is quarantined.
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
    def careful(self) -> bool:
        """Whether more has to be done for each fact than to hand it over."""
        plain = self.lossless and not self.durable
        return not plain or self.failures_max is not None or self.deadline_s is not None
