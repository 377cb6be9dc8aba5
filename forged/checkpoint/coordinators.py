"""The ranks that save and load together: one process alone, the workers of a job, or somebody else's.

Law: what goes wrong at one rank is known to all before any of them goes on, and a rank that does not come is waited for
no longer than the operation may take.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import msgspec
from anyio import to_thread

from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.ports import CancelToken, Coordinator
from forged.errors import ForgedError, describe

T = TypeVar("T")

RETURN_GRACE_S = 2.0
"""So much later than it should, a call that blocks has given up, or it never will."""


class SingleProcess:
    """One rank, which has nobody to wait for."""

    rank = 0
    world_size = 1

    async def barrier(self) -> None:
        """Nobody else comes."""

    async def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        return [value]

    async def broadcast(self, value: Any, root: int = 0) -> Any:
        return value


class BlockingCoordinator:
    """Ranks whose calls block, such as those of `forged.join`."""

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
        """What else there is to know of them: the job, the step, the generation."""
        return getattr(self._ranks, name)


def as_coordinator(ranks: Any) -> Coordinator:
    """A coordinator whose calls can be awaited, whatever it was; None stands for one process."""
    if ranks is None:
        return SingleProcess()
    lacking = [name for name in ("barrier", "gather", "broadcast") if not callable(getattr(ranks, name, None))]
    if lacking:
        raise invalid(
            f"the coordinator is a {type(ranks).__name__}, which has no {', '.join(lacking)}",
            "give what has rank, world_size, barrier, gather and broadcast, such as a worker; or None for one process",
        )
    if inspect.iscoroutinefunction(ranks.gather):
        coordinator: Coordinator = ranks
        return coordinator
    return BlockingCoordinator(ranks)


class OutcomeUnknown(CheckpointException):
    """Nobody here knows what has become of it: the others did not come in time, or the storage does not answer."""


class StorageUnresponsive(CheckpointException):
    """A call that blocks did not come back, and may still do what it was to do."""


class RankFailure(msgspec.Struct, frozen=True, tag="failure"):
    """What went wrong at a rank."""

    message: str
    sort: ExceptionType
    code: str
    fix: str
    retryable: bool = False
    is_undecided: bool = False
    """Whether it may have got through all the same."""
    ranks: tuple[int, ...] = ()
    """Those that the message names already."""

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        """What can be told of an error."""
        if isinstance(error, CheckpointException):
            is_undecided = isinstance(error, OutcomeUnknown)
            return cls(error.message, error.type, error.code, error.fix, error.retryable, is_undecided, error.ranks)
        if isinstance(error, ForgedError):
            return cls(error.message, ExceptionType.UNKNOWN, error.code, error.fix, error.retryable)
        if isinstance(error, MemoryError):
            return cls("there is not enough memory", ExceptionType.UNKNOWN, "checkpoint_memory", "free some")
        return cls(describe(error), ExceptionType.UNKNOWN, "checkpoint_failed", "")

    def error(self, prefix: str, kind: ExceptionType, rank: int | None) -> CheckpointException:
        """What is raised for it; whose message it is, is told where that has not been said."""
        message, ranks = self.message, self.ranks
        if rank is not None and rank not in ranks:
            message, ranks = f"rank {rank}: {message}", (rank, *ranks)
        its = kind if self.sort is ExceptionType.UNKNOWN else self.sort
        sort = OutcomeUnknown if self.is_undecided else CheckpointException
        return sort(message, prefix, its, code=self.code, fix=self.fix, retryable=self.retryable, ranks=ranks)


class RankValue(msgspec.Struct, frozen=True, tag="value"):
    """What a rank has to say, where nothing went wrong."""

    data: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RankValue | RankFailure).decode
_decode_answer = msgspec.msgpack.Decoder(tuple[int, RankValue | RankFailure]).decode
"""Whose outcome it is, and the outcome."""


class RankGroup:
    """The others, during one operation."""

    def __init__(self, coordinator: Coordinator, token: CancelToken, kind: ExceptionType) -> None:
        self.rank = coordinator.rank
        self.world_size = coordinator.world_size
        self.token = token
        self.prefix = ""
        self._coordinator = coordinator
        self._kind = kind

    @property
    def is_root(self) -> bool:
        """Whether this one decides."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self.world_size == 1

    async def decide(
        self, mine: Callable[[], Awaitable[bytes]], decide: Callable[[list[bytes]], Awaitable[bytes]]
    ) -> bytes:
        """Have the root decide from what every rank says; an error at any of them is raised at all."""
        said, instead = await _outcome(mine())
        gathered = await self._within_time(self._coordinator.gather(_encode(said), 0))
        answer = None if gathered is None else _encode(await self._decided(gathered, decide))
        told = await self._within_time(self._coordinator.broadcast(answer, 0))
        if told is None:
            raise self._undecided("the ranks were parted", self._kind)
        try:
            fault, verdict = _decode_answer(told)
        except (msgspec.MsgspecError, TypeError) as error:
            raise self._undecided(f"the root says what nobody understands: {error}", self._kind) from error
        if isinstance(verdict, RankFailure):
            raise self._error(verdict, fault) from (instead if fault == self.rank else None)
        return verdict.data

    def _error(self, trouble: RankFailure, rank: int) -> CheckpointException:
        """What is raised here for what went wrong at a rank."""
        return trouble.error(self.prefix, self._kind, None if self.is_alone else rank)

    async def _decided(
        self, gathered: list[bytes], decide: Callable[[list[bytes]], Awaitable[bytes]]
    ) -> tuple[int, RankValue | RankFailure]:
        outcomes = [_understood(one) for one in gathered]
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, RankFailure):
                return rank, outcome
        verdict, _ = await _outcome(decide([one.data for one in outcomes if isinstance(one, RankValue)]))
        return self.rank, verdict

    async def _within_time(self, call: Any) -> Any:
        # A little longer than the operation itself may take: whose time was over still has to tell the others.
        remaining_s = self.token.remaining_s()
        try:
            with anyio.move_on_after(None if remaining_s is None else remaining_s + RETURN_GRACE_S):
                return self._there(await call)
        except ForgedError:
            raise
        except Exception as error:
            raise self._undecided(f"the ranks were parted: {describe(error)}", self._kind) from error
        raise self._undecided(f"the other ranks did not come within {self.token.timeout_s} s", ExceptionType.TIMEOUT)

    def _there(self, answer: Any) -> Any:
        """What all have said; scripts that go on over a broken step are given back what they gave."""
        is_whole = len(answer) == self.world_size if isinstance(answer, list) else answer is not None
        if not is_whole and not (answer is None and not self.is_root):
            raise self._undecided("the ranks were parted", self._kind)
        return answer

    def _undecided(self, message: str, kind: ExceptionType) -> OutcomeUnknown:
        return OutcomeUnknown(
            message, self.prefix, kind, fix="look at the ranks that hang, or give it a larger timeout"
        )


