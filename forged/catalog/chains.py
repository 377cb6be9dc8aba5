"""The chain of a checkpoint: the checkpoints that it builds on, down to one without a parent.

Invariants:
- A chain is returned as a whole or not at all: a parent that is missing or not complete, and a cycle, are refused with
  the name of the checkpoint at which the chain breaks.
- The target itself may be in any state, except where it is to be restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import isnan

from forged.catalog.errors import argument_invalid, chain_broken, chain_cyclic, record_invalid, unknown
from forged.catalog.model import EPOCH_MAX, SIZE_MAX, STEP_MAX, CheckpointMeta, CheckpointState, is_integer
from forged.errors import Problem

UNRESTORABLE = frozenset({CheckpointState.CORRUPTED, CheckpointState.DELETED})


def chain_length(checkpoints: Iterable[CheckpointMeta], checkpoint_id: str) -> int:
    """How many checkpoints a restore reads: 1 for one without a parent."""
    return len(_chain_of(checkpoints, checkpoint_id))


def find_chain_root(checkpoints: Iterable[CheckpointMeta], checkpoint_id: str) -> str | None:
    """The checkpoint without a parent at the end of the chain; None if there is no checkpoint of this id."""
    known = {one.checkpoint_id: one for one in checkpoints}
    if checkpoint_id not in known:
        return None
    return _chain_of(known.values(), checkpoint_id)[-1].checkpoint_id


def restoration_chain(checkpoints: Iterable[CheckpointMeta], target_id: str) -> list[str]:
    """The ids of the chain in the order in which they are applied, from the root to the target."""
    chain = _chain_of(checkpoints, target_id)
    if chain[0].state in UNRESTORABLE:
        raise chain_broken(target_id, target_id, chain[0].state)
    return [one.checkpoint_id for one in reversed(chain)]


def chain_size(checkpoints: Iterable[CheckpointMeta], target_id: str) -> int:
    """The bytes of all checkpoints in the chain."""
    return sum(one.size_bytes for one in _chain_of(checkpoints, target_id))


def estimate_restore_time(
    chain: Sequence[CheckpointMeta], base_ms: int, per_checkpoint_ms: int, bytes_per_ms: float
) -> int:
    """Whole milliseconds: a base, an overhead for each checkpoint, and the transfer of all bytes."""
    if isnan(bytes_per_ms) or bytes_per_ms <= 0:
        raise argument_invalid("bytes_per_ms", bytes_per_ms, "above 0")
    transfer_ms = sum(one.size_bytes for one in chain) / bytes_per_ms
    return base_ms + per_checkpoint_ms * len(chain) + int(transfer_ms)


def validate_checkpoint(checkpoint: CheckpointMeta, all_checkpoints: Iterable[CheckpointMeta]) -> None:
    """Refuse a checkpoint that cannot be restored: invalid values, corrupted, or with a chain that does not fit."""
    problems = tuple(_problems(checkpoint))
    if problems:
        raise record_invalid(checkpoint.checkpoint_id, problems)
    known = {one.checkpoint_id: one for one in all_checkpoints}
    chain = _chain_of([*known.values(), checkpoint], checkpoint.checkpoint_id)
    for child, parent in pairwise(chain):
        problems = tuple(_problems_of_link(child, parent))
        if problems:
            raise record_invalid(child.checkpoint_id, problems)


def _chain_of(checkpoints: Iterable[CheckpointMeta], target_id: str) -> list[CheckpointMeta]:
    """The chain from the target to its root."""
    known = {one.checkpoint_id: one for one in checkpoints}
    if target_id not in known:
        raise unknown(target_id)
    chain = [known[target_id]]
    seen = {target_id}
    while (parent_id := chain[-1].parent_id) is not None:
        if parent_id in seen:
            raise chain_cyclic(target_id, parent_id)
        if parent_id not in known:
            raise chain_broken(target_id, parent_id, "missing")
        if known[parent_id].state is not CheckpointState.COMPLETE:
            raise chain_broken(target_id, parent_id, known[parent_id].state)
        seen.add(parent_id)
        chain.append(known[parent_id])
    return chain


def _problems(checkpoint: CheckpointMeta) -> Iterator[Problem]:
    if not checkpoint.checkpoint_id:
        yield Problem("checkpoint_id", checkpoint.checkpoint_id, "not empty")
    if not checkpoint.training_run_id:
        yield Problem("training_run_id", checkpoint.training_run_id, "not empty")
    for name, most in (("epoch", EPOCH_MAX), ("step", STEP_MAX), ("size_bytes", SIZE_MAX)):
        value = getattr(checkpoint, name)
        if not is_integer(value, 0) or value > most:
            yield Problem(name, value, f"an integer from 0 to {most}")
    if checkpoint.state in UNRESTORABLE:
        yield Problem("state", str(checkpoint.state), "creating or complete")
    if not checkpoint.storage_path and checkpoint.state is not CheckpointState.CREATING:
        yield Problem("storage_path", checkpoint.storage_path, "not empty")
    if checkpoint.is_incremental and checkpoint.parent_id is None:
        yield Problem("parent_id", None, "the checkpoint that an incremental one builds on")


def _problems_of_link(child: CheckpointMeta, parent: CheckpointMeta) -> Iterator[Problem]:
    if child.training_run_id != parent.training_run_id:
        yield Problem("training_run_id", child.training_run_id, f"{parent.training_run_id}, as of its parent")
    if (child.epoch, child.step) < (parent.epoch, parent.step):
        place = f"epoch {parent.epoch}, step {parent.step}"
        yield Problem("step", child.step, f"at or after its parent {parent.checkpoint_id} ({place})")
