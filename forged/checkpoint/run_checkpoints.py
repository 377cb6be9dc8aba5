"""The checkpoints of a training run in one folder: saved when they are due, resumed from, deleted when superseded.

Invariants:
- All ranks make the same calls; rank 0 chooses names, candidates and what is deleted.
- A run resumes from the newest checkpoint that can be restored. Where checkpoints exist and none can be restored, it
  does not start anew without an error.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Self, SupportsFloat

from forged.catalog.cadence import CadencePolicy
from forged.checkpoint import rng
from forged.checkpoint.checkpoint import DistributedCheckpoint
from forged.checkpoint.errors import invalid
from forged.checkpoint.model import (
    CHAIN_MAX,
    DEFAULT_TIMEOUT_S,
    CheckpointInfo,
    check_count,
    check_positive,
    check_timeout,
)
from forged.checkpoint.ports import CancelToken, bounded
from forged.checkpoint.rank_group import as_coordinator
from forged.checkpoint.run import retention
from forged.checkpoint.run.context import RunContext
from forged.checkpoint.run.restorable import first_restorable
from forged.checkpoint.run.resuming import RunResumption
from forged.checkpoint.run.save_schedule import SaveSchedule
from forged.checkpoint.run.saves import RunSaves, SaveSettings
from forged.checkpoint.run.superseded import SupersededCheckpoints
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.checkpoint.storage.locations import root_at
from forged.checkpoint.thread_calls import run_in_thread
from forged.leaf_types import LeafType
from forged.logger_adapter import SCRIPT_LOG, as_log


class AsyncCheckpoints:
    """The checkpoints of a training run; asynchronous. `Checkpoints` is the same for scripts without an event loop."""

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        every: int | None = None,
        every_seconds: float | None = None,
        automatic: bool = False,
        keep: int | None = None,
        ranks: Any = None,
        in_background: bool = False,
        memory_every: int | None = None,
        incremental: bool = False,
        chain_max: int = CHAIN_MAX,
        timeout: float = DEFAULT_TIMEOUT_S,
        leaf_types: Sequence[LeafType] = (),
        generators: rng.Generators | None = None,
        logger: Any = SCRIPT_LOG,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`where` is a directory or the URL of a folder. Every `every`-th step is saved, and after `every_seconds`, and
        with `automatic` at the interval that loses least time; without any of them, every step. The newest `keep`
        checkpoints are kept; None keeps all. With `ranks`, such as a worker of a job, all ranks call this together.

        Every `memory_every`-th step is copied into memory of the host that outlives the workers, as far as the daemon
        has slots for them; the daemon writes the last copy to disk when a worker fails.

        With `incremental`, a checkpoint has only the chunks that the latest one of this process lacks. A restore reads
        from at most `chain_max` checkpoints, and no more are kept for it; one that would need more of them is full.
        """
        check_timeout(timeout)
        schedule = SaveSchedule(_policy(every, every_seconds, automatic), monotonic())
        settings = SaveSettings(
            keep=_positive_or_none("keep", keep),
            in_background=in_background,
            memory_every=_positive_or_none("memory_every", memory_every),
            incremental=incremental,
            chain_max=check_positive("chain_max", chain_max),
        )
        storage, log = root_at(where), as_log(logger)
        faults = FaultToleranceHandler(storage)
        of_state = partial(DistributedCheckpoint, logger=log, leaf_types=leaf_types)
        make = partial(of_state, storage=storage, fault_handler=faults, default_timeout=timeout, generators=generators)
        self._checkpoint = checkpoint = make(ranks)
        checkpoint.keep = settings.keep
        self._context = context = RunContext(
            faults.guard(storage), ranks, as_coordinator(ranks), timeout, log, monotonic
        )
        superseded = SupersededCheckpoints(context.storage, log)
        self._resumption = RunResumption(context, checkpoint, make(None), partial(of_state, None), superseded)
        self._saves = RunSaves(context, settings, schedule, checkpoint, superseded)

    @property
    def is_single_process(self) -> bool:
        """Whether no other rank takes part."""
        return self._checkpoint.is_single_process

    async def resume(self, state: Any) -> int:
        """Load the newest checkpoint that can be restored into `state`; returns its step, 0 if there is none.

        A worker that has not entered a world loads by itself, and continues from that step. `state` is filled in
        place: a dict of arrays, plain values and objects with `state_dict` and `load_state_dict`, or such an object.
        """
        resumed = await self._resumption.resume(state)
        if resumed is None:
            return 0
        self._saves.begin(resumed)
        return resumed.step

    async def latest(self) -> CheckpointInfo | None:
        """The newest checkpoint of the run whose files are there with the right sizes; None if there is none."""
        token = CancelToken(self._context.timeout_s)

        def find() -> CheckpointInfo | None:
            storage = bounded(self._context.storage, token)
            return first_restorable(storage, token, retention.newest_first(listing.prefixes(storage)))

        return await run_in_thread(find, token)

    def is_due(self, step: int) -> bool:
        """Whether `save` saves this step. Where time decides, whether it asks rank 0 after this step."""
        return self._saves.is_due(step)

    async def save(
        self,
        step: int,
        state: Any,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, SupportsFloat] = MappingProxyType({}),
        force: bool = False,
    ) -> str | None:
        """Save the state after `step` steps if that step is due, or with `force`; returns the checkpoint's name.

        The checkpoint that this run has just resumed from, or saved, is not saved again. With `in_background` this
        returns when the state is copied.
        """
        return await self._saves.save(check_count("step", step), state, epoch, metrics, force=force)

    async def close(self) -> None:
        """Wait for background saves, raise their failures, and delete what they supersede."""
        await self._saves.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _positive_or_none(name: str, number: int | None) -> int | None:
    return None if number is None else check_positive(name, number)


def _policy(every: Any, every_seconds: Any, automatic: bool) -> CadencePolicy:
    steps = None if every is None else check_positive("every", every)
    if steps is None and every_seconds is None and not automatic:
        steps = 1
    if every_seconds is not None and not (isinstance(every_seconds, int | float) and 0.0 < every_seconds < math.inf):
        raise invalid(f"every_seconds must be above 0 seconds or None, got {every_seconds!r}")
    return CadencePolicy(every_steps=steps, every_seconds=every_seconds, automatic=automatic)
