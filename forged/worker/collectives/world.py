"""The collectives of a world, as one rank calls them.

Invariants:
- A collective returns the same result at every rank, or raises an error at every rank as soon as the error is known; it
  does not hang when a rank dies.
- A result that was delivered stays delivered.
- A call that is cancelled or times out ends the world: the ranks' calls could not be matched any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import anyio

from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable
from forged.net.protocol.messages import INTEGER_MAX
from forged.worker.collectives import arrays
from forged.worker.collectives.arrays import Array, Given
from forged.worker.collectives.hub import values_due
from forged.worker.transport.peer_messages import CollectiveCall, Contribution, Kind, Operation, Result, Value

ABORTED = "collective_aborted"


class CollectiveAborted(Unavailable):
    """The world has ended. `peer` is the worker whose connection was lost, empty for another reason."""

    def __init__(self, reason: str, peer: str = "") -> None:
        super().__init__(ABORTED, reason, "enter the next world")
        self.peer = peer

    def __reduce__(self) -> tuple[type[CollectiveAborted], tuple[str, str]]:
        return CollectiveAborted, (self.message, self.peer)


class CollectiveMismatch(RequestRefused):
    """The ranks have called different collectives or brought too much: an error in the script, raised everywhere."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a world has ended."""

    code: str
    reason: str
    peer: str = ""
    fix: str = ""

    def error(self) -> ForgedError:
        """The error of every later call."""
        if self.code == ABORTED:
            return CollectiveAborted(self.reason, self.peer)
        return CollectiveMismatch(self.code, self.reason, self.fix)


def aborted(reason: str, peer: str = "") -> Ending:
    """The ending of an aborted world."""
    return Ending(ABORTED, reason, peer)


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """All ranks have finished the step. `stop_wanted` is the largest value that any of them has given."""

    committed: bool
    stop_wanted: int
    reason: str

    @property
    def pause(self) -> bool:
        """Whether the world stops after this step."""
        return self.stop_wanted > 0


class Endpoint(Protocol):
    """A rank's connection to the hub."""

    def contribute(self, contribution: Contribution) -> None:
        """Send the rank's part of a collective; the result arrives at `World.on_result`."""
        ...

    def waiting_for(self) -> str:
        """The ranks that have not called yet, in words; empty where that is unknown."""
        ...

    def end(self, ending: Ending) -> None:
        """Abort the world at all ranks."""
        ...

    async def leave(self) -> None:
        """Leave; the world ends for the other ranks at their next collective."""
        ...


