"""A save, from a state to a manifest that stands.

Law: nothing is seen of a checkpoint before all that its manifest names is durable. A rank that has said what it wrote
deletes it only when the root has said that the save has failed, because the manifest may stand already; the root takes
its manifest back before it lets anything be deleted that it names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import anyio
import msgspec
from anyio import to_thread

from forged.checkpoint.coordinators import OutcomeUnknown, RankGroup, StorageUnresponsive, run_in_thread
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.consolidated import File
from forged.checkpoint.format.manifest import Fence, Manifest, Part, encode
from forged.checkpoint.format.states import States, split_per_rank
from forged.checkpoint.format.tree import Leaf, LeafType, Node, flatten, renumber_tensors
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, SaveOptions
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.saving import parts
from forged.checkpoint.saving.assembly import MemoryTensors, SavedTensors, TensorSource
from forged.checkpoint.saving.consolidation import (
    planned_files,
    publish_indexes,
    withdraw_indexes,
    write_file,
    write_indexes,
)
from forged.checkpoint.saving.image import ArrayImage, Layout, layout_of
from forged.checkpoint.saving.plan import Description, Plan, plan
from forged.checkpoint.saving.staging import StagedPart, StagingMemory
from forged.checkpoint.storage import listing
from forged.errors import describe
from forged.log import SILENT, Log

EXISTS = "checkpoint_exists"
UNREACHABLE = "checkpoint_storage_unreachable"
ROLL_BACK_S = 10.0
"""How long a save that has failed may still take to clear away what it has written."""


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says before a save."""

    options: bytes
    frame: bytes
    own: bytes
    """What stands in the open places of the frame."""
    description: bytes
    """The digest of what it has."""
    plan: bytes
    """Which plan it knows: the digest of what all had when it was made."""


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """What the root answers."""

    prefix: str
    save_id: str
    created_at: float
    plan: bytes
    is_known: bool
    """Whether all know the plan already."""


class RunInfo(msgspec.Struct, frozen=True):
    """What a manifest says of the run that it was saved in."""

    job: str = ""
    step: int | None = None
    fence: Fence | None = None


@dataclass(frozen=True, slots=True)
class SaveContext:
    """What saves need of their surroundings."""

    storage: Storage
    wall: Callable[[], float]
    draw: Callable[[int], bytes]
    leaf_types: Sequence[LeafType]
    log: Log


@dataclass(frozen=True, slots=True)
class _Known:
    """The plan of the last save, which serves as long as all have the same arrays.

    A save sets out from one of them and leaves another one behind; two that go on at once do not disturb each other.
    """

    key: bytes = b""
    description: Description | None = None
    plan: Plan | None = None
    layout: Layout | None = None
    rank: int = 0
    """Whose layout it is."""


@dataclass(slots=True)
class RankSave:
    """One rank's side of one save."""

    rank: int
    world_size: int
    options: SaveOptions
    terms: Agreement
    plan: Plan
    imaged: ArrayImage | Exception
    """What this rank writes, or what went wrong when that was made ready."""
    states: States = field(default_factory=lambda: States([], [], []))
    """Those of all ranks; at the root alone."""
    staged: StagedPart | None = None
    made: list[Part] = field(default_factory=list)
    """The files of whole tensors, where this rank has made some."""

    @property
    def image(self) -> ArrayImage:
        """What this rank writes; asked for where the others learn of it if there is none."""
        if isinstance(self.imaged, Exception):
            raise self.imaged
        return self.imaged

    @property
    def is_assembled(self) -> bool:
        """Whether the checkpoint has files of whole tensors, which take more than what one rank writes at first."""
        layout = self.options.format
        return layout is CheckpointFormat.CONSOLIDATED or (
            layout is CheckpointFormat.SINGLE_FILE and self.world_size > 1
        )

    @property
    def is_root(self) -> bool:
        """Whether it is this rank that publishes the manifest."""
        return self.rank == 0

    def file(self, rank: int) -> str:
        """The file of a rank."""
        terms, level = self.terms, self.options.compression_level
        is_packed = level is not CompressionLevel.NONE and not self.is_assembled
        return listing.part_name(terms.prefix, terms.save_id, rank, self.world_size, is_packed=is_packed)


