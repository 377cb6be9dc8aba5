"""When a worker that was told to go may go.

Law: what only this worker has is kept for the others for as long as they come for it, and as long as there is a daemon
that has them come, but for a grace; then it goes all the same. Whether the state is such a thing, the daemon knows: it
is asked, asked again when the world may have changed since, and once more in the moment of going: who was to stay may
be dead by then. Nobody waits without end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import anyio
from anyio.abc import TaskGroup

from forged.elastic.config import ElasticTrainingConfig
from forged.errors import ForgedError
from forged.log import Log
from forged.worker.standing import Standing

LOOK_INTERVAL_S = 0.5
"""How often it is looked whether anybody comes."""
QUESTION_INTERVAL_S = 3.0
"""How often, about, the daemon is asked again by who has to stay: what changes that is nearly always told."""
ANSWER_S = 5.0
"""For how long a worker that wants to go has others wait for it until the daemon has answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ties:
    """What keeps a worker where it is."""

    holds_state: Callable[[], bool]
    """Whether it is in the world, with steps behind it."""
    holds_data: Callable[[], bool]
    """Whether others have yet to take over shards."""
    is_waited_for: Callable[[], bool]
    """Whether the others wait for it to end its step, so that nobody can come yet."""
    has_given: Callable[[], bool]
    """Whether anybody has taken something lately."""
    is_in_trouble: Callable[[], bool]
    """Whether its world was broken off, as the daemon has yet to hear."""
    has_daemon: Callable[[], bool]
    announce: Callable[[str], Awaitable[bool]]
    """Tells the daemon that it is to go, and why; returns whether it may as far as the state goes."""
    ask: Callable[[], Awaitable[bool]]
    """Asks whether it may by now."""


class Departure:
    """Waits for the moment."""

    def __init__(
        self, standing: Standing, ties: Ties, wake: Callable[[], None], random: Callable[[], float], log: Log
    ) -> None:
        self.is_overdue = False
        """Whether it waits for nobody any more."""
        self._may_go = False
        self._is_announced = False
        """Whether the daemon has it on record that this worker is to go."""
        self._changed = anyio.Event()
        self._answered = anyio.Event()
        self._unwanted_s = 0.0
        """For how long nobody has come who could."""
        self._why = ""
        self._is_begun = False
        self._standing = standing
        self._ties = ties
        self._wake = wake
        self._random = random
        self._log = log

    @property
    def is_due(self) -> bool:
        """Whether the worker is to go, and nobody is waited for."""
        return self._standing.draining is not None and (self.is_overdue or not self._is_needed())

    @property
    def reason(self) -> str:
        """Why it goes, and why it did not wait."""
        wish = self._standing.draining or ""
        return f"{wish}; {self._why}" if self._why and self._is_needed() else wish

    def _is_needed(self) -> bool:
        ties = self._ties
        may_go = self._may_go and not ties.is_in_trouble()
        return ties.holds_data() or (ties.holds_state() and not may_go)

    async def is_sure(self) -> bool:
        """Whether it is due still, in the moment of going.

        Where the daemon does not say so it stays for now: it waits for a daemon no longer than anybody does.
        """
        if self.is_due and not self.is_overdue and self._ties.holds_state():
            self._doubt()
            if self._ties.has_daemon():
                with anyio.move_on_after(ANSWER_S):
                    await self._answered.wait()
        return self.is_due

    def begin(self, settings: Callable[[], ElasticTrainingConfig], tasks: TaskGroup) -> None:
        """Prepare to go, if the worker was told to; by the settings at any time."""
        if self._standing.draining is not None and not self._is_begun:
            self._is_begun = True
            tasks.start_soon(self._ask_for_leave, self._standing.draining)
            tasks.start_soon(self._wait, settings)

    def reconsider(self) -> None:
        """The world changes: who was not needed may be, and somebody may come."""
        self._unwanted_s = 0.0
        self._doubt()

    def _doubt(self) -> None:
        """Ask again: the last answer counts no more."""
        self._may_go, self._answered = False, anyio.Event()
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _ask_for_leave(self, wish: str) -> None:
        """Have others come, and be told when nobody has to any more; for ever, because that changes."""
        question: Callable[[], Awaitable[bool]] = partial(self._ties.announce, wish)
        while True:
            changed = self._changed
            may_go = await self._answer_to(question)
            self._is_announced, question = True, self._ties.ask
            # What follows from it was decided with the answer, and is told before it.
            if not changed.is_set():
                self._may_go = may_go
                self._answered.set()
                self._wake()
                with anyio.move_on_after(None if may_go else self._pause_s()):
                    await changed.wait()

    async def _answer_to(self, question: Callable[[], Awaitable[bool]]) -> bool:
        try:
            return await question()
        except ForgedError as error:
            self._log.warning("the daemon does not say whether this worker may go", why=str(error))
            return True

    def _pause_s(self) -> float:
        """Not the same for all: many may have been told to go at once."""
        return QUESTION_INTERVAL_S * (0.5 + self._random())

    async def _wait(self, settings: Callable[[], ElasticTrainingConfig]) -> None:
        """Let the waiting have an end; who is here still when somebody comes after all waits for that one."""
        alone_s = 0.0
        while True:
            self._why = self._lack(alone_s, settings())
            if bool(self._why) != self.is_overdue:
                self._turn_overdue()
            await anyio.sleep(LOOK_INTERVAL_S)
            # A daemon that cannot write has nobody come either.
            alone_s = 0.0 if self._ties.has_daemon() and self._is_announced else alone_s + LOOK_INTERVAL_S
            is_wanted = self._ties.has_given() or self._ties.is_waited_for()
            self._unwanted_s = 0.0 if is_wanted else self._unwanted_s + LOOK_INTERVAL_S

    def _lack(self, alone_s: float, config: ElasticTrainingConfig) -> str:
        """What it has waited for in vain, for as long as it may; empty if for nothing."""
        if _lasts(alone_s, config.reconnect_grace_s):
            lack = "the daemon took nothing down" if self._ties.has_daemon() else "there was no daemon"
            return f"{lack} for {config.reconnect_grace_s:g} s"
        if _lasts(self._unwanted_s, config.leave_timeout_s):
            return f"nobody came for what it holds for {config.leave_timeout_s:g} s"
        return ""

    def _turn_overdue(self) -> None:
        self.is_overdue = not self.is_overdue
        if self.is_overdue:
            self._answered.set()
            if self._is_needed():
                self._log.warning("goes with what others may need", why=self._why)
            self._wake()


def _lasts(seconds: float, limit_s: float) -> bool:
    """Whether something is the case, and for so long."""
    return 0.0 < seconds >= limit_s
