from __future__ import annotations

import pickle

import pytest

from forged.errors import ForgedError, RequestRefused
from forged.memory import MemoryRefused, errors

REFUSALS: dict[str, MemoryRefused] = {
    "argument": errors.argument_invalid("size", -1, "an integer >= 1"),
    "beyond": errors.size_beyond_device(2000, 1024),
    "unknown": errors.block_unknown("block-7"),
    "taken": errors.block_taken("block-7"),
    "place": errors.place_taken("block-7", 256, 512),
    "stale": errors.handle_stale("block-7", 3, 2),
    "status": errors.status_refused("block-7", "pinned", "marked as cached", "unpin it first"),
    "moving": errors.block_moving("block-7", "pinned"),
    "plan": errors.plan_unknown(4, 5),
    "ended": errors.plan_unknown(4, None),
    "open": errors.plan_open(5),
    "move": errors.move_unknown(5, 9),
    "early": errors.move_early("block-7", 9, 8),
}
TEXTS = {
    "argument": "size must be an integer >= 1, got -1 (correct size)",
    "beyond": "size must be at most 1024, which the device has, when rounded up to the alignment, got 2000 "
    "(ask for less, or use another device)",
    "unknown": "there is no block 'block-7' (it was never allocated, or is free already)",
    "taken": "there is a block 'block-7' already (free it first, or choose another id)",
    "place": "block 'block-7' cannot be at 256 with 512 bytes: not all of it is free (allocate it anew)",
    "stale": "block 'block-7' has version 3, and the handle 2 (the block has moved: use its new handle)",
    "status": "block 'block-7' is pinned; it cannot be marked as cached (unpin it first)",
    "moving": "block 'block-7' is being moved; it cannot be pinned (commit its move, or wait until the plan expires)",
    "plan": "there is no compaction plan of epoch 4 (the open one has 5)",
    "ended": "there is no compaction plan of epoch 4 "
    "(it has ended: the blocks of uncommitted moves are where they were)",
    "open": "the compaction plan of epoch 5 is open (commit its moves, or wait until it expires)",
    "move": "the compaction plan of epoch 5 has no open move 9 (it is committed already, or its block was freed)",
    "early": "move 9 of block 'block-7' cannot be committed before move 8 (its destination is not free yet)",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_has_a_code_a_text_and_a_fix(name: str) -> None:
    error = REFUSALS[name]
    assert isinstance(error, RequestRefused)
    assert error.code.startswith("memory_")
    assert error.message
    assert error.fix
    assert error.block_id == ("block-7" if "block-7" in error.message else "")


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_says_what_is_wrong_and_what_is_allowed(name: str) -> None:
    assert str(REFUSALS[name]) == TEXTS[name]


def test_each_kind_of_refusal_has_its_code() -> None:
    codes = [error.code for name, error in REFUSALS.items() if name != "ended"]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_can_be_sent_to_another_process(name: str) -> None:
    copy = pickle.loads(pickle.dumps(REFUSALS[name]))
    assert (type(copy), str(copy)) == (type(REFUSALS[name]), TEXTS[name])


def test_text_of_a_long_block_id_is_short() -> None:
    assert len(str(errors.block_unknown("x" * 10_000))) < 500


def test_inconsistent_pool_is_no_refusal() -> None:
    error = errors.inconsistent("holes are merged", (1, 2))
    assert isinstance(error, ForgedError)
    assert not isinstance(error, RequestRefused)
    assert str(error) == "holes are merged: (1, 2) (report this as a fault of forged)"
