"""Blocking calls: `save`, `load`, and `BlockingCheckpoint` for scripts without an event loop.

They also work in a thread that runs an event loop, and block that loop meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio

from forged.blocking.facade import BlockingFacade, blocking
from forged.checkpoint.checkpoint import DistributedCheckpoint, agreed, require_same_save
from forged.checkpoint.errors import ExceptionType
from forged.checkpoint.loading.loader import Loaded, load_state, require_small
from forged.checkpoint.model import (
    CHAIN_MAX,
    DEFAULT_TIMEOUT_S,
    CheckpointFormat,
    CompressionLevel,
    LoadOptions,
    SaveOptions,
)
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.rank_group import RankGroup, as_coordinator
from forged.checkpoint.rng import Generators
from forged.checkpoint.run_checkpoints import AsyncCheckpoints
from forged.checkpoint.saving.pipeline import save_state
from forged.checkpoint.stateful import adopt, contains_stateful, values_of
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.checkpoint.storage.listing import read_manifest
from forged.checkpoint.storage.locations import storage_at
from forged.checkpoint.thread_calls import WAKE_INTERVAL_S, drive, run_read
from forged.leaf_types import LeafType
from forged.logger_adapter import SCRIPT_LOG

R = TypeVar("R")


class BlockingCheckpoint(BlockingFacade[DistributedCheckpoint]):
    """A `DistributedCheckpoint` whose calls return when they are done."""

    save = blocking(DistributedCheckpoint.save)
    save_model_only = blocking(DistributedCheckpoint.save_model_only)
    save_async = blocking(DistributedCheckpoint.save_async)
    keep_in_memory = blocking(DistributedCheckpoint.keep_in_memory)
    prepare = blocking(DistributedCheckpoint.prepare)
    load = blocking(DistributedCheckpoint.load)
    list_checkpoints = blocking(DistributedCheckpoint.list_checkpoints)
    delete_checkpoint = blocking(DistributedCheckpoint.delete_checkpoint)
    close = blocking(DistributedCheckpoint.close)

    def __init__(self, checkpoint: DistributedCheckpoint) -> None:
        self.checkpoint = checkpoint

    def _run(self, call: Callable[[DistributedCheckpoint], Awaitable[R]]) -> R:
        return run(lambda: call(self.checkpoint), is_alone=self.checkpoint.is_single_process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Checkpoints(BlockingFacade[AsyncCheckpoints]):
    """The checkpoints of a training run in one folder: saves every so many steps, keeps the newest, resumes.

    with forged.checkpoint.Checkpoints("checkpoints", every=500, keep=3) as checkpoints:
        for step in range(checkpoints.resume(state), 100_000):
            checkpoints.save(step, state)
            train(state)
    """

    resume = blocking(AsyncCheckpoints.resume)
    save = blocking(AsyncCheckpoints.save)
    latest = blocking(AsyncCheckpoints.latest)
    close = blocking(AsyncCheckpoints.close)

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
        generators: Generators | None = None,
        logger: Any = SCRIPT_LOG,
    ) -> None:
        """`where` is a directory or the URL of a folder. Every `every`-th step is saved, and after `every_seconds`, and
        with `automatic` at the interval that loses least time; without any of them, every step. The newest `keep`
        checkpoints are kept; None keeps all. With `ranks`, such as a worker of a job, all ranks call this together.

        Every `memory_every`-th step is copied into memory of the host that outlives the workers, as far as the daemon
        has slots for them; the daemon writes the last copy to disk when a worker fails.

        With `incremental`, a checkpoint has only the chunks that the latest one of this process lacks. A restore reads
        from at most `chain_max` checkpoints, and no more are kept for it; one that would need more of them is full.
        """
        self.aio = AsyncCheckpoints(
            where,
            every=every,
            every_seconds=every_seconds,
            automatic=automatic,
            keep=keep,
            ranks=ranks,
            in_background=in_background,
            memory_every=memory_every,
            incremental=incremental,
            chain_max=chain_max,
            timeout=timeout,
            leaf_types=leaf_types,
            generators=generators,
            logger=logger,
        )
        """The asynchronous object behind this one."""

    def is_due(self, step: int) -> bool:
        """Whether `save` saves this step. Where time decides, whether it asks rank 0 after this step."""
        return self.aio.is_due(step)

    def _run(self, call: Callable[[AsyncCheckpoints], Awaitable[R]]) -> R:
        return run(lambda: call(self.aio), is_alone=self.aio.is_single_process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def save(
    where: str | os.PathLike[str],
    state: Any,
    *,
    ranks: Any = None,
    format: CheckpointFormat | str = CheckpointFormat.MULTI_SHARD,  # noqa: A002 - as the options call it
    compression_level: CompressionLevel | str = CompressionLevel.NONE,
    custom_metadata: Mapping[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    leaf_types: Sequence[LeafType] = (),
    step: int | None = None,
    epoch: int | None = None,
) -> str:
    """Save a state durably at a path or URL: nested dicts, lists and tuples of arrays, plain values, and objects with
    `state_dict`.

    `step` and `epoch` appear in listings. With `ranks`, such as a worker of a job, all ranks call this together, each
    with its part of the state.
    """
    storage, prefix = _storage_with_retries(where)
    options = SaveOptions(
        prefix,
        format,
        compression_level,
        custom_metadata=custom_metadata or {},
        timeout=timeout,
        step=step,
        epoch=epoch,
    )

    async def save_with_ranks() -> str:
        token = CancelToken(timeout)
        group = RankGroup(as_coordinator(ranks), token, ExceptionType.SAVE_FAILED)
        group.prefix = prefix
        return await save_state(storage, group, state, options, token, leaf_types)

    return run(save_with_ranks, is_alone=ranks is None)


def load(
    where: str | os.PathLike[str],
    into: Any = None,
    *,
    ranks: Any = None,
    only: str | Sequence[str] = (),
    strict: bool = True,
    timeout: float = DEFAULT_TIMEOUT_S,
    leaf_types: Sequence[LeafType] = (),
) -> Any:
    """Load a state from a path or URL, into the arrays of `into` if given. Every byte is verified.

    Objects of `into` with `load_state_dict` receive their part; then `into` itself is filled and returned. `only`
    selects tensors by name or pattern. With `ranks`, all ranks call this together; if one fails, all raise.
    """
    storage, prefix = _storage_with_retries(where)
    options = LoadOptions(prefix, only=only, strict_mode=strict, timeout=timeout)

    async def load_with_ranks() -> Any:
        token = CancelToken(timeout)
        group = RankGroup(as_coordinator(ranks), token, ExceptionType.LOAD_FAILED)
        group.prefix = prefix
        results: list[Loaded] = []
        has_objects = contains_stateful(into)

        def load(token: CancelToken) -> bytes:
            manifest = read_manifest(bounded(storage, token), prefix)
            require_small(manifest, token)
            loaded = load_state(
                storage,
                manifest,
                values_of(into) if has_objects else into,
                rank=group.rank,
                world_size=group.world_size,
                options=options,
                token=token,
                leaf_types=leaf_types,
            )
            results.append(loaded)
            return manifest.save_id.encode()

        async def give() -> bytes:
            adopt(into, results[0].state)
            return b""

        await group.decide(lambda: run_read(load, token), require_same_save)
        if not has_objects:
            return results[0].state
        await group.decide(give, agreed)
        return into

    return run(load_with_ranks, is_alone=ranks is None)


def _storage_with_retries(where: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The storage, with transient failures retried, and the checkpoint's name in it."""
    storage, prefix = storage_at(where)
    return FaultToleranceHandler(storage).guard(storage), prefix


def run(call: Callable[[], Awaitable[R]], *, is_alone: bool = False) -> R:
    """Run an async call to its end, in another thread if this one runs an event loop.

    A call in which no other rank takes part needs no event loop.
    """
    if is_alone:
        return drive(call)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_in_loop(call)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_run_in_loop, call).result()


def _run_in_loop(call: Callable[[], Awaitable[R]]) -> R:
    # Asyncio formats its main task with the task's result, which may be a state of many arrays; so there is none.
    results: list[R] = []

    async def awaited() -> None:
        with _waking(asyncio.get_running_loop()):
            results.append(await call())

    anyio.run(awaited)
    return results[0]


@contextmanager
def _waking(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Wake the loop periodically, because a signal just before the loop waits is handled only when it wakes."""
    timers: list[asyncio.TimerHandle] = []

    def wake() -> None:
        timers[:] = [loop.call_later(WAKE_INTERVAL_S, wake)]

    wake()
    try:
        yield
    finally:
        timers[0].cancel()
