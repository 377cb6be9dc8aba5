"""The Python stacks of workers' processes, asked of their pulses.

Invariants:
- A pulse is known by a signal with the incarnation of the registered worker, and asked over the connection that the
  signal came from.
- What it answers is text of a worker, and bounded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec

from forged.elastic.messages import Pulse, WorkerFailed, WorkerLeft
from forged.errors import RequestRefused, Unavailable
from forged.jobs.model import JobRemoved
from forged.kernel.bus import Bus
from forged.kernel.messages import Call, Record, Request
from forged.metrics.messages import ReadStacks, WorkerStacks

OWNER = "stacks"
ANSWER_S = 4.0
"""How long a pulse may take: its process answers at once or not at all."""

AskClient = Callable[[bytes, Request[Any], float], Awaitable[Any]]
"""Send a request to a connected client, given its id, and wait for so long."""


class DumpStacks(Request[WorkerStacks], frozen=True):
    """Have the stacks of a worker's process written; the daemon sends this to a pulse."""

    job: str
    worker_id: Annotated[str, msgspec.Meta(max_length=256)]


class StackService:
    """Asks pulses for stacks."""

    def __init__(self, bus: Bus, rank: Callable[[str, str, bytes], int | None], ask: AskClient) -> None:
        self._bus = bus
        self._rank = rank
        self._ask = ask
        self._pulses: dict[str, dict[str, tuple[bytes, bytes]]] = {}
        """By job and worker: the incarnation, and the client that its pulse is."""
        bus.on_signal(Pulse, self._pulse, name="stacks.pulses")
        bus.serve(ReadStacks, self._read, owner=OWNER)
        bus.on((WorkerLeft, WorkerFailed), self._worker_ended, name="stacks.workers")
        bus.on(JobRemoved, self._job_removed, name="stacks.removal")

    def _pulse(self, pulse: Pulse, call: Call) -> None:
        if self._rank(pulse.job, pulse.worker_id, pulse.incarnation) is not None:
            self._pulses.setdefault(pulse.job, {})[pulse.worker_id] = pulse.incarnation, call.client

    async def _read(self, request: ReadStacks, call: Call) -> WorkerStacks:
        self._bus.dispatcher.require_job(request.job)
        incarnation, client = self._pulses.get(request.job, {}).get(request.worker_id, (b"", b""))
        if self._rank(request.job, request.worker_id, incarnation) is None:
            raise RequestRefused(
                "stacks_unavailable",
                f"no pulse of worker {request.worker_id[:80]} of job {request.job} is known",
                "if the worker runs, wait a second after a restart of the daemon; else run `py-spy dump` on its host",
            )
        try:
            stacks: WorkerStacks = await self._ask(client, DumpStacks(request.job, request.worker_id), ANSWER_S)
        except Unavailable as error:
            raise Unavailable(
                "stacks_unavailable",
                f"the pulse of worker {request.worker_id[:80]} did not answer: {error.message}",
                "try again; or run `py-spy dump` on the worker's host",
            ) from error
        return stacks

    def _worker_ended(self, record: Record) -> None:
        """A worker has failed or left; another process may have its name by now."""
        fact, pulses = record.fact, self._pulses.get(record.job, {})
        if isinstance(fact, WorkerLeft | WorkerFailed) and fact.worker_id in pulses:
            incarnation, _ = pulses[fact.worker_id]
            if self._rank(record.job, fact.worker_id, incarnation) is None:
                del pulses[fact.worker_id]

    def _job_removed(self, record: Record) -> None:
        self._pulses.pop(record.job, None)
