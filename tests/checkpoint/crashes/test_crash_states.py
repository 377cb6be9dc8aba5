"""A power cut at any moment takes nothing of what was acknowledged, and leaves nothing half there.

Everything that is asked of the disk is written down; then the disks are made that a power cut at any moment could
leave, and each is opened. That these would show a loss, the mutants prove.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from tests.checkpoint.crashes.crash_trials import (
    COMPACT,
    CONVERT,
    DELETE,
    SAVE,
    SAVE_INCREMENT,
    Action,
    Group,
    after_clearing,
    after_kills,
    before,
    kills_and_power_cuts,
    operations,
)
from tests.checkpoint.crashes.save_history import Finder, lives_in_chains
from tests.checkpoint.fixtures.memory_files import Image
from tests.sweeps import WHOLE, share

CONSOLIDATED = (("format", "consolidated"),)
WORLDS = [
    Group(),
    Group(2),
    Group(2, in_background=True),
    Group(2, options=CONSOLIDATED),
    Group(lacking=("unnamed",)),
    Group(lacking=("unnamed", "link", "direct", "reserve")),
    Group(3, options=(("format", "single_file"), ("compression_level", "fast"))),
]
IN_CHAINS = [Group(), Group(2), Group(2, in_background=True), Group(2, options=(("compression_level", "fast"),))]
DONE = [(world, action) for world in WORLDS[:5] for action in (SAVE, DELETE)] + [(Group(), CONVERT)]
DONE += [(world, SAVE_INCREMENT) for world in IN_CHAINS[:3]] + [(world, COMPACT) for world in IN_CHAINS[:2]]
TORN, DISTINCT_MIN = (600, 20_000) if WHOLE else (200, 10_000)
CLEARED_EVERY = 40
TURNS = 2
"""Savers are killed at half of the operations in one group, and at the rest in another."""


def test_a_power_cut_at_any_moment_takes_nothing_and_leaves_nothing_half_there() -> None:
    distinct = 0
    for world in WORLDS:
        seen: dict[Any, Image] = {}
        assert list(islice(kills_and_power_cuts(world, seen=seen, states_max=TORN, torn=TORN), 5)) == [], world
        distinct += len(seen)
        for image in islice(seen.values(), 0, None, CLEARED_EVERY):
            assert list(after_clearing(world, world.disk(image), Finder(world.size))) == [], world
    assert distinct >= DISTINCT_MIN


@pytest.mark.parametrize("world", IN_CHAINS, ids=str)
def test_a_power_cut_leaves_every_checkpoint_of_a_chain_whole_or_absent(world: Group) -> None:
    """Also while one of them is made full, and those whose files it has used are deleted."""
    seen: dict[Any, Image] = {}
    wrong = kills_and_power_cuts(world, lives_in_chains, seen=seen, states_max=TORN // 4, torn=TORN // 4)
    assert list(islice(wrong, 5)) == []
    for image in islice(seen.values(), 0, None, CLEARED_EVERY):
        assert list(after_clearing(world, world.disk(image), Finder(world.size))) == []


@pytest.mark.parametrize(("world", "action"), DONE, ids=str)
def test_repeated_action_after_a_kill_survives_a_power_cut(world: Group, action: Action) -> None:
    """The dead process may have done what another one then finds done, and never made it durable."""
    image = before(world, action)
    moments = share(len(operations(world, image, action)), DONE.index((world, action)), TURNS)
    assert list(islice(after_kills(world, image, action, moments=moments), 5)) == []
