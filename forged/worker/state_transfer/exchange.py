"""The training state of one worker: given to others, or taken from one of them.

Law: what is given is packed when the giving begins, so it is the state behind a step; what is taken counts when all of
it has come. As long as it comes, the daemon is told how much has, and whom this worker does not reach. What does not
work now may work a moment later; whoever is not believed will not be another time either.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import anyio
from anyio.abc import TaskGroup

from forged.elastic.messages import RescaleSynchronising
from forged.elastic.model import WorkerId
from forged.errors import ForgedError
from forged.log import Log
from forged.net.transport.tls import TLS_FAILED
from forged.worker.daemon.registration import Registration
from forged.worker.errors import passes
from forged.worker.mesh import Mesh
from forged.worker.state_transfer.encoding import Arriving, pack

PAUSE_S = 0.2
"""How long a worker rests before it tries again to fetch a state."""
TELLING_INTERVAL_S = 1.0
"""How often it says how much of one it has received."""


class StateExchange:
    """Gives and takes what `state` is at the moment."""

    def __init__(self, mesh: Mesh, line: Registration, state: Callable[[], Any], tasks: TaskGroup, log: Log) -> None:
        self._mesh = mesh
        self._line = line
        self._state = state
        self._tasks = tasks
        self._log = log
        self._trouble = ""
        """Why the last fetch of the state that is taken has failed; empty where none has."""

    def offering(self, attempt: int) -> AbstractContextManager[None]:
        """Offer it for an attempt, until the block is left."""
        packed = pack(self._state())
        return self._mesh.offering(attempt, packed.head, packed.parts)

    async def take(self, settled: RescaleSynchronising) -> None:
        """Take the source's, however often it takes to fetch it, and say how much of it has come."""
        telling = anyio.CancelScope()
        self._trouble = ""
        self._tasks.start_soon(self._tell, settled, telling)
        try:
            while not await self._has_fetched(settled):
                await anyio.sleep(PAUSE_S)
        finally:
            telling.cancel()

    async def fetch(self, source: WorkerId, attempt: int) -> None:
        """Become what the source was when it offered its state for this attempt."""
        arrived: list[Arriving] = []

        def into(head: bytes) -> list[memoryview]:
            arrived.append(Arriving(head))
            return arrived[-1].parts

        await self._mesh.fetch_state(source, attempt, into)
        arrived[-1].adopt(self._state())

    async def _has_fetched(self, settled: RescaleSynchronising) -> bool:
        try:
            await self.fetch(settled.source, settled.attempt)
        except ForgedError as error:
            if not passes(error) or error.code == TLS_FAILED:
                raise
            self._trouble = error.message
            self._log.warning("the state could not be fetched", source=str(settled.source), why=str(error))
            return False
        return True

    async def _tell(self, settled: RescaleSynchronising, scope: anyio.CancelScope) -> None:
        """That may last longer than somebody may be silent."""
        before = self._mesh.state_received
        with scope:
            while True:
                await anyio.sleep(TELLING_INTERVAL_S)
                error = self._mesh.source_unreached
                unreached = "" if error is None else settled.source.id
                trouble = self._trouble if error is None else error.message
                received = self._mesh.state_received - before
                self._line.receiving(settled.attempt, received, trouble=trouble, unreached=unreached)
