"""What the ranks agree on before a save: its name and id, the plan, and the checkpoints that it may build on.

Invariants:
- A plan is made again only when the arrays of a rank have changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from anyio import to_thread

from forged.checkpoint.format.manifest import ChainLink
from forged.checkpoint.format.states import States, split_per_rank
from forged.checkpoint.format.tree import Node, renumber_tensors
from forged.checkpoint.model import SaveOptions
from forged.checkpoint.rank_group import RankGroup
from forged.checkpoint.saving.files import parts
from forged.checkpoint.saving.files.image import Layout, layout_of
from forged.checkpoint.saving.files.plan import Description, SavePlan, plan
from forged.checkpoint.saving.files.slots import Slots


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """What a rank sends to the root before a save."""

    options: bytes
    frame: bytes
    """The nesting of the state, with placeholders for the values that differ between ranks."""
    own: bytes
    """The rank's values for the placeholders."""
    description: bytes
    """The digest of the rank's arrays: names, dtypes, shapes, boxes."""
    plan: bytes
    """The key of the plan that the rank has cached."""
    staged: str = ""
    """The save that all ranks have last staged into slots, as far as the rank knows; empty if it knows of none."""


class SaveAgreement(msgspec.Struct, frozen=True, array_like=True):
    """The root's answer to the proposals."""

    prefix: str
    save_id: str
    created_at: float
    plan: bytes
    is_known: bool
    """Whether every rank has cached this plan."""
    links: list[ChainLink] = []
    """The checkpoints whose files may be used, oldest first; the last is the base. None for a full save."""
    staged: list[str] = []
    """What the ranks know to be staged by all; a rank that was not told of it learns it here."""


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """The plan of the last save, reused while no rank's arrays change. Immutable, so concurrent saves may share it."""

    key: bytes = b""
    description: Description | None = None
    plan: SavePlan | None = None
    layout: Layout | None = None
    rank: int = 0
    """The rank that the layout is for."""


def proposal_of(
    ranks: RankGroup, node: Node, cached: CachedPlan, options: SaveOptions, slots: Slots | None
) -> Proposal:
    assert cached.description is not None
    if ranks.is_alone:
        return Proposal(b"", b"", b"", b"", cached.key)
    compared = msgspec.json.encode(
        (
            options.format,
            options.compression_level,
            options.copies,
            options.checkpoint_prefix,
            options.step,
            options.epoch,
            options.base,
            options.chain_max,
        )
    )
    frame, own = map(msgspec.json.encode, split_per_rank(node))
    staged = "" if slots is None else slots.agreed
    return Proposal(compared, frame, own, cached.description.digest(), cached.key, staged)


async def with_plan(ranks: RankGroup, cached: CachedPlan, agreement: SaveAgreement, options: SaveOptions) -> CachedPlan:
    """The agreed plan and the layout of this rank's file; from the cache where all ranks have them."""
    if agreement.is_known:
        return cached
    assert cached.description is not None
    made = await _new_plan(ranks, cached.description, options)
    layout: Layout | None = None

    async def lay_out() -> bytes:
        nonlocal layout
        layout = layout_of(made.tensors, made.shares[ranks.rank], parts.FILE_METADATA)
        return b""

    await ranks.decide(lay_out, _no_answer)
    return CachedPlan(agreement.plan, cached.description, made, layout, ranks.rank)


async def _new_plan(ranks: RankGroup, description: Description, options: SaveOptions) -> SavePlan:
    """The plan that the root makes from the descriptions of all ranks."""
    if ranks.is_alone:
        return plan([description])

    async def describe() -> bytes:
        return msgspec.msgpack.encode(description)

    async def decide(encoded: list[bytes]) -> bytes:
        descriptions = [msgspec.msgpack.decode(one, type=Description) for one in encoded]
        made = await to_thread.run_sync(plan, descriptions, options.copies)
        return msgspec.msgpack.encode(made)

    return msgspec.msgpack.decode(await ranks.decide(describe, decide), type=SavePlan)


def plan_key(proposals: list[Proposal], options: SaveOptions) -> bytes:
    """The cache key of a plan: everything that it depends on."""
    return b"".join([options.copies.to_bytes(1, "big"), *(proposal.description for proposal in proposals)])


def states_of(node: Node, proposals: list[Proposal], made: SavePlan) -> States:
    """The states of all ranks, with the tensor numbers of the manifest."""
    if len(made.numbers) == 1:
        return States.of([node])
    states = States([], [], [])
    known: dict[bytes, int] = {}
    for proposal, numbers in zip(proposals, made.numbers, strict=True):
        if proposal.frame not in known:
            # Frames with equal text have the same tensor names in the same places.
            known[proposal.frame] = states.frame_number(renumber_tensors(msgspec.json.decode(proposal.frame), numbers))
        states.add_rank(
            known[proposal.frame], [renumber_tensors(one, numbers) for one in msgspec.json.decode(proposal.own)]
        )
    return states


async def _no_answer(encoded: list[bytes]) -> bytes:
    return b""
