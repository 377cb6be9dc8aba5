"""`kill -9` during saves, conversions, compactions and deletions loses nothing, and leaves no partial checkpoint.

`FORGED_KILLS` says how often, `FORGED_SEED` when; both are printed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random, SystemRandom
from typing import IO

import pytest

import forged
from forged.checkpoint.ports import Storage
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.crashes.save_history import Expectation, clear_away, load_all, same
from tests.checkpoint.crashes.savers_to_kill import saved_state

KILLS = int(os.environ.get("FORGED_KILLS", "100"))
SEED = int(os.environ.get("FORGED_SEED") or SystemRandom().getrandbits(32))
KILLS_PER_DIRECTORY = 50
NOTES_MAX = 12
TURNS_MAX = 200_000
PROJECT = Path(forged.__file__).parents[1]


class Victims:
    """The warm process, from the outside."""

    def __init__(self, orders: IO[bytes], words: IO[bytes]) -> None:
        self._orders = orders
        self._words = words

    def kill_one(self, directory: Path, seed: int, version: int, notes: int, turns: int) -> list[str]:
        """Let one live, and kill it so many turns of a loop after so many notes; returns all that it has said.

        The turns let the kill meet any part of what it does.
        """
        self._orders.write(f"{directory} {seed} {version}\n".encode())
        self._orders.flush()
        born, pid = self._hear().split()
        assert born == "born"
        heard = [self._hear() for _ in range(notes)]
        for _ in range(turns):
            pass
        if not any(line.startswith("dead") for line in heard):
            os.kill(int(pid), signal.SIGKILL)
        while not heard or not heard[-1].startswith("dead"):
            heard.append(self._hear())
        assert heard.pop() == f"dead {-signal.SIGKILL}", f"it ended by itself, after {heard[-3:]}"
        return heard

    def _hear(self) -> str:
        line = self._words.readline().decode().rstrip("\n")
        assert line, "the warm process is gone"
        return line


@pytest.fixture
def victims() -> Iterator[Victims]:
    command = [sys.executable, "-m", "tests.checkpoint.crashes.savers_to_kill"]
    with subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Victims(process.stdin, process.stdout)


@pytest.mark.parametrize("number", range(-(-KILLS // KILLS_PER_DIRECTORY)))
def test_kill_9_loses_nothing_and_leaves_nothing_half_there(victims: Victims, tmp_path: Path, number: int) -> None:
    kills = min(KILLS - number * KILLS_PER_DIRECTORY, KILLS_PER_DIRECTORY)
    print(f"FORGED_KILLS={kills} FORGED_SEED={SEED + number}")
    random, expected, storage = Random(SEED + number), Expectation(), LocalStorage(tmp_path)
    version = interrupted = 0
    for _ in range(kills):
        order = random.getrandbits(32), version, random.randrange(NOTES_MAX), random.randrange(TURNS_MAX)
        for note in victims.kill_one(tmp_path, *order):
            expected.note(note)
            version = max(version, int(note.split()[3]))
        interrupted += bool(expected.under_way)
        _check(storage, expected)
    clear_away(storage)
    _check(storage, expected)
    assert version >= kills // 2
    assert interrupted >= kills // 8
    _nothing_stays(tmp_path, storage)


def _check(storage: Storage, expected: Expectation) -> None:
    """What is there is what may be; and as nothing but a process has died, it is so from now on."""
    found = {}
    for prefix in listing.prefixes(storage):
        [state] = load_all(storage, prefix)
        found[prefix] = version = int(state["step"])
        assert same(state, saved_state(version)), f"{prefix} is not what was saved"
    for prefix in {*found, *expected.prefixes()}:
        assert expected.allows(prefix, found.get(prefix, 0)), f"{prefix} is {found.get(prefix, 0)}, not {expected}"
    expected.under_way.clear()
    expected.certain = found


def _nothing_stays(directory: Path, storage: Storage) -> None:
    """When all are deleted, and what the dead have left is cleared away, the directory is empty again."""
    for prefix in listing.prefixes(storage):
        listing.delete(storage, prefix, force=True)
    clear_away(storage)
    assert list(directory.iterdir()) == []
