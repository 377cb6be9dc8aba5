"""The ranks that save and load together: one process, the workers of a job, or the ranks of another framework.

Invariants:
- An error at one rank is raised at all ranks before any rank takes the next step.
- A missing rank is waited for no longer than the operation may take.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import msgspec
from anyio import to_thread

from forged.checkpoint import thread_calls
from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.ports import CancelToken, Coordinator
from forged.errors import ForgedError, describe

T = TypeVar("T")


class SingleProcess:
    """The coordinator of one process alone."""

    rank = 0
    world_size = 1

    async def barrier(self) -> None:
        """Return at once."""

    async def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        return [value]

    async def broadcast(self, value: Any, root: int = 0) -> Any:
        return value


class BlockingCoordinator:
    """Makes a coordinator with blocking methods, such as a worker of `forged.join`, awaitable."""

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks

    @property
    def rank(self) -> int:
        return int(self._ranks.rank)

    @property
    def world_size(self) -> int:
        return int(self._ranks.world_size)

    async def barrier(self) -> None:
        await to_thread.run_sync(self._ranks.barrier, abandon_on_cancel=True)

    async def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        gathered: list[Any] | None = await to_thread.run_sync(self._ranks.gather, value, root, abandon_on_cancel=True)
        return gathered

    async def broadcast(self, value: Any, root: int = 0) -> Any:
        return await to_thread.run_sync(self._ranks.broadcast, value, root, abandon_on_cancel=True)

    def __getattr__(self, name: str) -> Any:
        """Job, step, generation and other attributes of the wrapped coordinator."""
        return getattr(self._ranks, name)


def as_coordinator(ranks: Any) -> Coordinator:
    """A coordinator with awaitable methods; None stands for one process."""
    if ranks is None:
        return SingleProcess()
    lacking = [name for name in ("barrier", "gather", "broadcast") if not callable(getattr(ranks, name, None))]
    if lacking:
        raise invalid(
            f"coordinator {type(ranks).__name__} has no {', '.join(lacking)}",
            "give an object with rank, world_size, barrier, gather and broadcast, such as a worker; None: one process",
        )
    if inspect.iscoroutinefunction(ranks.gather):
        coordinator: Coordinator = ranks
        return coordinator
    return BlockingCoordinator(ranks)


class OutcomeUnknown(CheckpointException):
    """The operation may have succeeded or failed: ranks did not answer in time, or the storage does not respond."""


class RankFailure(msgspec.Struct, frozen=True, tag="failure"):
    """An error of one rank, as it is sent to the others."""

    message: str
    error_type: ExceptionType
    code: str
    fix: str
    retryable: bool = False
    is_undecided: bool = False
    """Whether the operation may have succeeded all the same."""
    ranks: tuple[int, ...] = ()
    """The ranks that the message names already."""

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        if isinstance(error, CheckpointException):
            is_undecided = isinstance(error, OutcomeUnknown)
            return cls(error.message, error.type, error.code, error.fix, error.retryable, is_undecided, error.ranks)
        if isinstance(error, ForgedError):
            return cls(error.message, ExceptionType.UNKNOWN, error.code, error.fix, error.retryable)
        if isinstance(error, MemoryError):
            return cls("out of memory", ExceptionType.UNKNOWN, "checkpoint_memory", "free memory on this host")
        return cls(describe(error), ExceptionType.UNKNOWN, "checkpoint_failed", "")

    def error(self, prefix: str, kind: ExceptionType, rank: int | None) -> CheckpointException:
        """The exception for this failure; its message names `rank` unless it does so already."""
        message, ranks = self.message, self.ranks
        if rank is not None and rank not in ranks:
            message, ranks = f"rank {rank}: {message}", (rank, *ranks)
        its_type = kind if self.error_type is ExceptionType.UNKNOWN else self.error_type
        error = OutcomeUnknown if self.is_undecided else CheckpointException
        return error(message, prefix, its_type, code=self.code, fix=self.fix, retryable=self.retryable, ranks=ranks)


class RankValue(msgspec.Struct, frozen=True, tag="value"):
    """A rank's value in a step without errors."""

    data: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RankValue | RankFailure).decode
_decode_answer = msgspec.msgpack.Decoder(tuple[int, RankValue | RankFailure]).decode
"""The rank whose outcome it is, and the outcome."""


