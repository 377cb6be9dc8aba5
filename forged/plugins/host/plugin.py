"""The state of one plugin.

Invariants:
- Failures are counted per part; a success resets the part's count.
- Too many failures in a row of one part, or too many failures of all parts in a minute, deactivate the whole plugin.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import anyio

from forged.errors import Problem
from forged.kernel.bus.follower import Follower
from forged.kernel.bus.mailbox import Mailbox
from forged.plugins.context import Command
from forged.plugins.host.call_limits import CallLimit
from forged.plugins.model import CommandView, PluginState, PluginView
from forged.rate_limit import TokenBucket

RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class PluginLimits:
    """The limits of each plugin."""

    failures_max: int = 5
    """Failures in a row of one part."""
    facts_per_s_max: float = 200.0
    block_max_s: float = 2.0
    """How long plugin code may block the event loop."""
    load_timeout_s: float = 10.0


@dataclass(eq=False, slots=True)
class Plugin:
    """One plugin: its parts, state and counters."""

    name: str
    version: str
    origin: str
    fact_limit: TokenBucket
    state: PluginState = PluginState.ACTIVE
    reason: str | None = None
    loaded: bool = False
    """Whether its parts are registered, so that it can be enabled."""
    problems: tuple[Problem, ...] = ()
    """The problems of its settings, if it was refused for them."""
    handled: int = 0
    failed: int = 0
    published: int = 0
    parts: list[str] = field(default_factory=list)
    commands: dict[str, Command] = field(default_factory=dict)
    mailboxes: list[Mailbox] = field(default_factory=list)
    followers: list[Follower] = field(default_factory=list)
    turns: dict[CallLimit, None] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)
    _failed_at: deque[float] = field(default_factory=deque)
    _enabled: anyio.Event = field(default_factory=anyio.Event)

    @property
    def active(self) -> bool:
        return self.state is PluginState.ACTIVE

    def part(self, name: str, text: str) -> str:
        """Record a part; returns its full name."""
        self.parts.append(text)
        return f"{self.name}/{name}"

    def succeeded(self, part: str) -> None:
        """Count a success and reset the part's failures."""
        self.handled += 1
        self.reset_failures(part)

    def reset_failures(self, part: str) -> None:
        if self._failures:
            self._failures.pop(part, None)

    def record_failure(self, part: str, reason: str, now: float) -> int:
        """Count a failure; returns the failures in a row, or half of the last minute's failures if that is more."""
        self.failed += 1
        if self.active:
            self.reason = f"{part}: {reason}"
        self._failures[part] = self._failures.get(part, 0) + 1
        self._failed_at.append(now)
        while now - self._failed_at[0] > RECENT_S:
            self._failed_at.popleft()
        return max(self._failures[part], len(self._failed_at) // 2)

    def deactivate(self, state: PluginState, reason: str) -> None:
        """Stop its handlers and cancel its running calls."""
        self.state, self.reason = state, reason
        for mailbox in self.mailboxes:
            mailbox.quarantine()
        for follower in self.followers:
            follower.pause()
        for limit in self.turns:
            limit.stop()

    def activate(self) -> None:
        """Resume its handlers and reset its failures."""
        self.state, self.reason = PluginState.ACTIVE, None
        self._failures.clear()
        self._failed_at.clear()
        for mailbox in self.mailboxes:
            mailbox.readmit()
        for follower in self.followers:
            follower.resume()
        self._enabled.set()
        self._enabled = anyio.Event()

    async def wait_until_active(self) -> None:
        while not self.active:
            await self._enabled.wait()

    @property
    def view(self) -> PluginView:
        return PluginView(
            name=self.name,
            version=self.version,
            origin=self.origin,
            state=self.state,
            reason=self.reason or self._waiting_for,
            parts=self.parts,
            commands=[CommandView(command.name, command.help) for command in self.commands.values()],
            handled=self.handled,
            failed=self.failed,
            published=self.published,
        )

    @property
    def _waiting_for(self) -> str | None:
        return next((follower.waiting_for for follower in self.followers if follower.waiting_for), None)