class Saver:
    """One rank's side of the saves of a run, one after the other."""

    def __init__(self, world: SaveContext) -> None:
        self._world = world
        self._known = _Known()

    # What all ranks agree on before anything is written.

    async def agree(self, ranks: RankGroup, state: Callable[[], Awaitable[Any]], options: SaveOptions) -> RankSave:
        """Take a state apart, and settle under which name it is saved and who writes what."""
        node: Node = None
        leaves: list[Leaf] = []
        said: list[Proposal] = []
        known = self._known

        async def wish() -> bytes:
            nonlocal node, leaves, known
            node, leaves = flatten(await state(), self._world.leaf_types)
            description = Description.of(leaves)
            known = self._known
            if known.description != description or known.rank != ranks.rank:
                known = _Known(description=description, rank=ranks.rank)
            return msgspec.msgpack.encode(_wish(ranks, node, known, options))

        async def settle(wishes: list[bytes]) -> bytes:
            said.extend(msgspec.msgpack.decode(one, type=Proposal) for one in wishes)
            return msgspec.msgpack.encode(await self._settle(ranks, said, options))

        terms = msgspec.msgpack.decode(await ranks.decide(wish, settle), type=Agreement)
        ranks.prefix = terms.prefix
        self._known = known = await _laid_out(ranks, known, terms, options)
        made, layout = known.plan, known.layout
        assert made is not None
        work = partial(RankSave, ranks.rank, ranks.world_size, options, terms, made)
        try:
            image = parts.image_of(made, ranks.rank, leaves, layout)
            states = _states(node, said, made) if ranks.is_root else States([], [], [])
        except Exception as error:  # noqa: BLE001 - whatever it is, the others learn of it when they meet next
            return work(error)
        return work(image, states)

    async def _settle(self, ranks: RankGroup, wishes: list[Proposal], options: SaveOptions) -> Agreement:
        for rank, wish in enumerate(wishes):
            if wish.options != wishes[0].options:
                raise CheckpointException(
                    f"rank {rank} saves with {wish.options.decode()}, and rank 0 with {wishes[0].options.decode()}",
                    code="checkpoint_ranks_differ",
                    fix="give all ranks the same options",
                )
        world = self._world
        now = world.wall()
        prefix = options.checkpoint_prefix or listing.default_prefix(now, world.draw)
        await run_in_thread(partial(listing.require_free, bounded(world.storage, ranks.token), prefix), ranks.token)
        key = b"alone" if ranks.is_alone else _key(wishes, options)
        return Agreement(
            prefix, world.draw(listing.SAVE_ID_BYTES).hex(), now, key, all(one.plan == key for one in wishes)
        )

    # Writing.

    def write(self, work: RankSave, token: CancelToken) -> Part:
        """Write this rank's part; durable when it returns."""
        storage, file = self._world.storage, work.file(work.rank)
        share = work.plan.shares[work.rank]
        if not share.tensors:
            return parts.empty_part(file, work.rank)
        if work.is_assembled and work.world_size == 1:
            held = MemoryTensors(work.plan.tensors, work.image, work.staged)
            self._make(work, held, token)
            return work.made[0]
        if work.options.compression_level is CompressionLevel.NONE or work.is_assembled:
            source = work.image if work.staged is None else work.staged
            return parts.write_uncompressed(storage, file, work.rank, share, work.image, source, token)
        packed = parts.CompressedPart(work.image, work.staged, work.options.compression_level, token)
        return parts.write_compressed(storage, file, work.rank, share, packed, token)

    async def finish(self, ranks: RankGroup, work: RankSave, about: RunInfo, token: CancelToken) -> str:
        """Write, and have the root publish the manifest when all have."""
        may_stand = False

        async def write() -> bytes:
            nonlocal may_stand
            part = await run_in_thread(partial(self.write, work, token), token)
            may_stand = not work.is_root
            return msgspec.msgpack.encode(part)

        async def publish(said: list[bytes]) -> bytes:
            nonlocal may_stand
            may_stand = True
            written = [msgspec.msgpack.decode(one, type=Part) for one in said]
            try:
                await run_in_thread(partial(self.publish, work, written, about, token), token)
            except StorageUnresponsive as error:
                raise _undecided(work, error) from error
            return b""

        try:
            await ranks.decide(write, publish)
        except BaseException as error:
            is_told = isinstance(error, CheckpointException) and not isinstance(error, OutcomeUnknown)
            if is_told or not may_stand:
                with anyio.move_on_after(ROLL_BACK_S, shield=True):
                    await to_thread.run_sync(self.roll_back, work, abandon_on_cancel=True)
            raise
        return work.terms.prefix

    def _make(self, work: RankSave, origin: TensorSource, token: CancelToken) -> None:
        """Make the files of whole tensors."""
        options, terms, storage = work.options, work.terms, self._world.storage
        level = options.compression_level
        for file in whole_files(work):
            work.made.append(write_file(storage, terms.prefix, file, origin, level, work.rank, token))

    def publish(self, work: RankSave, written: list[Part], about: RunInfo, token: CancelToken) -> None:
        """Publish the manifest. After an error there is no checkpoint, unless the error is `OutcomeUnknown`."""
        extra: dict[str, int] = {}
        written = [part for part in written if part.tensors]
        if work.is_assembled:
            if not work.made:
                self._make(work, SavedTensors(self._world.storage, self._manifest(work, written, about), token), token)
            extra = write_indexes(self._world.storage, work.terms.prefix, work.terms.save_id, whole_files(work))
        manifest = self._manifest(work, work.made or written, about, extra)
        storage, data = self._world.storage, encode(manifest)
        try:
            storage.publish(manifest.path, data)
        except Exception as error:
            if not self._stands_after(error, work, manifest.path, data):
                raise
        if work.is_assembled:
            self._show_indexes(work)
            self._clear_temporary(work)

    def _show_indexes(self, work: RankSave) -> None:
        """The checkpoint stands; without its index it is of less use to other tools, and is not taken back for that."""
        storage, terms = self._world.storage, work.terms
        try:
            publish_indexes(storage, terms.prefix, terms.save_id, whole_files(work))
        except CheckpointException as error:
            self._world.log.warning("a checkpoint has no index", prefix=terms.prefix, why=str(error))

    def _clear_temporary(self, work: RankSave) -> None:
        """The parts of which the files were made are of no use any more."""
        try:
            self._world.storage.delete([work.file(rank) for rank in range(work.world_size)])
        except CheckpointException as error:
            self._world.log.warning("temporary files of a save are left", prefix=work.terms.prefix, why=str(error))

    def _stands_after(self, error: Exception, work: RankSave, path: str, data: bytes) -> bool:
        """Whether a manifest stands for good though publishing it has failed; else it is taken back."""
        storage = self._world.storage
        try:
            if not listing.has_content(storage, path, data):
                if _is_open(error):
                    raise _undecided(work, error)
                return False
            if isinstance(error, CheckpointException) and error.code == EXISTS:
                # It was published before, by a try that was not told so.
                storage.sync_names([path])
                return True
            # Nobody knows whether it would stand after a power cut; it must not, before what it names is deleted.
            storage.delete([path])
        except OutcomeUnknown:
            raise
        except Exception as why:
            raise _undecided(work, why) from why
        return False

    def _manifest(
        self, work: RankSave, written: list[Part], about: RunInfo, extra: Mapping[str, int] = MappingProxyType({})
    ) -> Manifest:
        options, terms = work.options, work.terms
        return Manifest(
            prefix=terms.prefix,
            save_id=terms.save_id,
            created_at=terms.created_at,
            world_size=work.world_size,
            tensors=work.plan.tensors,
            states=work.states,
            parts=written,
            layout=options.format,
            compression=options.compression_level,
            extra_files=dict(extra),
            job=about.job,
            step=about.step,
            fence=about.fence,
            custom=dict(options.custom_metadata),
        )

    def roll_back(self, work: RankSave) -> None:
        """Leave nothing behind of a save that has failed."""
        storage, terms = self._world.storage, work.terms
        ranks = range(work.world_size) if work.is_root else [work.rank]
        files = whole_files(work) if work.is_root and work.is_assembled else []
        try:
            storage.delete([*map(work.file, ranks), *(f"{terms.prefix}/{file.name}" for file in files)])
            withdraw_indexes(storage, terms.prefix, terms.save_id, files)
        except CheckpointException as error:
            self._world.log.warning("files of a save that failed are left", prefix=terms.prefix, why=str(error))

    async def stage(self, ranks: RankGroup, work: RankSave, staging: StagingMemory) -> None:
        """Copy what this rank writes; when it returns, all have."""

        async def mine() -> bytes:
            work.staged = await run_in_thread(partial(staging.stage, work.image, ranks.token), ranks.token)
            work.image.let_go()
            return b""

        await ranks.decide(mine, _agreed)


