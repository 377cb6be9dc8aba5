"""`DistributedCheckpoint`: what a training script saves and loads with.

Law: all ranks make the same calls in the same order. A call returns when all have succeeded, or raises at all of them;
what a save in the background has met is raised at the next call, if nobody has asked before.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
from anyio import to_thread

from forged.checkpoint import rng
from forged.checkpoint.coordinators import RankGroup, as_coordinator, run_in_thread
from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.format.manifest import Fence, Manifest
from forged.checkpoint.format.tree import INTEGER_MAX, LeafType
from forged.checkpoint.loading.loader import Loaded, load_state
from forged.checkpoint.model import (
    DEFAULT_TIMEOUT_S,
    CheckpointInfo,
    LoadOptions,
    RepairedChunk,
    SaveOptions,
    StorageOptions,
    check_prefix,
    check_timeout,
)
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.saving.background import BackgroundSaver, SaveHandle
from forged.checkpoint.saving.pipeline import RankSave, RunInfo, SaveContext, Saver
from forged.checkpoint.saving.staging import StagingMemory
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.checkpoint.storage.locations import create_storage
from forged.checkpoint.verification.validator import CheckpointValidator, CompatibilityChecker, IntegrityChecker
from forged.log import SILENT, Log
from forged.retry import RetryPolicy

MODEL = "model"
OPTIMIZER = "optimizer"
RNG = "rng"


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Where checkpoints lie, and how they are treated."""

    storage: StorageOptions = field(default_factory=StorageOptions)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    integrity_checkers: Sequence[IntegrityChecker] = ()
    compatibility_checkers: Sequence[CompatibilityChecker] = ()
    default_timeout: float = DEFAULT_TIMEOUT_S
    """Seconds."""

    def __post_init__(self) -> None:
        check_timeout(self.default_timeout, "default_timeout")


@dataclass(frozen=True, slots=True)
class CheckpointLoadResult:
    """What was loaded."""

    metadata: Manifest
    model_state: Any
    optimizer_state: Any
    source_world_size: int
    target_world_size: int
    was_resharded: bool
    missing: tuple[str, ...] = ()
    """What the state has and the checkpoint has not; only without `strict_mode`."""
    unexpected: tuple[str, ...] = ()
    """What the checkpoint has and the state has not."""
    mismatched: tuple[str, ...] = ()
    """What differs in shape or type."""
    repaired: tuple[RepairedChunk, ...] = ()
    """Bad chunks in whose place healthy copies were read."""


