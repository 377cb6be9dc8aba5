"""`DistributedCheckpoint`: saves and loads the state of a training job, with all of its ranks together.

Invariants:
- All ranks make the same calls in the same order.
- A call returns when all ranks succeeded, or raises at all of them.
- The failure of a background save is raised at the next call, unless its handle was asked before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from forged.checkpoint import rng
from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.format.manifest import Manifest, ManifestFence
from forged.checkpoint.format.tree import INTEGER_MAX
from forged.checkpoint.loading.loader import OPTIMIZER, RNG, Loaded, load_state, require_small
from forged.checkpoint.model import (
    DEFAULT_TIMEOUT_S,
    CheckpointInfo,
    LoadOptions,
    RepairedChunk,
    SaveOptions,
    StorageOptions,
    WhenBusy,
    check_prefix,
    check_timeout,
    is_stateful,
)
from forged.checkpoint.ports import CancelToken, ObservedSave, SaveObserver, Storage, bounded
from forged.checkpoint.rank_group import RankGroup, SingleProcess, as_coordinator
from forged.checkpoint.saving.background import BUSY, BackgroundSaver, SaveHandle
from forged.checkpoint.saving.files.slots import Slots
from forged.checkpoint.saving.files.staging import StagingMemory
from forged.checkpoint.saving.pipeline import SaveContext, Saver
from forged.checkpoint.saving.publication import EXISTS
from forged.checkpoint.saving.rank_save import RankSave, RunInfo
from forged.checkpoint.saving.save_report import SaveReport
from forged.checkpoint.stateful import ScriptState, values_of
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.ancestry import AncestryCache
from forged.checkpoint.storage.fault_handler import FaultToleranceHandler
from forged.checkpoint.storage.locations import create_storage
from forged.checkpoint.thread_calls import run_in_thread, run_read, wait_in_thread
from forged.checkpoint.thread_pool import THREADS
from forged.checkpoint.verification.validator import (
    SHOWN_MAX,
    CheckpointValidator,
    CompatibilityChecker,
    IntegrityChecker,
)
from forged.leaf_types import LeafType
from forged.logger_adapter import as_log
from forged.retry import RetryPolicy

MODEL = "model"
SECTIONS = (MODEL, OPTIMIZER, RNG)


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Where checkpoints are stored and how they are handled."""

    storage: StorageOptions = field(default_factory=StorageOptions)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    integrity_checkers: Sequence[IntegrityChecker] = ()
    compatibility_checkers: Sequence[CompatibilityChecker] = ()
    default_timeout: float = DEFAULT_TIMEOUT_S
    """In seconds."""

    def __post_init__(self) -> None:
        check_timeout(self.default_timeout, "default_timeout")


@dataclass(frozen=True, slots=True)
class CheckpointLoadResult:
    """The result of a load."""

    metadata: Manifest
    model_state: Any
    optimizer_state: Any
    source_world_size: int
    target_world_size: int
    was_resharded: bool
    missing: tuple[str, ...] = ()
    """Tensors that the state has and the checkpoint lacks; only without `strict_mode`."""
    unexpected: tuple[str, ...] = ()
    """Tensors that the checkpoint has and the state lacks."""
    mismatched: tuple[str, ...] = ()
    """Tensors whose shape or type differs."""
    repaired: tuple[RepairedChunk, ...] = ()
    """Corrupt chunks that were read from a healthy copy."""
    bytes_read: int = 0
    """At this rank."""