class World:
    """One rank's part in a world. Calls are made one after the other, in the same order at all ranks."""

    endpoint: Endpoint

    def __init__(self, generation: int, rank: int, names: Sequence[str]) -> None:
        self.generation = generation
        self.rank = rank
        self.names = tuple(names)
        """The ids of the workers, by rank."""
        self._number = 0
        self._waiting: asyncio.Future[Result] | None = None
        self._ending: Ending | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.names)

    @property
    def ending(self) -> Ending | None:
        """Why the world has ended; None while it has not."""
        return self._ending

    async def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait for all ranks."""
        await self._do(CollectiveCall(Kind.BARRIER), timeout_s=timeout_s)

    async def gather(self, value: Given, root: int = 0, *, timeout_s: float | None = None) -> list[Any] | None:
        """The values of all ranks in rank order, at the root; None at the other ranks."""
        result = await self._do(CollectiveCall(Kind.GATHER, root), arrays.pack(value), timeout_s=timeout_s)
        return [arrays.unpack(one) for one in result.values] if root == self.rank else None

    async def all_gather(self, value: Given, *, timeout_s: float | None = None) -> list[Any]:
        """The values of all ranks in rank order."""
        result = await self._do(CollectiveCall(Kind.ALL_GATHER), arrays.pack(value), timeout_s=timeout_s)
        return [arrays.unpack(one) for one in result.values]

    async def broadcast(self, value: Given | None, root: int = 0, *, timeout_s: float | None = None) -> Any:
        """The root's value; the other ranks' values are ignored."""
        own = None
        if root == self.rank:
            if value is None:
                raise RequestRefused(
                    "collective_unfit", "the root of a broadcast must give a value, got None", "give one"
                )
            own = arrays.pack(value)
        result = await self._do(CollectiveCall(Kind.BROADCAST, root), own, timeout_s=timeout_s)
        return arrays.unpack(own or result.values[0])

    async def all_reduce(
        self,
        value: Given,
        op: Operation | str = Operation.SUM,
        *,
        out: Array | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Reduce the arrays of all ranks, into a new array or into `out`."""
        operation, own = _operation(op), arrays.pack_array(value)
        arrays.check_operation(operation, own)
        if out is not None:
            arrays.check_out(own, operation, out)
        call = CollectiveCall(Kind.ALL_REDUCE, operation=operation, dtype=own.dtype, shape=own.shape)
        (reduced,) = (await self._do(call, own, timeout_s=timeout_s)).values
        arrays.check_reduced(operation, own, reduced)
        if out is not None:
            return arrays.unpack_into(reduced, out)
        return arrays.unpack(Value(own.form, reduced.data, reduced.dtype, reduced.shape))

    async def end_step(self, step: int, *, stop_wanted: int = 0, timeout_s: float | None = None) -> StepVerdict:
        """Report that this rank has finished a step, and wait until all ranks have.

        A rank that wants the world to stop after the step gives a number above 0; all ranks learn the largest number,
        and so stop together.
        """
        if not 0 <= stop_wanted <= INTEGER_MAX or abs(step) > INTEGER_MAX:
            raise RequestRefused("step_invalid", f"step {step} or stop_wanted {stop_wanted} is out of range")
        result = await self._do(CollectiveCall(Kind.END_STEP, step=step), stop_wanted=stop_wanted, timeout_s=timeout_s)
        reason = f"asked by {', '.join(result.stop_by)}" if result.stop_by else ""
        return StepVerdict(committed=True, stop_wanted=result.stop_wanted, reason=reason)

    def abort(self, reason: str, peer: str = "") -> None:
        """Abort the world: every waiting and later call, at every rank, raises `CollectiveAborted`."""
        if self._ending is None:
            self.endpoint.end(aborted(reason, peer))

    async def leave(self) -> None:
        """Leave the world: results that were delivered stay valid, and no further collective completes."""
        if self._ending is None:
            self.on_over(aborted("this worker has left the world"))
            await self.endpoint.leave()

    # Called by the endpoint.

    def on_result(self, result: Result) -> None:
        """The result of the present call has arrived."""
        if self._waiting is not None and not self._waiting.done() and result.number == self._number:
            self._waiting.set_result(result)

    def on_over(self, ending: Ending) -> None:
        """The world has ended; the first reason counts."""
        if self._ending is not None:
            return
        self._ending = ending
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ending.error())

    async def _do(
        self, call: CollectiveCall, value: Value | None = None, *, stop_wanted: int = 0, timeout_s: float | None = None
    ) -> Result:
        if self._ending is not None:
            raise self._ending.error()
        if self._waiting is not None:
            raise RequestRefused(
                "collective_in_progress", f"{call} while another call waits", "await the other call first"
            )
        self._check_root(call)
        self._number += 1
        self._waiting = answer = asyncio.get_running_loop().create_future()
        try:
            self.endpoint.contribute(Contribution(self._number, call, value, stop_wanted))
            return self._checked(call, await self._answered(call, answer, timeout_s))
        finally:
            self._waiting = None
            if answer.done() and not answer.cancelled():
                answer.exception()  # retrieved, so that asyncio does not log it

    async def _answered(self, call: CollectiveCall, answer: asyncio.Future[Result], timeout_s: float | None) -> Result:
        try:
            if answer.done():
                # The other tasks of the loop get a turn, though the result was there at once.
                await asyncio.sleep(0)
            with anyio.move_on_after(timeout_s):
                return await answer
        except asyncio.CancelledError:
            if answer.cancelled():
                self._give_up(call, "was cancelled")
            raise
        if answer.cancelled():
            self._give_up(call, f"was not answered within {timeout_s:g} s")
            assert self._ending is not None
            raise self._ending.error()
        # The result arrived at the moment of the timeout.
        return answer.result()

    def _checked(self, call: CollectiveCall, result: Result) -> Result:
        due = values_due(call, self.rank, self.size)
        if len(result.values) != due:
            raise PeerError(
                "result_invalid", f"{self.names[0]} answers {call} with {len(result.values)} values of {due}"
            )
        return result

    def _give_up(self, call: CollectiveCall, why: str) -> None:
        missing = self.endpoint.waiting_for()
        waiting_for = f", waiting for {missing}" if missing else ""
        self.abort(f"{call} #{self._number} of {self.names[self.rank]} (rank {self.rank}) {why}{waiting_for}")

    def _check_root(self, call: CollectiveCall) -> None:
        if call.root is not None and not 0 <= call.root < self.size:
            raise RequestRefused(
                "collective_root_invalid",
                f"the root of {call} must be a rank below {self.size}",
                "name a rank of this world",
            )


def _operation(name: Operation | str) -> Operation:
    try:
        return Operation(name)
    except ValueError:
        known = ", ".join(Operation)
        raise RequestRefused(
            "collective_operation_unknown", f"there is no operation {name!r}", f"use {known}"
        ) from None