class DistributedCheckpoint:
    """Saves and loads the state of a training, by all of its ranks together."""

    def __init__(
        self,
        coordinator: Any = None,
        storage: Storage | None = None,
        fault_handler: FaultToleranceHandler | None = None,
        validator: CheckpointValidator | None = None,
        logger: Log = SILENT,
        *,
        default_timeout: float = DEFAULT_TIMEOUT_S,
        leaf_types: Sequence[LeafType] = (),
        generators: rng.Generators | None = None,
        wall: Callable[[], float] = time.time,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`coordinator` has rank, world_size, barrier, gather and broadcast, as a worker has; None: one process.

        `generators` are random generators whose states are saved besides those of `random` and numpy.
        """
        if isinstance(storage, str | os.PathLike):
            raise invalid(
                f"storage = {str(storage)!r} is no storage",
                "give create_storage(StorageOptions('local', {'base_path': ...}))",
                code="checkpoint_storage_invalid",
            )
        self.storage = create_storage(StorageOptions()) if storage is None else storage
        self._faults = fault_handler or FaultToleranceHandler(self.storage)
        self._storage = self._faults.guard(self.storage)
        self._validator = validator or CheckpointValidator(self._storage)
        self._coordinator = as_coordinator(coordinator)
        check_timeout(default_timeout, "default_timeout")
        self._timeout_s = default_timeout
        self._leaf_types = tuple(leaf_types)
        self._generators: rng.Generators = dict(generators or {})
        self._log = logger
        self._staging = StagingMemory()
        self._saving = Saver(SaveContext(self._storage, wall, draw, self._leaf_types, logger))
        self._background: BackgroundSaver | None = None

    # Saving.

    async def save(self, model: Any, optimizer: Any = None, options: SaveOptions | None = None) -> str:
        """Save; returns the prefix when the checkpoint is there and durable."""
        options = options or SaveOptions()
        token, ranks = self._begin(options.timeout, ExceptionType.SAVE_FAILED, options.checkpoint_prefix)

        async def state() -> dict[str, Any]:
            if self._background is not None:
                await self._background.wait_idle(token)
            return self._state(model, optimizer, options)

        work = await self._saving.agree(ranks, state, options)
        prefix = await self._saving.write_and_publish(ranks, work, self._about(), token)
        self._log.info("a checkpoint was saved", prefix=prefix, rank=ranks.rank, size=work.image.size)
        return prefix

    async def save_model_only(self, model: Any, options: SaveOptions | None = None) -> str:
        """Save without an optimizer."""
        return await self.save(model, None, options)

    async def save_async(self, model: Any, optimizer: Any = None, options: SaveOptions | None = None) -> SaveHandle:
        """Copy the state, and save it while training goes on."""
        options = options or SaveOptions()
        token, ranks = self._begin(options.timeout, ExceptionType.SAVE_FAILED, options.checkpoint_prefix)
        background = self._in_background()
        has_slot, work = False, None

        async def state() -> dict[str, Any]:
            nonlocal has_slot
            await background.take_slot(options.when_busy, token)
            has_slot = True
            return self._state(model, optimizer, options)

        try:
            work = await self._saving.agree(ranks, state, options)
            await self._saving.stage(ranks, work, self._staging)
            return background.start(work, self._about(), token)
        except BaseException:
            if work is not None:
                self._unstage(work)
            if has_slot:
                background.free_slot()
            raise

    async def prepare(self, model: Any, optimizer: Any = None, options: SaveOptions | None = None) -> None:
        """Have the memory ready that the first `save_async` of this state copies it into."""
        options = replace(options or SaveOptions(), checkpoint_prefix=None)
        token, ranks = self._begin(options.timeout, ExceptionType.SAVE_FAILED, None)

        async def state() -> dict[str, Any]:
            return self._state(model, optimizer, options)

        work = await self._saving.agree(ranks, state, options)

        async def touch() -> bytes:
            await run_in_thread(partial(self._staging.prepare, work.image.size, token), token)
            return b""

        await ranks.decide(touch, _agreed)

    # Loading.

    async def load(
        self, model: Any = None, optimizer: Any = None, options: LoadOptions | None = None
    ) -> CheckpointLoadResult:
        """Load into the model and the optimizer; without them, what was saved is in the result."""
        options = options or LoadOptions()
        if not options.checkpoint_prefix:
            raise invalid(
                "checkpoint_prefix is missing", "say which checkpoint to load", code="checkpoint_prefix_missing"
            )
        prefix = check_prefix(options.checkpoint_prefix)
        token, ranks = self._begin(options.timeout, ExceptionType.LOAD_FAILED, prefix)
        found: list[tuple[Manifest, Loaded]] = []

        async def read() -> bytes:
            self._raise_failure()
            found.append(
                await run_in_thread(partial(self._load, prefix, model, optimizer, options, ranks, token), token)
            )
            return found[0][0].save_id.encode()

        async def hand_over() -> bytes:
            self._hand_over(found[0][1].state, model, optimizer, options)
            return b""

        await ranks.decide(read, require_same_save)
        await ranks.decide(hand_over, _agreed)
        manifest, loaded = found[0]
        return CheckpointLoadResult(
            metadata=manifest,
            model_state=loaded.state.get(MODEL),
            optimizer_state=loaded.state.get(OPTIMIZER),
            source_world_size=manifest.world_size,
            target_world_size=ranks.world_size,
            was_resharded=manifest.world_size != ranks.world_size,
            missing=loaded.missing,
            unexpected=loaded.unexpected,
            mismatched=loaded.mismatched,
            repaired=loaded.repaired,
        )

    def _manifest(self, prefix: str, options: LoadOptions, token: CancelToken) -> Manifest:
        """What is to be loaded. Where there is none, reading it says why, and how to mend it; a walk only that."""
        result = None if options.skip_validation else self._validator.validate_before_load(prefix, token)
        manifest = None if result is None else result.manifest
        if manifest is None:
            manifest = listing.read_manifest(bounded(self._storage, token), prefix)
        if result is not None:
            result.require_valid(prefix)
            if result.has_warnings:
                self._log.warning("a checkpoint has faults", prefix=prefix, found=result.get_summary())
        return manifest

    def _load(
        self, prefix: str, model: Any, optimizer: Any, options: LoadOptions, ranks: RankGroup, token: CancelToken
    ) -> tuple[Manifest, Loaded]:
        manifest = self._manifest(prefix, options, token)
        into: dict[str, Any] = {}
        if model is not None:
            into[MODEL] = _state_of(model, MODEL)
        if optimizer is not None and options.load_optimizer:
            into[OPTIMIZER] = _state_of(optimizer, OPTIMIZER)
        sections = {MODEL, *([OPTIMIZER] if options.load_optimizer else []), *([RNG] if options.load_rng_state else [])}
        loaded = load_state(
            self._storage,
            manifest,
            into or None,
            rank=ranks.rank,
            world_size=ranks.world_size,
            options=options,
            token=token,
            leaf_types=self._leaf_types,
            sections=sections,
        )
        return manifest, loaded

    def _hand_over(self, state: Mapping[str, Any], model: Any, optimizer: Any, options: LoadOptions) -> None:
        if model is not None and MODEL in state and hasattr(model, "load_state_dict"):
            model.load_state_dict(state[MODEL])
        if optimizer is not None and OPTIMIZER in state and hasattr(optimizer, "load_state_dict"):
            optimizer.load_state_dict(state[OPTIMIZER])
        if options.load_rng_state and state.get(RNG):
            rng.restore(state[RNG], self._generators)

    # What there is.

    async def list_checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints in the storage, the oldest first."""
        self._raise_failure()

        def infos() -> list[CheckpointInfo]:
            storage = bounded(self._storage, CancelToken(self._timeout_s))
            known = (manifest for _, manifest in listing.manifests(storage))
            found = [listing.info_of(manifest) for manifest in known if isinstance(manifest, Manifest)]
            return sorted(found, key=lambda info: (info.timestamp, info.prefix))

        return await run_in_thread(infos, CancelToken(self._timeout_s))

    async def delete_checkpoint(self, checkpoint_prefix: str) -> None:
        """Have a checkpoint no more."""
        prefix = check_prefix(checkpoint_prefix)
        token, ranks = self._begin(None, ExceptionType.STORAGE_ERROR, prefix)

        async def come() -> bytes:
            self._raise_failure()
            return b""

        async def delete(said: list[bytes]) -> bytes:
            await run_in_thread(partial(listing.delete, bounded(self._storage, token), prefix), token)
            return b""

        await ranks.decide(come, delete)

    # The end.

    async def close(self) -> None:
        """Wait for the saves in the background, raise what they have met, and let go of the memory."""
        if self._background is not None:
            background, self._background = self._background, None
            await to_thread.run_sync(background.close)
            self._staging.close()
            _raise_all(background)
        self._staging.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Inside.

    def _state(self, model: Any, optimizer: Any, options: SaveOptions) -> dict[str, Any]:
        """What is saved. Raises what an earlier save has met, where the other ranks learn of it."""
        self._raise_failure()
        state = {MODEL: _state_of(model, MODEL)}
        if optimizer is not None and options.include_optimizer:
            state[OPTIMIZER] = _state_of(optimizer, OPTIMIZER)
        if options.include_rng_state:
            state[RNG] = rng.capture(self._generators)
        return state

    def _begin(self, timeout: float | None, kind: ExceptionType, prefix: str | None) -> tuple[CancelToken, RankGroup]:
        token = CancelToken(self._timeout_s if timeout is None else timeout)
        ranks = RankGroup(self._coordinator, token, kind)
        ranks.prefix = prefix or ""
        return token, ranks

    def _about(self) -> RunInfo:
        """What is known of the run."""
        said = self._coordinator
        job, generation = getattr(said, "job", ""), _count(getattr(said, "generation", None))
        fence = None if generation is None else Fence(_count(getattr(said, "term", 0)) or 0, generation)
        return RunInfo(job if isinstance(job, str) else "", _count(getattr(said, "step", None)), fence)

    def _in_background(self) -> BackgroundSaver:
        if self._background is None:
            self._background = BackgroundSaver(self._saving, self._storage, self._unstage, self._members, self._log)
        return self._background

    def _members(self) -> tuple[str, ...]:
        """The names of the ranks that there are now, with their addresses; none where ranks have no names.

        Who has died and come back has its name, but knows nothing of what it was doing.
        """
        topology = getattr(self._coordinator, "current_topology", None)
        return tuple(map(str, getattr(topology, "workers", ())))

    def _unstage(self, work: RankSave) -> None:
        staged, work.staged = work.staged, None
        if staged is not None:
            self._staging.unstage(staged)

    def _raise_failure(self) -> None:
        failure = None if self._background is None else self._background.failure()
        if failure is not None:
            raise failure


def create_checkpoint(coordinator: Any = None, options: CheckpointOptions | None = None) -> DistributedCheckpoint:
    """A `DistributedCheckpoint` as the options say."""
    options = options or CheckpointOptions()
    storage = create_storage(options.storage)
    faults = FaultToleranceHandler(storage, options.retry_policy, random.random)
    validator = CheckpointValidator(storage, options.integrity_checkers, options.compatibility_checkers)
    return DistributedCheckpoint(coordinator, storage, faults, validator, default_timeout=options.default_timeout)


def _count(said: Any) -> int | None:
    """A number as somebody's coordinator says it, if a manifest can hold it."""
    is_number = isinstance(said, int | np.integer) and not isinstance(said, bool)
    return int(said) if is_number and 0 <= said < INTEGER_MAX else None


def _state_of(given: Any, name: str) -> Any:
    """The state of what has one, or what was given, where that is a state itself."""
    if callable(getattr(given, "state_dict", None)):
        return given.state_dict()
    if isinstance(given, Mapping | list | tuple):
        return given
    raise invalid(
        f"the {name} is a {type(given).__name__}", "give it state_dict and load_state_dict, or give a dict of its state"
    )


def _raise_all(background: BackgroundSaver) -> None:
    """Raise what went wrong in the first save of which nobody was told; it tells of the others."""
    failure = background.failure()
    if failure is not None:
        while (other := background.failure()) is not None:
            failure.add_note(str(other))
        raise failure


async def require_same_save(said: list[bytes]) -> bytes:
    """Refuse it when the ranks have loaded different saves, because the name was given anew in between."""
    if len(set(said)) > 1:
        raise CheckpointException(
            "the checkpoint was replaced while it was loaded, and some ranks have the old one",
            type=ExceptionType.LOAD_FAILED,
            code="checkpoint_replaced",
            fix="load it again",
            retryable=True,
        )
    return b""


async def _agreed(said: list[bytes]) -> bytes:
    return b""
