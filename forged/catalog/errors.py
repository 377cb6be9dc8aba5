"""The refusals of the checkpoint catalogue.

Invariants:
- Every refusal names the checkpoint or the argument that it is about, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from forged.errors import Problem, RequestRefused
from forged.phrases import named

Refusal = TypeVar("Refusal", bound="CatalogRefused")


class CatalogRefused(RequestRefused):
    """The base of these refusals. `checkpoint_id` is empty if it is about no checkpoint."""

    checkpoint_id: str = ""


class CheckpointUnknown(CatalogRefused):
    """The catalogue has no such checkpoint."""


class CheckpointInvalid(CatalogRefused):
    """An argument or a record has values that no checkpoint can have."""


class TransitionRefused(CatalogRefused):
    """The checkpoint's state does not allow the change."""


class ChainBroken(CatalogRefused):
    """A checkpoint cannot be restored, because one that it builds on is missing or not complete."""


class ChainCyclic(ChainBroken):
    """A checkpoint builds on itself."""


class ParentMissing(CatalogRefused):
    """There is no checkpoint that an incremental one could build on."""


class CheckpointInUse(CatalogRefused):
    """The checkpoint is pinned, held, or the parent of `children`."""

    children: tuple[str, ...] = ()


def argument_invalid(name: str, value: object, wanted: str) -> CheckpointInvalid:
    return CheckpointInvalid("checkpoint_argument_invalid", str(Problem(name, value, wanted)), f"correct {name}")


def record_invalid(checkpoint_id: str, problems: Sequence[Problem]) -> CheckpointInvalid:
    text = "; ".join(map(str, problems))
    return _about(
        checkpoint_id,
        CheckpointInvalid("checkpoint_invalid", f"checkpoint {checkpoint_id} is not valid: {text}", "save a new one"),
    )


def unknown(checkpoint_id: str) -> CheckpointUnknown:
    error = CheckpointUnknown(
        "checkpoint_unknown", f"there is no checkpoint {checkpoint_id[:200]!r}", "list the checkpoints of the run"
    )
    return _about(checkpoint_id, error)


def transition_refused(checkpoint_id: str, state: str, change: str, fix: str) -> TransitionRefused:
    text = f"checkpoint {checkpoint_id} is {state}; it cannot {change}"
    return _about(checkpoint_id, TransitionRefused("checkpoint_transition_refused", text, fix))


def not_abandoned(checkpoint_id: str) -> TransitionRefused:
    error = TransitionRefused(
        "checkpoint_not_abandoned", f"checkpoint {checkpoint_id} is not abandoned", "choose one that is abandoned"
    )
    return _about(checkpoint_id, error)


def chain_broken(target: str, checkpoint_id: str, what: str) -> ChainBroken:
    """`checkpoint_id` is the one that breaks the chain of `target`."""
    text = f"the chain of checkpoint {target} is broken: {checkpoint_id} is {what}"
    return _about(checkpoint_id, ChainBroken("checkpoint_chain_broken", text, "restore another checkpoint"))


def chain_cyclic(target: str, checkpoint_id: str) -> ChainCyclic:
    text = f"the chain of checkpoint {target} has a cycle: {checkpoint_id} builds on itself"
    return _about(checkpoint_id, ChainCyclic("checkpoint_chain_cyclic", text, "restore another checkpoint"))


def parent_missing(run: str) -> ParentMissing:
    return ParentMissing(
        "checkpoint_parent_missing",
        f"run {run} has no restorable checkpoint that an incremental one could build on",
        "save a full checkpoint first",
    )


def parent_needed(checkpoint_id: str, children: Sequence[str]) -> CheckpointInUse:
    error = CheckpointInUse(
        "checkpoint_parent_needed",
        f"checkpoint {checkpoint_id} is needed by {named(children)}",
        "delete the checkpoints that build on it first",
    )
    error.children = tuple(children)
    return _about(checkpoint_id, error)


def pinned(checkpoint_id: str) -> CheckpointInUse:
    error = CheckpointInUse("checkpoint_pinned", f"checkpoint {checkpoint_id} is pinned", "unpin it first")
    return _about(checkpoint_id, error)


def held(checkpoint_id: str, holders: Sequence[str]) -> CheckpointInUse:
    text = f"checkpoint {checkpoint_id} is used by {named(holders)}"
    fix = "wait until it is released; a model releases it when its version is deleted, as `forgectl models rm` does"
    return _about(checkpoint_id, CheckpointInUse("checkpoint_held", text, fix))


def _about(checkpoint_id: str, error: Refusal) -> Refusal:
    error.checkpoint_id = checkpoint_id
    return error
