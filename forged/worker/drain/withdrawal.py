"""What a worker does while its script saves something, before it goes.

Law: who has made its last step takes nothing any more, and gives what others come to need. It is the daemon that lets
it go, in the moment of going; who is kept does as before, and is told of its going again only behind further steps.
Whoever is interrupted while it saves has not saved: it is told once more. What fails in giving is told, and is nobody's
reason not to save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from forged.errors import describe
from forged.log import Log
from forged.worker.collectives.world import World
from forged.worker.drain.drain import Drain
from forged.worker.rescale.rescaler import Rescaler
from forged.worker.worker_state.current_world import CurrentWorld
from forged.worker.worker_state.job_view import JobView

NEVER = -1


class Parting(NamedTuple):
    """The last step is done, and the worker is to go."""

    reason: str
    is_news: bool
    """Whether the subscribers of `leaving` have yet to be told of this step."""


class Withdrawal:
    """One worker's way out; `beat` says at once that it lives, and whether it is on it."""

    def __init__(
        self,
        standing: JobView,
        presence: CurrentWorld,
        departure: Drain,
        beat: Callable[[], None],
        tasks: TaskGroup,
        log: Log,
    ) -> None:
        self.is_under_way = False
        """Whether the worker has done its last step, and does by itself what remains to be done."""
        self.alone: World | None = None
        """The world in which it was last and alone: the script may still meet itself while it saves something."""
        self._step = self._told_at = NEVER
        """How many steps were committed when it was to go last, and when all subscribers had been told of it last."""
        self._serving: tuple[anyio.CancelScope, anyio.Event] | None = None
        """In which it does its part for the others, and when that has ended."""
        self._standing = standing
        self._presence = presence
        self._departure = departure
        self._beat = beat
        self._tasks = tasks
        self._log = log

    async def begin(self, step: int, passage: Rescaler) -> Parting:
        """Leave the script to itself, and the others to theirs; again for a script that was interrupted in it."""
        if not self.is_under_way:
            await self._stop_serving()
            self.is_under_way, self.alone = True, None
            self._beat()
            self.alone = await self._presence.part()
        if self._serving is None:
            self._serving = anyio.CancelScope(), anyio.Event()
            self._tasks.start_soon(self._serve, passage, *self._serving)
        self._step = step
        return Parting(self._departure.reason, step != self._told_at)

    async def end(self) -> bool:
        """Go, now that the script is done; false where others have come to need this worker."""
        self._told_at = self._step
        if await self._departure.leave():
            await self._stop_serving()
            return True
        await self.call_off()
        return False

    async def call_off(self) -> None:
        """Take part again as before, for who was on its way out."""
        was_under_way, self.is_under_way = self.is_under_way, False
        await self._stop_serving()
        if was_under_way:
            self._beat()

    async def _stop_serving(self) -> None:
        if self._serving is not None:
            scope, ended = self._serving
            scope.cancel()
            await ended.wait()
            self._serving = None

    async def _serve(self, passage: Rescaler, scope: anyio.CancelScope, ended: anyio.Event) -> None:
        """Give others what this worker has, should they come to need it."""
        try:
            with scope:
                await self._serve_while_needed(passage)
        except Exception as error:  # noqa: BLE001 - the script's own state may be in no condition to be packed
            self._log.warning("gives nothing to others any more", why=describe(error))
        finally:
            ended.set()

    async def _serve_while_needed(self, passage: Rescaler) -> None:
        standing = self._standing
        while standing.end is None and standing.completed is None:
            if self._departure.is_due:
                await passage.rest()
            else:
                await passage.come_along(takes=False)
