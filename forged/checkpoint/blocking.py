"""Checkpoints for scripts without an event loop.

Law: each call does what its asynchronous twin does, and returns when that has. It can be called where an event loop
runs, too, and then holds that up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio

from forged.checkpoint.checkpoint import CheckpointLoadResult, DistributedCheckpoint, require_same_save
from forged.checkpoint.coordinators import RankGroup, as_coordinator, run_in_thread
from forged.checkpoint.errors import ExceptionType
from forged.checkpoint.format.tree import LeafType
from forged.checkpoint.loading.loader import load_state
from forged.checkpoint.model import (
    DEFAULT_TIMEOUT_S,
    CheckpointFormat,
    CheckpointInfo,
    CompressionLevel,
    LoadOptions,
    SaveOptions,
)
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.saving.background import SaveHandle
from forged.checkpoint.saving.pipeline import save_state
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.checkpoint.storage.listing import read_manifest
from forged.checkpoint.storage.locations import storage_at

T = TypeVar("T")

WAKE_INTERVAL_S = 0.2
"""How late an interrupt may be heard."""


class BlockingCheckpoint:
    """A `DistributedCheckpoint` whose calls return when they are done."""

    def __init__(self, checkpoint: DistributedCheckpoint) -> None:
        self.checkpoint = checkpoint

    def save(self, model: Any, optimizer: Any = None, options: SaveOptions | None = None) -> str:
        """Save; returns the prefix when the checkpoint is there and durable."""
        return run(partial(self.checkpoint.save, model, optimizer, options))

    def save_model_only(self, model: Any, options: SaveOptions | None = None) -> str:
        """Save without an optimizer."""
        return run(partial(self.checkpoint.save_model_only, model, options))

    def save_async(self, model: Any, optimizer: Any = None, options: SaveOptions | None = None) -> SaveHandle:
        """Copy the state, and save it while training goes on; `result()` of the handle waits for the end."""
        return run(partial(self.checkpoint.save_async, model, optimizer, options))

    def prepare(self, model: Any, optimizer: Any = None, options: SaveOptions | None = None) -> None:
        """Have the memory ready that the first `save_async` of this state copies it into."""
        run(partial(self.checkpoint.prepare, model, optimizer, options))

    def load(
        self, model: Any = None, optimizer: Any = None, options: LoadOptions | None = None
    ) -> CheckpointLoadResult:
        """Load into the model and the optimizer; without them, what was saved is in the result."""
        return run(partial(self.checkpoint.load, model, optimizer, options))

    def list_checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints in the storage, the oldest first."""
        return run(self.checkpoint.list_checkpoints)

    def delete_checkpoint(self, checkpoint_prefix: str) -> None:
        """Have a checkpoint no more."""
        run(partial(self.checkpoint.delete_checkpoint, checkpoint_prefix))

    def close(self) -> None:
        """Wait for the saves in the background, and raise what they have met."""
        run(self.checkpoint.close)

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
) -> str:
    """Save a state at a path or URL, durably: nested dicts, lists and tuples of arrays and plain values.

    With `ranks`, such as a worker of a job, all of them call this together, each with what it has.
    """
    storage, prefix = _patient(where)
    options = SaveOptions(prefix, format, compression_level, custom_metadata=custom_metadata or {}, timeout=timeout)

    async def all_of_it() -> str:
        token = CancelToken(timeout)
        together = RankGroup(as_coordinator(ranks), token, ExceptionType.SAVE_FAILED)
        together.prefix = prefix
        return await save_state(storage, together, state, options, token, leaf_types)

    return run(all_of_it)


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
    """Load a state from a path or URL; into the arrays of `into`, where that is given. Every byte is verified.

    `only` names tensors or patterns of them. With `ranks`, each of them loads what it wants, and all fail if one does.
    """
    storage, prefix = _patient(where)
    options = LoadOptions(prefix, only=only, strict_mode=strict, timeout=timeout)

    async def all_of_it() -> Any:
        token = CancelToken(timeout)
        together = RankGroup(as_coordinator(ranks), token, ExceptionType.LOAD_FAILED)
        together.prefix = prefix
        return await load_together(together, token)

    async def load_together(together: RankGroup, token: CancelToken) -> Any:
        found: list[Any] = []

        async def read() -> bytes:
            manifest = await run_in_thread(lambda: read_manifest(bounded(storage, token), prefix), token)
            loaded = await run_in_thread(
                lambda: load_state(
                    storage,
                    manifest,
                    into,
                    rank=together.rank,
                    world_size=together.world_size,
                    options=options,
                    token=token,
                    leaf_types=leaf_types,
                ),
                token,
            )
            found.append(loaded.state)
            return manifest.save_id.encode()

        await together.decide(read, require_same_save)
        return found[0]

    return run(all_of_it)


def _patient(where: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The storage that is meant, whose passing failures are waited out, and the name of the checkpoint there."""
    storage, prefix = storage_at(where)
    return FaultToleranceHandler(storage).guard(storage), prefix


def run(call: Callable[[], Awaitable[T]]) -> T:
    """Run something to its end, whether this thread has an event loop already or not."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.run(_awaited, call)
    with ThreadPoolExecutor(1) as another:
        return another.submit(anyio.run, _awaited, call).result()


async def _awaited(call: Callable[[], Awaitable[T]]) -> T:
    with _waking(asyncio.get_running_loop()):
        return await call()


@contextmanager
def _waking(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Wake the loop now and then: an interrupt that comes right before it begins to wait is heard then."""
    timers: list[asyncio.TimerHandle] = []

    def wake() -> None:
        timers[:] = [loop.call_later(WAKE_INTERVAL_S, wake)]

    wake()
    try:
        yield
    finally:
        timers[0].cancel()
