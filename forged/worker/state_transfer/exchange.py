"""A state transfer as one worker sees it: it offers its training state, or takes the source's.

Invariants:
- A state is packed when it is offered, so it is the state after a whole step.
- A received state counts when all of it has arrived.
- While a state arrives, the daemon is told how much has, and which worker is out of reach.
- A fetch that fails is repeated, unless TLS refuses the source or the state does not fit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import anyio
from anyio.abc import TaskGroup

from forged.elastic.messages import RescaleSynchronising
from forged.elastic.model import WorkerId
from forged.errors import ForgedError
from forged.log import Log
from forged.net.transport.tls import TLS_FAILED
from forged.worker.daemon_link.registration import Registration
from forged.worker.errors import is_temporary
from forged.worker.mesh import Mesh
from forged.worker.state_transfer.encoding import Arriving, pack
from forged.worker.worker_state.progress import TrainingProgress

PAUSE_S = 0.2
"""The pause between two tries to fetch a state."""
TELLING_INTERVAL_S = 1.0
"""How often the daemon is told how much of a state has arrived."""


class StateExchange:
    """Offers and takes one worker's state."""

    def __init__(
        self, mesh: Mesh, registration: Registration, progress: TrainingProgress, tasks: TaskGroup, log: Log
    ) -> None:
        self._mesh = mesh
        self._registration = registration
        self._progress = progress
        self._tasks = tasks
        self._log = log
        self._problem = ""
        """Why the last fetch of the present transfer failed; empty where none has."""

    def offering(self, attempt: int) -> AbstractContextManager[None]:
        """Offer the state for an attempt, until the block is left."""
        packed = pack(self._progress.transferable_state)
        return self._mesh.offering(attempt, packed.head, packed.parts)

    async def take(self, settled: RescaleSynchronising) -> None:
        """Take the source's state; repeated until it is here."""
        telling = anyio.CancelScope()
        self._problem = ""
        self._tasks.start_soon(self._tell, settled, telling)
        try:
            while not await self._has_fetched(settled):
                await anyio.sleep(PAUSE_S)
        finally:
            telling.cancel()

    async def fetch(self, source: WorkerId, attempt: int) -> None:
        """Take the state that the source offers for this attempt; one try."""
        arrived: list[Arriving] = []

        def into(head: bytes) -> list[memoryview]:
            arrived.append(Arriving(head))
            return arrived[-1].parts

        await self._mesh.fetch_state(source, attempt, into)
        arrived[-1].adopt(self._progress.transferable_state)

    async def _has_fetched(self, settled: RescaleSynchronising) -> bool:
        try:
            await self.fetch(settled.source, settled.attempt)
        except ForgedError as error:
            if not is_temporary(error) or error.code == TLS_FAILED:
                raise
            self._problem = error.message
            self._log.warning("the state could not be fetched", source=str(settled.source), reason=str(error))
            return False
        return True

    async def _tell(self, settled: RescaleSynchronising, scope: anyio.CancelScope) -> None:
        """A transfer may take longer than the daemon lets a worker be silent."""
        before = self._mesh.state_received
        with scope:
            while True:
                await anyio.sleep(TELLING_INTERVAL_S)
                error = self._mesh.source_unreached
                unreachable = "" if error is None else settled.source.id
                problem = self._problem if error is None else error.message
                received = self._mesh.state_received - before
                self._registration.receiving(settled.attempt, received, problem=problem, unreachable_peer=unreachable)
