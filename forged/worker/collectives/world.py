"""The collectives of a world, as one rank calls them.

Invariants:
- A collective returns the same result at every rank, or raises an error at every rank as soon as the error is known; it
  does not hang when a rank dies.
- A result that was delivered stays delivered.
- A call that is cancelled or times out ends the world: the ranks' calls could not be matched any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forged.errors import PeerError, RequestRefused
from forged.net.protocol.messages import INTEGER_MAX
from forged.worker.collectives import arrays
from forged.worker.collectives.arrays import Array, Given
from forged.worker.collectives.endpoints import Ending, Endpoint
from forged.worker.transport.peer_messages import CollectiveCall, Kind, Operation, Result, Value


class World:
    """One rank's part in a world. Calls are made one after the other, in the same order at all ranks."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.generation = endpoint.generation
        self.rank = endpoint.rank
        self.names = endpoint.names
        """The ids of the workers, by rank."""
        self.store_calls = endpoint.store_calls

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.names)

    @property
    def ending(self) -> Ending | None:
        """Why the world has ended; None while it has not."""
        return self.endpoint.ending

    def watch(self, on_over: Callable[[Ending], object]) -> None:
        """Call this once no further collective will complete, or at once if none will."""
        self.endpoint.on_over = on_over
        if self.ending is not None:
            on_over(self.ending)

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
                    "collective_unfit",
                    "the root of a broadcast must give a value, got None",
                    "pass a value at the root",
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

    async def commit(self, step: int) -> None:
        """Vote for a step, and wait until all ranks have."""
        await self._do(CollectiveCall(Kind.COMMIT, step=step))

    async def end_step(self, step: int, *, stop_wanted: int = 0, timeout_s: float | None = None) -> int:
        """Report that this rank has finished a step, and wait until all ranks have.

        A rank that wants the world to stop after the step gives a number above 0. The largest number is returned at all
        ranks, so that they stop together.
        """
        if not 0 <= stop_wanted <= INTEGER_MAX or abs(step) > INTEGER_MAX:
            raise RequestRefused("step_invalid", f"step {step} or stop_wanted {stop_wanted} is out of range")
        result = await self._do(CollectiveCall(Kind.END_STEP, step=step), stop_wanted=stop_wanted, timeout_s=timeout_s)
        return result.stop_wanted

    def abort(self, reason: str, peer: str = "") -> None:
        """Abort the world: every waiting and later call, at every rank, raises `CollectiveAborted`."""
        self.endpoint.abort(reason, peer)

    def void(self, reason: str) -> None:
        """End the world at every rank, as `abort` does, because its step is void; no worker is blamed."""
        self.endpoint.void(reason)

    async def leave(self) -> None:
        """Leave the world: results that were delivered stay valid, and no further collective completes."""
        await self.endpoint.leave()

    async def _do(
        self, call: CollectiveCall, value: Value | None = None, *, stop_wanted: int = 0, timeout_s: float | None = None
    ) -> Result:
        if self.ending is not None:
            raise self.ending.error()
        self._check_root(call)
        result = await self.endpoint.call(call, value, stop_wanted, timeout_s)
        due = call.values_due(self.rank, self.size)
        if len(result.values) != due:
            raise PeerError(
                "result_invalid", f"{self.names[0]} answers {call} with {len(result.values)} values of {due}"
            )
        return result

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