class DistributedCheckpoint:
    """Saves and loads the state of a training job, with all of its ranks together."""

    def __init__(
        self,
        coordinator: Any = None,
        storage: Storage | None = None,
        fault_handler: FaultToleranceHandler | None = None,
        validator: CheckpointValidator | None = None,
        logger: Any = None,
        *,
        default_timeout: float = DEFAULT_TIMEOUT_S,
        leaf_types: Sequence[LeafType] = (),
        generators: rng.Generators | None = None,
        wall: Callable[[], float] = time.time,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`coordinator` has rank, world_size, barrier, gather and broadcast, as a worker has; None for one process.

        `logger` is one of `logging` or structlog; its errors fail no call. `generators` are random generators to save
        in addition to those of `random` and numpy.
        """
        if isinstance(storage, str | os.PathLike):
            raise invalid(
                f"storage must be a storage, got the path {str(storage)!r}",
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
        self._log = log = as_log(logger)
        slots = getattr(self._coordinator, "slots", None)
        self._staging = StagingMemory(slots=None if slots is None else Slots(slots, self._storage, THREADS))
        self._ancestries = AncestryCache()
        self._saving = Saver(SaveContext(self._storage, wall, draw, self._leaf_types, log, self._staging.slots))
        self._background: BackgroundSaver | None = None
        self.keep: int | None = None
        """How many checkpoints `Checkpoints` keeps, as the catalogue is told; None: all."""

    @property
    def is_single_process(self) -> bool:
        """Whether no other rank takes part."""
        return type(self._coordinator) is SingleProcess

    # Saving.

    async def save(self, model: Any, optimizer: Any = None, options: SaveOptions | None = None) -> str:
        """Save; returns the prefix when the checkpoint is durable."""
        options = options or SaveOptions()
        token, ranks = self._begin(options.timeout, ExceptionType.SAVE_FAILED, options.checkpoint_prefix)

        async def state() -> dict[str, Any]:
            if self._background is not None:
                await self._background.wait_idle(token)
            return self._state(model, optimizer, options)

        work = await self._saving.agree(ranks, state, options)
        run = self._run_info()
        self._report(work, run)
        prefix = await self._saving.write_and_publish(ranks, work, run, token)
        self._log.info("checkpoint saved", prefix=prefix, rank=ranks.rank, size=work.image.size)
        return prefix

    async def save_model_only(self, model: Any, options: SaveOptions | None = None) -> str:
        """Save without an optimizer."""
        return await self.save(model, None, options)

    async def save_async(self, model: Any, optimizer: Any = None, options: SaveOptions | None = None) -> SaveHandle:
        """Copy the state, and save it in the background while training continues."""
        return self._background_saver().start(*await self._staged(model, optimizer, options or SaveOptions()))

    async def _staged(
        self, model: Any, optimizer: Any, options: SaveOptions, *, in_slots_only: bool = False
    ) -> tuple[RankSave, RunInfo, CancelToken]:
        """The copied state, for which a place of the background saver is taken."""
        token, ranks = self._begin(options.timeout, ExceptionType.SAVE_FAILED, options.checkpoint_prefix)
        background = self._background_saver()
        has_slot, work = False, None

        async def state() -> dict[str, Any]:
            nonlocal has_slot
            await background.take_slot(options.when_busy, token)
            has_slot = True
            return self._state(model, optimizer, options)

        try:
            work = await self._saving.agree(ranks, state, options)
            run = self._run_info()
            if not in_slots_only:
                self._report(work, run)
            await self._saving.stage(ranks, work, self._staging, run, in_slots_only=in_slots_only)
        except BaseException as error:
            if work is not None:
                self._unstage(work)
                if work.report is not None:
                    work.report.failed(error)
            if has_slot:
                background.free_slot()
            raise
        return work, run, token

    async def keep_in_memory(self, model: Any, optimizer: Any = None, options: SaveOptions | None = None) -> bool:
        """Copy the state into slots of the ranks' hosts, without saving it; returns whether all ranks have slots.

        If a worker fails, its host's daemon saves the last state that all ranks have copied. Skipped, and false, while
        two saves are written, or if the checkpoint's name is taken.
        """
        options = replace(options or SaveOptions(), when_busy=WhenBusy.REFUSE)
        if self._staging.slots is None:
            return False
        try:
            work, _, _ = await self._staged(model, optimizer, options, in_slots_only=True)
        except CheckpointException as error:
            if error.code not in {BUSY, EXISTS}:
                raise
            return False
        self._unstage(work)
        self._background_saver().free_slot()
        return work.is_in_slots

    async def prepare(self, model: Any, optimizer: Any = None, options: SaveOptions | None = None) -> None:
        """Allocate and touch the staging memory that the first `save_async` of this state needs."""
        options = replace(options or SaveOptions(), checkpoint_prefix=None)
        token, ranks = self._begin(options.timeout, ExceptionType.SAVE_FAILED, None)

        async def state() -> dict[str, Any]:
            return self._state(model, optimizer, options)

        work = await self._saving.agree(ranks, state, options)

        async def touch() -> bytes:
            await run_in_thread(partial(self._staging.prepare, work.image.size, token), token)
            return b""

        await ranks.decide(touch, agreed)

    # Loading.

    async def load(
        self, model: Any = None, optimizer: Any = None, options: LoadOptions | None = None
    ) -> CheckpointLoadResult:
        """Load into the model and the optimizer; without them, into new arrays of the result."""
        options = options or LoadOptions()
        if not options.checkpoint_prefix:
            raise invalid(
                "checkpoint_prefix is missing", "name the checkpoint to load", code="checkpoint_prefix_missing"
            )
        prefix = check_prefix(options.checkpoint_prefix)
        token, ranks = self._begin(options.timeout, ExceptionType.LOAD_FAILED, prefix)
        results: list[tuple[Manifest, Loaded]] = []

        async def read() -> bytes:
            self._raise_failure()
            results.append(await run_read(partial(self._load, prefix, model, optimizer, options, ranks), token))
            return results[0][0].save_id.encode()

        async def apply() -> bytes:
            self._apply(results[0][1].state, model, optimizer)
            return b""

        await ranks.decide(read, require_same_save)
        await ranks.decide(apply, agreed)
        manifest, loaded = results[0]
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
            bytes_read=loaded.bytes_read,
        )

    def _manifest(self, prefix: str, options: LoadOptions, token: CancelToken) -> Manifest:
        """Read the manifest; if it cannot be read, raise the read error, which has the better fix."""
        result = None if options.skip_validation else self._validator.validate_before_load(prefix, token)
        manifest = None if result is None else result.manifest
        if manifest is None:
            manifest = listing.read_manifest(bounded(self._storage, token), prefix)
        if result is not None:
            result.require_valid(prefix)
            if result.has_warnings:
                found = "; ".join(finding.message for finding in result.warnings[:SHOWN_MAX])
                self._log.warning(
                    "the check before the load has warnings; bytes that are missing are looked for in other files",
                    prefix=prefix,
                    found=found,
                )
        return manifest

    def _load(
        self, prefix: str, model: Any, optimizer: Any, options: LoadOptions, ranks: RankGroup, token: CancelToken
    ) -> tuple[Manifest, Loaded]:
        manifest = self._manifest(prefix, options, token)
        require_small(manifest, token)
        into: dict[str, Any] = {}
        if model is not None:
            into[MODEL] = _state_of(model, MODEL)
        if optimizer is not None and options.load_optimizer:
            into[OPTIMIZER] = _state_of(optimizer, OPTIMIZER)
        loaded = load_state(
            self._storage,
            manifest,
            into or None,
            rank=ranks.rank,
            world_size=ranks.world_size,
            options=options,
            token=token,
            leaf_types=self._leaf_types,
            sections=SECTIONS,
        )
        return manifest, loaded

    def _apply(self, state: Mapping[str, Any], model: Any, optimizer: Any) -> None:
        if model is not None and MODEL in state and hasattr(model, "load_state_dict"):
            model.load_state_dict(state[MODEL])
        if optimizer is not None and OPTIMIZER in state and hasattr(optimizer, "load_state_dict"):
            optimizer.load_state_dict(state[OPTIMIZER])
        if state.get(RNG):
            rng.restore(state[RNG], self._generators)

    # Listing and deleting.

    async def list_checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints in the storage, oldest first."""
        self._raise_failure()

        def infos() -> list[CheckpointInfo]:
            storage = bounded(self._storage, CancelToken(self._timeout_s))
            known = (manifest for _, manifest in listing.manifests(storage))
            found = [listing.info_of(manifest) for manifest in known if isinstance(manifest, Manifest)]
            return sorted(found, key=lambda info: (info.timestamp, info.prefix))

        return await run_in_thread(infos, CancelToken(self._timeout_s))

    async def delete_checkpoint(self, checkpoint_prefix: str) -> None:
        """Delete a checkpoint; `checkpoint_needed` if other checkpoints use its files."""
        prefix = check_prefix(checkpoint_prefix)
        token, ranks = self._begin(None, ExceptionType.STORAGE_ERROR, prefix)

        async def check_failure() -> bytes:
            self._raise_failure()
            return b""

        async def delete(replies: list[bytes]) -> bytes:
            storage = bounded(self._storage, token)
            await run_in_thread(partial(listing.delete, storage, prefix, self._ancestries), token)
            return b""

        await ranks.decide(check_failure, delete)

    # Closing.

    async def close(self) -> None:
        """Wait for background saves, raise their failures, and release the staging memory."""
        if self._background is not None:
            background, self._background = self._background, None
            await wait_in_thread(background.close)
            self._staging.close()
            _raise_all(background)
        self._staging.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Internals.

    def _state(self, model: Any, optimizer: Any, options: SaveOptions) -> dict[str, Any]:
        """The state to save. Raises the failure of an earlier background save, so that all ranks learn of it."""
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

    def _run_info(self) -> RunInfo:
        """The job, step, epoch and fence of this save."""
        coordinator = self._coordinator
        job, generation = getattr(coordinator, "job", ""), _count(getattr(coordinator, "generation", None))
        fence = None if generation is None else ManifestFence(_count(getattr(coordinator, "term", 0)) or 0, generation)
        step, epoch = (_count(getattr(coordinator, name, None)) for name in ("step", "epoch"))
        return RunInfo(job if isinstance(job, str) else "", step, epoch, fence)

    def _report(self, save: RankSave, run: RunInfo) -> None:
        """Have the catalogue of the coordinator's job, if it has one, observe the save."""
        observer: SaveObserver | None = getattr(self._coordinator, "checkpoint_catalog", None)
        if observer is None or not save.is_root:
            return
        options, agreement = save.options, save.agreement
        step = run.step if options.step is None else options.step
        epoch = run.epoch if options.epoch is None else options.epoch
        observed = ObservedSave(
            self._storage,
            agreement.prefix,
            agreement.save_id,
            step or 0,
            epoch or 0,
            options.metrics,
            options.reason,
            self.keep,
            agreement.links[-1].prefix if agreement.links else "",
        )
        save.report = SaveReport(observer, observed, self._log)

    def _background_saver(self) -> BackgroundSaver:
        if self._background is None:
            slots = self._staging.slots
            self._background = BackgroundSaver(
                self._saving, self._storage, self._unstage, self._members, self._log, slots
            )
        return self._background

    def _members(self) -> tuple[str, ...]:
        """The workers of the current world, as `id@host:port`; empty if ranks have no names.

        The port tells a restarted worker, which knows nothing of a running save, from the one before.
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
    """A `DistributedCheckpoint` with these options."""
    options = options or CheckpointOptions()
    storage = create_storage(options.storage)
    faults = FaultToleranceHandler(storage, options.retry_policy)
    validator = CheckpointValidator(storage, options.integrity_checkers, options.compatibility_checkers)
    return DistributedCheckpoint(coordinator, storage, faults, validator, default_timeout=options.default_timeout)


def _count(value: Any) -> int | None:
    """A coordinator's number, if a manifest can hold it."""
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(value) if is_number and 0 <= value < INTEGER_MAX else None


def _state_of(given: Any, name: str) -> Any:
    """The state of a `Stateful` object, or the given dict, list or tuple itself."""
    if is_stateful(given) and not isinstance(given, ScriptState):
        return values_of(given)
    if callable(getattr(given, "state_dict", None)):
        return given.state_dict()
    if isinstance(given, Mapping | list | tuple):
        return given
    raise invalid(
        f"the {name} is a {type(given).__name__}", "give it state_dict and load_state_dict, or give a dict of its state"
    )


def _raise_all(background: BackgroundSaver) -> None:
    """Raise the first failure that no handle reported, with the other failures as notes."""
    failure = background.failure()
    if failure is not None:
        while (other := background.failure()) is not None:
            failure.add_note(str(other))
        raise failure


async def require_same_save(replies: list[bytes]) -> bytes:
    """Refuse if the ranks loaded different saves, because the checkpoint was replaced meanwhile."""
    if len(set(replies)) > 1:
        raise CheckpointException(
            "the checkpoint was replaced during the load; some ranks loaded the old one",
            type=ExceptionType.LOAD_FAILED,
            code="checkpoint_replaced",
            fix="load it again",
            retryable=True,
        )
    return b""


async def agreed(replies: list[bytes]) -> bytes:
    """Nothing is left to decide: every rank has succeeded."""
    return b""
