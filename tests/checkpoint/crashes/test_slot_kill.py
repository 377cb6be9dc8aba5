"""`kill -9` during staging: the save before it is always whole, and what was being copied is never taken for whole.

`FORGED_SLOT_KILLS` says how often, `FORGED_SEED` when; both are printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random, SystemRandom

import numpy as np
import pytest

from forged.checkpoint.format.slot import SlotHeader
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.saving.slot_saver import save_slots
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.crashes.stagers_to_kill import NAMES, SLOT_BYTES, staged_state
from tests.checkpoint.crashes.test_kill import PROJECT, Victims
from tests.checkpoint.fixtures.plain_reader import state_of
from tests.checkpoint.fixtures.slot_host import made, opened, sets_in

KILLS = int(os.environ.get("FORGED_SLOT_KILLS", "150"))
SEED = int(os.environ.get("FORGED_SEED") or SystemRandom().getrandbits(32))
KILLS_PER_CASE = 50
STAGED_MAX = 4
TURNS_MAX = 1_000_000


@pytest.fixture
def victims() -> Iterator[Victims]:
    command = [sys.executable, "-m", "tests.checkpoint.crashes.stagers_to_kill"]
    with subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Victims(process.stdin, process.stdout)


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    for name in NAMES:
        slot = made(tmp_path / name, SLOT_BYTES)
        slot.memory.close()
        os.close(slot.fd)
    return tmp_path


@pytest.mark.parametrize("number", range(-(-KILLS // KILLS_PER_CASE)))
def test_kill_9_during_staging_leaves_the_save_before_it(victims: Victims, slots: Path, number: int) -> None:
    kills = min(KILLS - number * KILLS_PER_CASE, KILLS_PER_CASE)
    print(f"FORGED_SLOT_KILLS={kills} FORGED_SEED={SEED + number}")
    random, storage = Random(SEED + number), LocalStorage(slots / "checkpoints")
    staged = interrupted = 0
    for _ in range(kills):
        # An odd number of notes: the last one says that a copy begins.
        notes = 2 * random.randrange(STAGED_MAX) + 1
        order = random.getrandbits(32), staged, notes, random.randrange(TURNS_MAX)
        begun = staged
        for note in victims.kill_one(slots, *order):
            word, version = note.split()
            begun, staged = (int(version), staged) if word == "begin" else (begun, int(version))
        headers = [header for name in NAMES if isinstance(header := opened(slots / name).header(), SlotHeader)]
        interrupted += len(headers) < len(NAMES) and staged > 1
        found = _verified(slots, storage)
        # The last copy may have been whole when its stager died, before it said so.
        assert max(found, default=0) in {staged, begun}
        staged = max(found, default=0)
    assert staged >= kills // 2
    assert interrupted >= kills // 25


def _verified(slots: Path, storage: LocalStorage) -> list[int]:
    """The steps of the whole slots, each saved and read again."""
    found = []
    for whole, header in sets_in(slots):
        assert header.step is not None
        save_slots(storage, whole, CancelToken())
        state = state_of(storage, whole.manifest.prefix)["model"]
        expected = staged_state(header.step)
        assert state["version"] == header.step
        assert np.array_equal(state["bulk"], expected["bulk"])
        listing.delete(storage, whole.manifest.prefix)
        found.append(header.step)
    return found
