"""One plugin, as the daemon keeps it.

Law: a plugin fails by its parts and is given up as a whole. A part that succeeds is forgiven what it failed before; a
part that fails too many times in a row takes the plugin with it, so that half of it never goes on alone; and so does
one that fails again and again in between successes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import anyio

from forged.errors import Problem
from forged.kernel.bus.follower import Follower
from forged.kernel.bus.mailbox import Mailbox
from forged.plugins.context import Command
from forged.plugins.host.call_limits import Turn
from forged.plugins.model import CommandView, PluginState, PluginView
from forged.token_bucket import TokenBucket

RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class PluginLimits:
    """What each plugin may cost."""

    failures_max: int = 5
    """In a row, by one of its parts."""
    facts_per_s_max: float = 200.0
    block_max_s: float = 2.0
    """How long it may keep the loop to itself."""
    load_timeout_s: float = 10.0


@dataclass(eq=False, slots=True)
class Plugin:
    """What was taken in of a plugin, and how it fares."""

    name: str
    version: str
    origin: str
    allowance: TokenBucket
    state: PluginState = PluginState.ACTIVE
    reason: str | None = None
    loaded: bool = False
    """Whether there is anything of it to take part."""
    problems: tuple[Problem, ...] = ()
    """What is wrong with its settings, where it was refused for that."""
    handled: int = 0
    failed: int = 0
    published: int = 0
    parts: list[str] = field(default_factory=list)
    commands: dict[str, Command] = field(default_factory=dict)
    mailboxes: list[Mailbox] = field(default_factory=list)
    followers: list[Follower] = field(default_factory=list)
    turns: dict[Turn, None] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)
    _failed_at: deque[float] = field(default_factory=deque)
    _enabled: anyio.Event = field(default_factory=anyio.Event)

    @property
    def active(self) -> bool:
        return self.state is PluginState.ACTIVE

    def part(self, name: str, text: str) -> str:
        """Note a part of it; returns what the part goes by."""
        self.parts.append(text)
        return f"{self.name}/{name}"

    def succeeded(self, part: str) -> None:
        """Count what it did, and forgive the part what it failed before."""
        self.handled += 1
        self.forgive(part)

    def forgive(self, part: str) -> None:
        """What it failed before counts no more."""
        if self._failures:
            self._failures.pop(part, None)

    def fell_short(self, part: str, reason: str, now: float) -> int:
        """Count a failure; returns how many there were in a row, or half of the last minute's if those are more."""
        self.failed += 1
        if self.active:
            self.reason = f"{part}: {reason}"
        self._failures[part] = self._failures.get(part, 0) + 1
        self._failed_at.append(now)
        while now - self._failed_at[0] > RECENT_S:
            self._failed_at.popleft()
        return max(self._failures[part], len(self._failed_at) // 2)

    def leave_out(self, state: PluginState, reason: str) -> None:
        """Give it nothing more to do."""
        self.state, self.reason = state, reason
        for mailbox in self.mailboxes:
            mailbox.quarantine()
        for follower in self.followers:
            follower.pause()
        for turn in self.turns:
            turn.stop()

    def take_part(self) -> None:
        """Give it its work again, and a clean record."""
        self.state, self.reason = PluginState.ACTIVE, None
        self._failures.clear()
        self._failed_at.clear()
        for mailbox in self.mailboxes:
            mailbox.readmit()
        for follower in self.followers:
            follower.resume()
        self._enabled.set()
        self._enabled = anyio.Event()

    async def activity(self) -> None:
        """Wait until it takes part."""
        while not self.active:
            await self._enabled.wait()

    @property
    def view(self) -> PluginView:
        """It as it is shown."""
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