class RankGroup:
    """All ranks during one operation, in steps that end alike at all of them."""

    def __init__(self, coordinator: Coordinator, token: CancelToken, kind: ExceptionType) -> None:
        self.rank = coordinator.rank
        self.world_size = coordinator.world_size
        self.token = token
        self.prefix = ""
        self._coordinator = coordinator
        self._kind = kind

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    async def decide(
        self, contribute: Callable[[], Awaitable[bytes]], decide: Callable[[list[bytes]], Awaitable[bytes]]
    ) -> bytes:
        """One step: gather every rank's value at the root, and return the root's decision at all ranks.

        An error of `contribute` at any rank, or of `decide` at the root, is raised at all ranks.
        """
        own, own_error = await _outcome(contribute())
        if type(self._coordinator) is SingleProcess:
            return await self._decided_alone(own, own_error, decide)
        gathered = await self._within_time(self._coordinator.gather(_encode(own), 0))
        answer = None if gathered is None else _encode(await self._decided(gathered, decide))
        received = await self._within_time(self._coordinator.broadcast(answer, 0))
        if received is None:
            raise self._undecided("the collective was aborted", self._kind)
        try:
            rank, outcome = _decode_answer(received)
        except (msgspec.MsgspecError, TypeError) as error:
            raise self._undecided(f"cannot read the answer of rank 0: {error}", self._kind) from error
        if isinstance(outcome, RankFailure):
            failure = outcome.error(self.prefix, self._kind, None if self.is_alone else rank)
            raise failure from (own_error if rank == self.rank else None)
        return outcome.data

    async def announce(self, value: bytes) -> bytes | None:
        """The root's value at all ranks, which ignore their own; None at a rank that has aborted its step."""
        if self.is_alone:
            return value
        told: bytes | None = await self._within_time(self._coordinator.broadcast(value if self.is_root else None, 0))
        return told

    async def _decided_alone(
        self,
        own: RankValue | RankFailure,
        own_error: Exception | None,
        decide: Callable[[list[bytes]], Awaitable[bytes]],
    ) -> bytes:
        """The decision of one process, without encoding what no other rank reads."""
        if isinstance(own, RankValue):
            own, _ = await _outcome(decide([own.data]))
        if isinstance(own, RankFailure):
            raise own.error(self.prefix, self._kind, None) from own_error
        return own.data

    async def _decided(
        self, gathered: list[bytes], decide: Callable[[list[bytes]], Awaitable[bytes]]
    ) -> tuple[int, RankValue | RankFailure]:
        outcomes = [_decoded(one) for one in gathered]
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, RankFailure):
                return rank, outcome
        decision, _ = await _outcome(decide([one.data for one in outcomes if isinstance(one, RankValue)]))
        return self.rank, decision

    async def _within_time(self, call: Any) -> Any:
        # Longer than the operation itself, because a rank that times out still has to report that.
        remaining_s = self.token.remaining_s()
        try:
            with anyio.move_on_after(None if remaining_s is None else remaining_s + thread_calls.RETURN_GRACE_S):
                return self._complete(await call)
        except ForgedError:
            raise
        except Exception as error:
            raise self._undecided(f"the collective failed: {describe(error)}", self._kind) from error
        raise self._undecided(f"the other ranks did not answer within {self.token.timeout_s} s", ExceptionType.TIMEOUT)

    def _complete(self, answer: Any) -> Any:
        """Refuse the result of an aborted collective, which returns the caller's own value to scripts."""
        is_whole = len(answer) == self.world_size if isinstance(answer, list) else answer is not None
        if not is_whole and not (answer is None and not self.is_root):
            raise self._undecided("the collective was aborted", self._kind)
        return answer

    def _undecided(self, message: str, kind: ExceptionType) -> OutcomeUnknown:
        return OutcomeUnknown(message, self.prefix, kind, fix="look for ranks that hang, or set a larger timeout")


def _decoded(encoded: Any) -> RankValue | RankFailure:
    """A rank's outcome; one that cannot be decoded is that rank's failure."""
    try:
        outcome: RankValue | RankFailure = _decode(encoded)
        return outcome
    except (msgspec.MsgspecError, TypeError) as error:
        return RankFailure(
            f"cannot decode its value: {error}",
            ExceptionType.UNKNOWN,
            "checkpoint_ranks_differ",
            "have all ranks run the same version of forged, and make the same calls in the same order",
        )


async def _outcome(act: Awaitable[bytes]) -> tuple[RankValue | RankFailure, Exception | None]:
    """The result of a call as an outcome, and its error if it failed."""
    try:
        return RankValue(await act), None
    except Exception as error:  # noqa: BLE001 - every error is sent to the other ranks
        return RankFailure.of(error), error
