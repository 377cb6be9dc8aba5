"""What the hub decides: which collective is complete, and what each rank receives. No I/O.

Invariants:
- A collective completes when all ranks have called the same one. Nothing is sent before that, so no rank is ahead of
  another by more than one call.
- Ranks that call different collectives end the world, and the error names both calls.
- The memory for waiting calls is bounded: the first rank that brings too much is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forged.errors import PeerError, RequestRefused
from forged.worker.transport.peer_messages import (
    COLLECTIVE_BYTES_MAX,
    CollectiveCall,
    Contribution,
    Kind,
    Result,
    Value,
)

REDUCED_BYTES_MAX = 1 << 30
"""The bytes that all ranks together may bring to a reduction, which waits for the last rank."""
NAMES_MAX = 8
"""How many workers a message names."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A complete collective, with the ranks' values in rank order."""

    number: int
    call: CollectiveCall
    values: tuple[Value | None, ...]
    stop_wanted: int

    @property
    def brought(self) -> tuple[Value, ...]:
        """The values, without ranks that bring none."""
        return tuple(value for value in self.values if value is not None)

    @property
    def brought_bytes(self) -> int:
        """The size of the values."""
        return sum(value.data.nbytes for value in self.brought)

    @property
    def full(self) -> Result:
        """The result for a rank that receives the values."""
        return Result(self.number, self.brought, self.stop_wanted)

    @property
    def bare(self) -> Result:
        """The result for the other ranks."""
        return Result(self.number, (), self.stop_wanted)


class Hub:
    """Matches the calls of a world's ranks, one collective after the other."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._number = 1
        self._brought: dict[int, Contribution] = {}
        self._brought_bytes = 0

    @property
    def is_waiting(self) -> bool:
        """Whether some ranks have called, and not all."""
        return bool(self._brought)

    def take(self, rank: int, contribution: Contribution) -> Collected | None:
        """Take a rank's call; returns the collective once all ranks have called."""
        if contribution.number != self._number or rank in self._brought:
            raise PeerError(
                "collective_out_of_order",
                f"{self.describe(rank)} calls number {contribution.number} where {self._number} is due",
            )
        self._check_value(rank, contribution)
        self._brought[rank] = contribution
        self._check_same(rank, contribution.call)
        self._check_size(contribution)
        if len(self._brought) < len(self.names):
            return None
        return self._complete(contribution.call)

    def missing(self) -> str:
        """The ranks that have not called yet, in words."""
        missing = [rank for rank in range(len(self.names)) if rank not in self._brought]
        return self.listed(missing)

    def listed(self, ranks: Sequence[int]) -> str:
        """Ranks in words."""
        named = ", ".join(map(self.describe, ranks[:NAMES_MAX]))
        return f"{named} and {len(ranks) - NAMES_MAX} more" if len(ranks) > NAMES_MAX else named

    def describe(self, rank: int) -> str:
        """A rank in words."""
        return f"{self.names[rank]} (rank {rank})"

    def _complete(self, call: CollectiveCall) -> Collected:
        ranks = range(len(self.names))
        wanted = [self._brought[rank].stop_wanted for rank in ranks]
        values = tuple(self._brought[rank].value for rank in ranks)
        collected = Collected(self._number, call, values, max(wanted))
        self._number += 1
        self._brought, self._brought_bytes = {}, 0
        return collected

    def _check_same(self, rank: int, call: CollectiveCall) -> None:
        first_rank, first = next(iter(self._brought.items()))
        if call != first.call:
            raise RequestRefused(
                "collective_mismatch",
                f"call #{self._number} of {self.describe(first_rank)} is {first.call},"
                f" and that of {self.describe(rank)} is {call}",
                "call the same collectives at all ranks, in the same order",
            )

    def _check_size(self, contribution: Contribution) -> None:
        call, value = contribution.call, contribution.value
        if value is None:
            return
        self._brought_bytes += value.data.nbytes
        # All ranks bring arrays of one size to a reduction, so the first call tells the sum: a refusal does not depend
        # on the order of the calls.
        is_reduction = call.kind is Kind.ALL_REDUCE
        together = value.data.nbytes * len(self.names) if is_reduction else self._brought_bytes
        most = REDUCED_BYTES_MAX if is_reduction else COLLECTIVE_BYTES_MAX
        if together > most:
            raise RequestRefused(
                "collective_too_large",
                f"{call} #{self._number} has {together} bytes from all ranks together; limit {most}",
                "use several smaller collectives",
            )

    def _check_value(self, rank: int, contribution: Contribution) -> None:
        call, value = contribution.call, contribution.value
        if call.root is not None and call.root >= len(self.names):
            raise RequestRefused(
                "collective_root_invalid",
                f"the root of {call} at {self.describe(rank)} must be a rank below {len(self.names)}",
                "name a rank of this world",
            )
        if (value is not None) != call.brings(rank):
            raise PeerError(
                "value_unexpected",
                f"{self.describe(rank)} must pass a value to {call} exactly where the operation needs one",
            )
        if (
            call.kind is Kind.ALL_REDUCE
            and value is not None
            and (value.dtype, value.shape) != (call.dtype, call.shape)
        ):
            raise PeerError(
                "value_invalid", f"{self.describe(rank)} passes an array of another type or shape to {call}"
            )