def _understood(said: Any) -> RankValue | RankFailure:
    """What a rank says, or that this cannot be understood."""
    try:
        found: RankValue | RankFailure = _decode(said)
        return found
    except (msgspec.MsgspecError, TypeError) as error:
        return RankFailure(
            f"it says what nobody understands: {error}",
            ExceptionType.UNKNOWN,
            "checkpoint_ranks_differ",
            "have all ranks run the same version of forged, and make the same calls in the same order",
        )


async def _outcome(act: Awaitable[bytes]) -> tuple[RankValue | RankFailure, Exception | None]:
    """What somebody has to say, or what went wrong instead."""
    try:
        return RankValue(await act), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks have to learn of it
        return RankFailure.of(error), error


async def run_in_thread(act: Callable[[], T], token: CancelToken) -> T:
    """Run what blocks in a thread, for as long as the operation may take.

    Who is cancelled stops it, and waits until it has stopped. What does not come back from the system is left alone.
    """
    began, ended = threading.Event(), threading.Event()

    def run() -> T:
        began.set()
        try:
            token.check()
            return act()
        finally:
            ended.set()

    remaining_s = token.remaining_s()
    try:
        with anyio.move_on_after(None if remaining_s is None else remaining_s + RETURN_GRACE_S):
            return await to_thread.run_sync(run, abandon_on_cancel=True)
        raise StorageUnresponsive(
            f"the storage does not answer, and {token.timeout_s} s are over",
            type=ExceptionType.TIMEOUT,
            fix="see whether the storage is there, or give it a larger timeout",
        )
    except anyio.get_cancelled_exc_class():
        token.cancel()
        if began.is_set():
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(ended.wait, RETURN_GRACE_S)
        raise
