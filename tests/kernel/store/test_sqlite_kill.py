"""`kill -9` during commits loses no acknowledged commit and leaves no partial batch."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import IO

import pytest

import forged
from forged.kernel.store.port import Entry
from forged.kernel.store.sqlite import SqliteStore
from tests.kernel.store.killed_writers import BATCH_TRANSACTIONS, state_at

KILLS = 60
ACKNOWLEDGED_MAX = 15
TURNS_MAX = 50_000
PROJECT = Path(forged.__file__).parents[1]


class KilledWriters:
    """The process that forks writers, seen from the test."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin = stdin
        self._stdout = stdout

    def kill_one(self, path: Path, acknowledgements: int, turns: int) -> Sequence[int]:
        """Start a writer and kill it some loop turns after some acknowledgements.

        The turns vary the part of a commit that is hit. Returns the acknowledged revisions.
        """
        self._stdin.write(f"{path}\n".encode())
        self._stdin.flush()
        word, writer = self._read()
        assert word == "born"
        revisions = [self._read()[1] for _ in range(acknowledgements)]
        for _ in range(turns):
            pass
        os.kill(writer, signal.SIGKILL)
        while (heard := self._read())[0] != "dead":
            revisions.append(heard[1])
        return revisions

    def _read(self) -> tuple[str, int]:
        word, number = self._stdout.readline().split()
        return word.decode(), int(number)


@pytest.fixture
def writers() -> Iterator[KilledWriters]:
    command = [sys.executable, "-m", "tests.kernel.store.killed_writers"]
    with subprocess.Popen(command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield KilledWriters(process.stdin, process.stdout)


async def reopen(path: Path) -> tuple[int, Sequence[Entry]]:
    store = await SqliteStore.open(path)
    try:
        return store.revision, await store.list("")
    finally:
        await store.close()


def test_kill_keeps_acknowledged_batches_and_no_partial_one(writers: KilledWriters, tmp_path: Path) -> None:
    path, random, last = tmp_path / "store.db", Random(1), 0
    for _ in range(KILLS):
        acknowledged = writers.kill_one(path, random.randrange(ACKNOWLEDGED_MAX), random.randrange(TURNS_MAX))
        revision, found = asyncio.run(reopen(path))
        last = acknowledged[-1] if acknowledged else last
        assert revision in {last, last + BATCH_TRANSACTIONS}
        assert found == state_at(revision)
        last = revision
    assert last > KILLS


def test_a_kill_while_the_store_is_made_leaves_none_or_a_whole_one(writers: KilledWriters, tmp_path: Path) -> None:
    random = Random(2)
    for number in range(KILLS):
        path = tmp_path / f"{number}.db"
        acknowledged = writers.kill_one(path, 0, random.randrange(10 * TURNS_MAX))
        revision, found = asyncio.run(reopen(path))
        assert revision >= max(acknowledged, default=0)
        assert found == state_at(revision)