def whole_files(work: RankSave) -> list[File]:
    """The files of whole tensors that a save makes."""
    terms, options = work.terms, work.options
    return planned_files(work.plan.tensors, terms.prefix, terms.save_id, options.format, options.compression_level)


async def save_state(
    storage: Storage,
    ranks: RankGroup,
    state: Any,
    options: SaveOptions,
    token: CancelToken,
    leaf_types: Sequence[LeafType] = (),
) -> str:
    """Save one state, once."""
    saving = Saver(SaveContext(storage, time.time, os.urandom, tuple(leaf_types), SILENT))

    async def given() -> Any:
        return state

    work = await saving.agree(ranks, given, options)
    return await saving.finish(ranks, work, RunInfo(), token)


def _wish(ranks: RankGroup, node: Node, known: _Known, options: SaveOptions) -> Proposal:
    """What a rank says that has such a state."""
    assert known.description is not None
    if ranks.is_alone:
        return Proposal(b"", b"", b"", b"", known.key)
    said = msgspec.json.encode((options.format, options.compression_level, options.copies, options.checkpoint_prefix))
    frame, own = map(msgspec.json.encode, split_per_rank(node))
    return Proposal(said, frame, own, known.description.digest(), known.key)


async def _laid_out(ranks: RankGroup, known: _Known, terms: Agreement, options: SaveOptions) -> _Known:
    """The plan, and how this rank's share of it lies in a file; known already where all have saved the same before."""
    if terms.is_known:
        return known
    assert known.description is not None
    made = await _planned(ranks, known.description, options)
    layout: Layout | None = None

    async def lay() -> bytes:
        nonlocal layout
        layout = layout_of(made.tensors, made.shares[ranks.rank], parts.FILE_METADATA)
        return b""

    await ranks.decide(lay, _agreed)
    return _Known(terms.plan, known.description, made, layout, ranks.rank)


