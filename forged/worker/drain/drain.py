"""When a worker that was told to go may go.

Law: a worker leaves a world when the next one holds without it, or when nobody could form one. The daemon knows which,
and settles it in the moment of going: who is needed by then stays. Nobody waits without end: where there is no daemon,
or nobody comes for what only this worker has, it goes all the same after a grace. Its own script may take its time for
a step; for the others to come to a collective it waits no longer, and breaks the step off.
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
from forged.worker.worker_state.job_view import JobView

LOOK_INTERVAL_S = 0.5
"""How often it is looked whether anybody comes."""
QUESTION_INTERVAL_S = 3.0
"""How often, about, the daemon is asked again by who has to stay: what changes that is nearly always told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ties:
    """What keeps a worker where it is."""

    is_bound: Callable[[], bool]
    """Whether it is in the world that was committed last, has yet to go out of the one before, or is asked for more."""
    is_waited_for: Callable[[], bool]
    """Whether the others have yet to stop, so that nobody can come for anything; not where it waits for them itself."""
    meeting: Callable[[], int | None]
    """Which collective its script waits in; None while it does in none."""
    break_off: Callable[[str], None]
    """Lets the script come out of that one; takes the reason."""
    has_given: Callable[[], bool]
    """Whether anybody has taken something lately."""
    has_daemon: Callable[[], bool]
    announce: Callable[[str], Awaitable[bool]]
    """Tells the daemon that it is to go, and why; returns whether it may at once."""
    ask: Callable[[], Awaitable[bool]]
    """Asks whether it may by now."""
    leave: Callable[[], Awaitable[bool]]
    """Goes, unless it is needed; returns whether it has gone."""


class Drain:
    """Waits for the moment."""

    def __init__(
        self, standing: JobView, ties: Ties, wake: Callable[[], None], random: Callable[[], float], log: Log
    ) -> None:
        self.is_overdue = False
        """Whether it waits for nobody any more."""
        self._may_go = False
        self._is_kept = False
        """Whether the daemon has kept it in the moment of going."""
        self._is_announced = False
        """Whether the daemon has it on record that this worker is to go."""
        self._changed = anyio.Event()
        self._going: anyio.CancelScope | None = None
        self._unwanted_s = 0.0
        """For how long nobody has come who could."""
        self._met_s = 0.0
        """For how long its script has waited in one and the same collective."""
        self._forsaken = ""
        """Why it has broken off a step, if it has: whoever comes behind that does not keep it any more."""
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
        return self._standing.draining is not None and (self.is_overdue or not self._has_to_stay())

    @property
    def reason(self) -> str:
        """Why it goes, and why it did not wait."""
        wish = self._standing.draining or ""
        return f"{wish}; {self._why}" if self._why and self._has_to_stay() else wish

    def _has_to_stay(self) -> bool:
        return (self._is_kept or self._ties.is_bound()) and not self._may_go

    async def leave(self) -> bool:
        """Go, unless others have come to need this worker; who waits for nobody any more just goes."""
        if self.is_overdue:
            return True
        try:
            with anyio.CancelScope() as self._going:
                self._may_go = await self._answer_to(self._ties.leave)
                self._is_kept = not self._may_go
        finally:
            self._going = None
        if not self._may_go:
            self._ask_again()
        return self._may_go or self.is_overdue

    def begin(self, settings: Callable[[], ElasticTrainingConfig], tasks: TaskGroup) -> None:
        """Prepare to go, if the worker was told to; by the settings at any time."""
        if self._standing.draining is not None and not self._is_begun:
            self._is_begun = True
            tasks.start_soon(self._ask_for_leave, self._standing.draining)
            tasks.start_soon(self._wait, settings)

    def reconsider(self, *, is_needed_anew: bool) -> None:
        """Who needs whom changes, and somebody may come; others may need this worker that did not, or only fewer do.

        Many may go one after the other. Who may go already does not ask at each of them: it is settled when it goes.
        """
        self._unwanted_s = 0.0
        self._may_go = self._may_go and not is_needed_anew
        if not self._may_go:
            self._ask_again()

    def _ask_again(self) -> None:
        """The last answer counts no more."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _ask_for_leave(self, wish: str) -> None:
        """Have others form a world without it, and hear whether it may go at once; for ever, because that changes."""
        question: Callable[[], Awaitable[bool]] = partial(self._ties.announce, wish)
        while True:
            changed = self._changed
            if self._has_to_stay() or not self._is_announced:
                may_go = await self._answer_to(question)
                self._is_announced, question = True, self._ties.ask
                # What follows from it was decided with the answer, and is told before it.
                if changed.is_set():
                    continue
                self._may_go = may_go
                self._wake()
            with anyio.move_on_after(None if self._may_go else self._pause_s()):
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
            if self._forsaken:
                self._ties.break_off(self._forsaken)
            meeting = self._ties.meeting()
            await anyio.sleep(LOOK_INTERVAL_S)
            # A daemon that cannot write has nobody come either, nor takes down that somebody goes.
            is_heard = self._ties.has_daemon() and self._is_announced and self._going is None
            alone_s = 0.0 if is_heard else alone_s + LOOK_INTERVAL_S
            has_given = self._ties.has_given()
            is_wanted = has_given or self._ties.is_waited_for()
            self._unwanted_s = 0.0 if is_wanted else self._unwanted_s + LOOK_INTERVAL_S
            is_stuck = meeting is not None and meeting == self._ties.meeting() and not has_given
            self._met_s = self._met_s + LOOK_INTERVAL_S if is_stuck else 0.0

    def _lack(self, alone_s: float, config: ElasticTrainingConfig) -> str:
        """What it has waited for in vain, for as long as it may; empty if for nothing."""
        if _lasts(self._met_s, config.leave_timeout_s):
            self._forsaken = f"the others did not come to a collective for {config.leave_timeout_s:g} s"
        if self._forsaken:
            return self._forsaken
        if _lasts(alone_s, config.reconnect_grace_s):
            lack = "the daemon took nothing down" if self._ties.has_daemon() else "there was no daemon"
            return f"{lack} for {config.reconnect_grace_s:g} s"
        if _lasts(self._unwanted_s, config.leave_timeout_s):
            return f"nobody came for what it holds for {config.leave_timeout_s:g} s"
        return ""

    def _turn_overdue(self) -> None:
        self.is_overdue = not self.is_overdue
        if self.is_overdue:
            if self._going is not None:
                self._going.cancel()
            if self._has_to_stay():
                self._log.warning("goes with what others may need", why=self._why)
            self._wake()


def _lasts(seconds: float, limit_s: float) -> bool:
    """Whether something is the case, and for so long."""
    return 0.0 < seconds >= limit_s
