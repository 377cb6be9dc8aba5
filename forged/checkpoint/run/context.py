"""What resuming and saving share in a run: the storage, the ranks, the time, and the decisions of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from forged.checkpoint.errors import ExceptionType
from forged.checkpoint.ports import CancelToken, CheckpointCatalog, Coordinator, Storage, bounded
from forged.checkpoint.rank_group import RankGroup, as_coordinator
from forged.checkpoint.thread_calls import run_in_thread
from forged.log import Log

T = TypeVar("T")


@dataclass(slots=True)
class RunContext:
    """One rank's part of a run in one folder."""

    storage: Storage
    ranks: Any
    """What the script has given: a worker of a job, another coordinator, or None."""
    coordinator: Coordinator
    timeout_s: float
    log: Log
    monotonic: Callable[[], float]
    is_root: bool = False
    """Whether this rank deletes superseded checkpoints."""

    @property
    def is_worker(self) -> bool:
        return callable(getattr(self.ranks, "update_training_state", None))

    @property
    def catalog(self) -> CheckpointCatalog | None:
        """The catalogue of this worker's job."""
        catalog: CheckpointCatalog | None = getattr(self.ranks, "checkpoint_catalog", None)
        return catalog

    def measuring_save(self) -> AbstractContextManager[None]:
        """Let this worker count the time inside the block as the saving of a checkpoint."""
        measure: Callable[[], AbstractContextManager[None]] = getattr(self.ranks, "measure_saving", nullcontext)
        return measure()

    @property
    def generation(self) -> int:
        """The number of the present world; 0 without workers."""
        return int(getattr(self.coordinator, "generation", 0))

    async def decide(
        self,
        act: Callable[[Storage, CancelToken], T],
        result: Any,
        kind: ExceptionType,
        *,
        is_alone: bool = False,
    ) -> T:
        """What rank 0 finds in the storage, at all ranks."""
        token = CancelToken(self.timeout_s)
        ranks = RankGroup(as_coordinator(None) if is_alone else self.coordinator, token, kind)
        self.is_root = ranks.is_root

        async def nothing() -> bytes:
            return b""

        async def find(replies: list[bytes]) -> bytes:
            storage = bounded(self.storage, token)
            return msgspec.msgpack.encode(await run_in_thread(partial(act, storage, token), token))

        found: T = msgspec.msgpack.decode(await ranks.decide(nothing, find), type=result)
        return found