async def _planned(ranks: RankGroup, description: Description, options: SaveOptions) -> Plan:
    """Who writes what, as the root has decided."""
    if ranks.is_alone:
        return plan([description])

    async def describe() -> bytes:
        return msgspec.msgpack.encode(description)

    async def decide(said: list[bytes]) -> bytes:
        descriptions = [msgspec.msgpack.decode(one, type=Description) for one in said]
        made = await to_thread.run_sync(plan, descriptions, options.copies)
        return msgspec.msgpack.encode(made)

    return msgspec.msgpack.decode(await ranks.decide(describe, decide), type=Plan)


def _key(wishes: list[Proposal], options: SaveOptions) -> bytes:
    """What tells this plan from others."""
    return b"".join([options.copies.to_bytes(1, "big"), *(wish.description for wish in wishes)])


def _states(node: Node, wishes: list[Proposal], made: Plan) -> States:
    """The states of all ranks, with the numbers that the tensors have in the manifest."""
    if len(made.numbers) == 1:
        return States.of([node])
    states = States([], [], [])
    known: dict[bytes, int] = {}
    for wish, numbers in zip(wishes, made.numbers, strict=True):
        if wish.frame not in known:
            # Frames that are the same text have the same names in the same places.
            known[wish.frame] = states.frame_number(renumber_tensors(msgspec.json.decode(wish.frame), numbers))
        states.add_rank(known[wish.frame], [renumber_tensors(one, numbers) for one in msgspec.json.decode(wish.own)])
    return states


async def _agreed(said: list[bytes]) -> bytes:
    return b""


def _undecided(work: RankSave, error: Exception) -> OutcomeUnknown:
    """The manifest may stand, now or later."""
    return OutcomeUnknown(
        f"nobody knows whether it was saved: {describe(error)}",
        work.terms.prefix,
        ExceptionType.STORAGE_ERROR,
        code="checkpoint_undecided",
        fix="`forgectl ckpt verify` tells whether it is there and whole",
    )


def _is_open(error: Exception) -> bool:
    """Whether what was asked of a storage may yet happen: it has not answered."""
    is_late = isinstance(error, CheckpointException) and error.type is ExceptionType.TIMEOUT
    return is_late or (isinstance(error, CheckpointException) and error.code == UNREACHABLE)
