"""One rank's side of a save, in the order of its steps: agree, stage, write a part, publish the manifest.

Invariants:
- A checkpoint becomes visible when its manifest is published; by then every file that the manifest names is durable.
- A rank that has reported its part deletes it only when the root says that the save failed; until then the manifest may
  exist already.
- The root removes a doubtful manifest before any file that it names is deleted.
- A save that cannot build on its base is full. Every rank may write chunks that the base has.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.manifest import (
    INCREMENTAL_VERSION,
    VERSION,
    ChainLink,
    Manifest,
    Part,
    encode,
)
from forged.checkpoint.format.slot import SlotFrame
from forged.checkpoint.format.states import States
from forged.checkpoint.format.tree import Leaf, Node, flatten
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, SaveOptions
from forged.checkpoint.ports import CancelToken, Storage, bounded
from forged.checkpoint.rank_group import OutcomeUnknown, RankGroup
from forged.checkpoint.saving.agreement import (
    CachedPlan,
    Proposal,
    SaveAgreement,
    plan_key,
    proposal_of,
    states_of,
    with_plan,
)
from forged.checkpoint.saving.files import parts
from forged.checkpoint.saving.files.assembly import MemoryTensors, SavedTensors, TensorSource
from forged.checkpoint.saving.files.consolidation import (
    publish_indexes,
    withdraw_indexes,
    write_file,
    write_indexes,
)
from forged.checkpoint.saving.files.image import ArrayImage, layout_of, staged_arrays
from forged.checkpoint.saving.files.plan import Description
from forged.checkpoint.saving.files.slots import SlotContent, Slots
from forged.checkpoint.saving.files.staging import StagingMemory
from forged.checkpoint.saving.incremental import (
    BaseReader,
    chunk_digests,
    merged,
    reduce_share,
    used_links,
)
from forged.checkpoint.saving.publication import outcome_unknown, publish_manifest
from forged.checkpoint.saving.rank_save import RankSave, RunInfo
from forged.checkpoint.storage import listing
from forged.checkpoint.thread_calls import StorageUnresponsive, finish_in_thread, run_in_thread
from forged.leaf_types import LeafType
from forged.log import SILENT, Log

METRICS = "metrics"
"""The key of the metrics in the custom metadata of a manifest."""
_IN_MEMORY, _IN_SLOT, _PERSISTED = b"", b"s", b"p"
"""Where a rank has staged its part: in memory of its process, in a slot, in a slot that its host persists."""
ROLL_BACK_S = 10.0
"""How long a failed save may still take to delete its files."""


@dataclass(frozen=True, slots=True)
class SaveContext:
    """What all saves of a process use."""

    storage: Storage
    wall: Callable[[], float]
    random_bytes: Callable[[int], bytes]
    leaf_types: Sequence[LeafType]
    log: Log
    slots: Slots | None = None
    """Those of this process, if its host has any for it."""


class Saver:
    """One rank's side of the saves of a run, one after the other."""

    def __init__(self, context: SaveContext) -> None:
        self._context = context
        self._cached = CachedPlan()
        self._bases = BaseReader()

    # Step 1: agree on the name, the save id and the plan.

    async def agree(self, ranks: RankGroup, state: Callable[[], Awaitable[Any]], options: SaveOptions) -> RankSave:
        """Flatten the state, and agree with all ranks on its name and on which rank writes what."""
        node: Node = None
        leaves: list[Leaf] = []
        proposals: list[Proposal] = []
        cached = self._cached

        async def propose() -> bytes:
            nonlocal node, leaves, cached
            node, leaves = flatten(await state(), self._context.leaf_types)
            description = Description.of(leaves)
            cached = self._cached
            if cached.description != description or cached.rank != ranks.rank:
                cached = CachedPlan(description=description, rank=ranks.rank)
            return msgspec.msgpack.encode(proposal_of(ranks, node, cached, options, self._context.slots))

        async def decide(encoded: list[bytes]) -> bytes:
            proposals.extend(msgspec.msgpack.decode(one, type=Proposal) for one in encoded)
            return msgspec.msgpack.encode(await self._agreement(ranks, proposals, options))

        agreement = msgspec.msgpack.decode(await ranks.decide(propose, decide), type=SaveAgreement)
        ranks.prefix = agreement.prefix
        if self._context.slots is not None:
            self._context.slots.settle(agreement.staged)
        self._cached = cached = await with_plan(ranks, cached, agreement, options)
        plan, layout = cached.plan, cached.layout
        assert plan is not None
        save = partial(RankSave, ranks.rank, ranks.world_size, options, agreement, plan)
        share = plan.shares[ranks.rank]
        try:
            image = parts.image_of(plan, ranks.rank, leaves, layout)
            states = states_of(node, proposals, plan) if ranks.is_root else States([], [], [])
        except Exception as error:  # noqa: BLE001 - the next step reports it to the other ranks
            return save(error, share)
        return save(image, share, states)

    async def _agreement(self, ranks: RankGroup, proposals: list[Proposal], options: SaveOptions) -> SaveAgreement:
        """At the root: check that all ranks save alike and that the name is free."""
        for rank, proposal in enumerate(proposals):
            if proposal.options != proposals[0].options:
                raise CheckpointException(
                    f"rank {rank} saves with {proposal.options.decode()}, rank 0 with {proposals[0].options.decode()}",
                    code="checkpoint_ranks_differ",
                    fix="give all ranks the same options",
                )
        context = self._context
        now = context.wall()
        prefix = options.checkpoint_prefix or listing.default_prefix(now, context.random_bytes)
        storage = bounded(context.storage, ranks.token)
        await run_in_thread(partial(listing.require_free, storage, prefix), ranks.token)
        links = await run_in_thread(partial(self._links, storage, prefix, options, ranks.token), ranks.token)
        key = b"alone" if ranks.is_alone else plan_key(proposals, options)
        save_id = context.random_bytes(listing.SAVE_ID_BYTES).hex()
        is_known = all(one.plan == key for one in proposals)
        staged = sorted({one.staged for one in proposals if one.staged})
        return SaveAgreement(prefix, save_id, now, key, is_known, links, staged)

    def _links(self, storage: Storage, prefix: str, options: SaveOptions, token: CancelToken) -> list[ChainLink]:
        """At the root: the checkpoints whose files the save may use; none for a full save."""
        if options.base is None:
            return []
        try:
            base = self._bases.read(storage, options.base)
            base.require_files(storage, token)
            has_room = len(base.links) < options.chain_max
            has_room = has_room and self._bases.ancestry(storage, base, options.chain_max) < options.chain_max
        except CheckpointException as error:
            token.check()
            self._log_full_save(prefix, options.base, error)
            return []
        return base.links if has_room and base.manifest.save_id else []

    def _log_full_save(self, prefix: str, base: str, error: CheckpointException) -> None:
        self._context.log.warning(
            "a checkpoint is saved in full, because its base cannot be read",
            prefix=prefix,
            base=base,
            reason=error.message,
        )

    # Step 2 of an incremental save: leave out the chunks that the base has.

    def reduce(self, save: RankSave, token: CancelToken) -> None:
        """Replace the unchanged chunks of what this rank writes by references.

        The image of the rest is over the arrays, or over their copy if the state is staged already.
        """
        if not save.agreement.links:
            return
        link = save.agreement.links[-1]
        try:
            base = self._bases.read(bounded(self._context.storage, token), link.prefix)
        except CheckpointException as error:
            token.check()
            self._log_full_save(save.agreement.prefix, link.prefix, error)
            return
        if base.links != save.agreement.links:
            # It was replaced, or made full, after the root has read it.
            return
        tensors, image = save.plan.tensors, save.image
        if save.staged is None:
            digests, arrays = chunk_digests(image, token), image.arrays
        else:
            dtypes = [tensors.dtypes[number] for number in save.share.tensors]
            digests, arrays = image.digests, list(staged_arrays(dtypes, image.layout, save.staged.view()))
        reduced = reduce_share(image.layout, arrays, digests, save.share, tensors, base)
        layout = layout_of(tensors, reduced.share, parts.FILE_METADATA)
        save.share, save.references = reduced.share, reduced.references
        save.image_or_error, save.is_image_staged = ArrayImage(layout, reduced.arrays), False

    # Step 2 in the background: copy the state, so that training may go on.

    async def stage(
        self, ranks: RankGroup, save: RankSave, memory: StagingMemory, run: RunInfo, *, in_slots_only: bool = False
    ) -> None:
        """Copy what this rank writes. Returns when all ranks have copied theirs, or have no slots and want no other."""

        def act() -> bytes:
            image = save.image
            if memory.slots is not None:
                # Whole, because the host may have to save the checkpoint from the slots alone.
                save.staged = memory.stage_in_slot(image, self._slot_content(save, run), ranks.token)
            is_in_slot = save.staged is not None
            if not in_slots_only:
                self.reduce(save, ranks.token)
            if not in_slots_only and not is_in_slot:
                save.staged, save.is_image_staged = memory.stage(save.image, ranks.token), True
                save.image.release_arrays()
            image.release_arrays()
            if memory.slots is None or not is_in_slot:
                return _IN_MEMORY
            return _PERSISTED if memory.slots.is_persisted and _is_plain(save) else _IN_SLOT

        async def copy() -> bytes:
            return await run_in_thread(act, ranks.token)

        async def decide(replies: list[bytes]) -> bytes:
            return next((kind for kind in (_IN_MEMORY, _IN_SLOT) if kind in replies), _PERSISTED)

        kind = await ranks.decide(copy, decide)
        save.is_in_slots, save.is_persisted_by_host = kind != _IN_MEMORY, kind == _PERSISTED
        if save.is_in_slots and memory.slots is not None and save.staged is not None and save.staged.slot is not None:
            memory.slots.agree(save.staged.slot)

    def _slot_content(self, save: RankSave, run: RunInfo) -> SlotContent:
        """What the slot of this rank says: all that another process needs to save the checkpoint."""
        agreement, rank = save.agreement, save.rank
        file = listing.part_name(agreement.prefix, agreement.save_id, rank, save.world_size, is_packed=False)
        part = parts.part_of(file, rank, save.plan.shares[rank], save.image)
        manifest = self._manifest(save, [], run)
        layout = CheckpointFormat.MULTI_SHARD if save.has_whole_tensor_files else manifest.layout
        manifest = replace(manifest, layout=layout, compression=CompressionLevel.NONE)
        return SlotContent(
            agreement.save_id,
            rank,
            save.world_size,
            manifest.step,
            manifest.epoch,
            0 if run.fence is None else run.fence.generation,
            SlotFrame(agreement.prefix, replace(part, digests=""), encode(manifest) if save.is_root else b""),
        )

    # Step 3: write this rank's part.

    def write(self, save: RankSave, token: CancelToken) -> list[Part]:
        """Write this rank's part, which is durable when this returns; returns it and the references."""
        return [self._write(save, token), *save.references]

    def _write(self, save: RankSave, token: CancelToken) -> Part:
        storage, file = self._context.storage, save.file(save.rank)
        share = save.share
        if not share.tensors:
            return parts.empty_part(file, save.rank)
        if save.has_whole_tensor_files and save.world_size == 1:
            self._write_whole_tensors(save, MemoryTensors(save.plan.tensors, save.image, save.copy), token)
            return save.whole_tensor_parts[0]
        if save.options.compression_level is CompressionLevel.NONE or save.has_whole_tensor_files:
            source = save.image if save.copy is None else save.copy
            return parts.write_uncompressed(storage, file, save.rank, share, save.image, source, token)
        compressed = parts.CompressedPart(save.image, save.copy, save.options.compression_level, token)
        return parts.write_compressed(storage, file, save.rank, share, compressed, token)

    def _write_whole_tensors(self, save: RankSave, tensors: TensorSource, token: CancelToken) -> None:
        options, storage = save.options, self._context.storage
        for file in save.whole_tensor_files():
            part = write_file(
                storage, save.agreement.prefix, file, tensors, options.compression_level, save.rank, token
            )
            save.whole_tensor_parts.append(part)

    # Steps 3 and 4 of a synchronous save: all ranks write, then the root publishes.

    async def write_and_publish(self, ranks: RankGroup, save: RankSave, run: RunInfo, token: CancelToken) -> str:
        """Write; the root publishes when all ranks have written. Returns the prefix; the checkpoint exists then."""
        manifest_may_exist = False

        def reduce_and_write() -> list[Part]:
            self.reduce(save, token)
            return self.write(save, token)

        async def write() -> bytes:
            nonlocal manifest_may_exist
            written = await run_in_thread(reduce_and_write, token)
            manifest_may_exist = not save.is_root
            return msgspec.msgpack.encode(written)

        async def publish(encoded: list[bytes]) -> bytes:
            nonlocal manifest_may_exist
            manifest_may_exist = True
            written = [part for one in encoded for part in msgspec.msgpack.decode(one, type=list[Part])]
            try:
                await run_in_thread(partial(self.publish, save, written, run, token), token)
            except StorageUnresponsive as error:
                raise outcome_unknown(save.agreement.prefix, error) from error
            return b""

        try:
            await ranks.decide(write, publish)
        except BaseException as error:
            has_failed = isinstance(error, CheckpointException) and not isinstance(error, OutcomeUnknown)
            if has_failed or not manifest_may_exist:
                await finish_in_thread(partial(self.roll_back, save), ROLL_BACK_S)
                if save.report is not None:
                    save.report.failed(error)
            raise
        return save.agreement.prefix

    # Step 4: publish the manifest.

    def publish(self, save: RankSave, written: list[Part], run: RunInfo, token: CancelToken) -> None:
        """Publish the manifest. After an error there is no checkpoint, unless the error is `OutcomeUnknown`.

        `written` are the parts and references of all ranks.
        """
        index_sizes: dict[str, int] = {}
        storage, prefix, save_id = self._context.storage, save.agreement.prefix, save.agreement.save_id
        written = [part for part in written if part.tensors]
        if save.has_whole_tensor_files:
            if not save.whole_tensor_parts:
                saved = SavedTensors(storage, self._manifest(save, written, run), token)
                self._write_whole_tensors(save, saved, token)
            index_sizes = write_indexes(storage, prefix, save_id, save.whole_tensor_files())
        manifest = self._manifest(save, save.whole_tensor_parts or written, run, index_sizes)
        publish_manifest(storage, manifest)
        if save.report is not None:
            save.report.committed(manifest.size_bytes, manifest.links[-1].prefix if manifest.links else "")
        if save.has_whole_tensor_files:
            self._publish_indexes(save)
            self._delete_temporary_parts(save)

    def _manifest(
        self, save: RankSave, written: list[Part], run: RunInfo, extra: Mapping[str, int] = MappingProxyType({})
    ) -> Manifest:
        options, agreement = save.options, save.agreement
        references = merged((part for part in written if part.is_referenced), save.plan.tensors)
        links = used_links(agreement.links, references)
        return Manifest(
            version=INCREMENTAL_VERSION if links else VERSION,
            chain=links or msgspec.UNSET,
            prefix=agreement.prefix,
            save_id=agreement.save_id,
            created_at=agreement.created_at,
            world_size=save.world_size,
            tensors=save.plan.tensors,
            states=save.states,
            parts=[*(part for part in written if not part.is_referenced), *references],
            layout=options.format,
            compression=options.compression_level,
            extra_files=dict(extra),
            job=run.job,
            step=run.step if options.step is None else options.step,
            epoch=run.epoch if options.epoch is None else options.epoch,
            fence=run.fence,
            custom={**_metrics_of(options), **options.custom_metadata},
        )

    def _publish_indexes(self, save: RankSave) -> None:
        """Publish the indexes for other tools. The checkpoint exists already, so a failure is only logged."""
        storage, agreement = self._context.storage, save.agreement
        try:
            publish_indexes(storage, agreement.prefix, agreement.save_id, save.whole_tensor_files())
        except CheckpointException as error:
            self._context.log.warning(
                "the index of a consolidated checkpoint could not be written",
                prefix=agreement.prefix,
                reason=str(error),
            )

    def _delete_temporary_parts(self, save: RankSave) -> None:
        """Delete the parts from which the files of whole tensors were assembled."""
        try:
            self._context.storage.delete([save.file(rank) for rank in range(save.world_size)])
        except CheckpointException as error:
            self._context.log.warning(
                "could not delete temporary files of a save", prefix=save.agreement.prefix, reason=str(error)
            )

    # When a step fails.

    def roll_back(self, save: RankSave) -> None:
        """Delete the files of a failed save: the root those of all ranks, another rank its own."""
        storage, agreement = self._context.storage, save.agreement
        ranks = range(save.world_size) if save.is_root else [save.rank]
        files = save.whole_tensor_files() if save.is_root and save.has_whole_tensor_files else []
        try:
            storage.delete([*map(save.file, ranks), *(f"{agreement.prefix}/{file.name}" for file in files)])
            withdraw_indexes(storage, agreement.prefix, agreement.save_id, files)
        except CheckpointException as error:
            self._context.log.warning(
                "could not delete files of a failed save", prefix=agreement.prefix, reason=str(error)
            )


async def save_state(
    storage: Storage,
    ranks: RankGroup,
    state: Any,
    options: SaveOptions,
    token: CancelToken,
    leaf_types: Sequence[LeafType] = (),
) -> str:
    """Save one state, once."""
    saver = Saver(SaveContext(storage, time.time, os.urandom, tuple(leaf_types), SILENT))

    async def given() -> Any:
        return state

    save = await saver.agree(ranks, given, options)
    return await saver.write_and_publish(ranks, save, RunInfo(), token)


def _metrics_of(options: SaveOptions) -> dict[str, Any]:
    """The metrics as custom metadata, as far as JSON has them."""
    finite = {name: value for name, value in options.metrics.items() if math.isfinite(value)}
    return {METRICS: finite} if finite else {}


def _is_plain(save: RankSave) -> bool:
    """Whether the checkpoint consists of the ranks' parts as they are staged."""
    if save.agreement.links:
        return False
    return save.options.compression_level is CompressionLevel.NONE and not save.has_whole_tensor_files
