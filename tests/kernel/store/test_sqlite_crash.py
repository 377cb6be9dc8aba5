"""A power cut loses no acknowledged commit and leaves no partial batch.

All file operations of a run are recorded; crash states are derived from them at many moments and opened with the
standard library's SQLite. Runs with weaker syncing show that the crash states would reveal a loss.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import apsw
import pytest

from forged.kernel.store.memory import MemoryStore
from forged.kernel.store.port import Entry, StoreCorrupt, StoreUnavailable, Transaction
from forged.kernel.store.sqlite import SqliteStore
from forged.kernel.store.sqlite_connection import connect
from forged.kernel.store.sqlite_database import LOG_PAGES
from forged.kernel.store.sqlite_file import OpenOptions, ensure
from tests.kernel.store.disk import Disk, Medium, Operation, connect_through
from tests.sweeps import WHOLE

BATCHES = 60
CRASHES = 600 if WHOLE else 200
FREQUENT_CHECKPOINTS = {f"PRAGMA wal_autocheckpoint = {LOG_PAGES}": "PRAGMA wal_autocheckpoint = 40"}


@dataclass(frozen=True, slots=True)
class Run:
    """A run: the initial files, the operations, and the store's content at each revision."""

    initial: Mapping[str, bytes]
    operations: Sequence[Operation]
    states: dict[int, Sequence[Entry]]


@dataclass(frozen=True, slots=True)
class Crash:
    """The files after a crash, and the revisions that they may show."""

    files: Mapping[str, bytes]
    acknowledged: int
    begun: int


def fail_nothing(_: Operation) -> int | None:
    """No faults."""
    return None


def fail_one_sync() -> Callable[[Operation], int | None]:
    """The next sync fails."""
    failures = iter([apsw.SQLITE_IOERR_FSYNC])
    return lambda operation: next(failures, None) if operation.kind == "sync" else None


def batch_after(revision: int, random: Random) -> Sequence[Transaction]:
    """Transactions on old and new keys, with values from 0 bytes to several pages."""
    batch = []
    for number in range(revision + 1, revision + 1 + random.randint(1, 4)):
        puts = {
            "hot": number.to_bytes(4, "big"),
            f"value/{random.randrange(12)}": random.randbytes(random.choice((0, 30, 300, 3000, 20_000))),
            f"fact/{number:06}": random.randbytes(200),
        }
        batch.append(Transaction(number, puts, deletes=[f"fact/{number - 20:06}"] if number > 20 else []))
    return batch


async def record(disk: Disk, directory: Path, synchronous: str = "FULL", failing: float = 0.0) -> Run:
    """Commit batches, reopen once in between, and record all disk operations.

    A commit's sync fails with probability `failing`; its batch is then refused.
    """
    path = directory / "store.db"
    replaced = FREQUENT_CHECKPOINTS | {"PRAGMA synchronous = FULL": f"PRAGMA synchronous = {synchronous}"}
    ensure(OpenOptions(path, lambda: "a history", connect, {}, 1 << 30))
    run = Run({path.name: path.read_bytes()}, disk.operations, {0: []})
    random, revision = Random(1), 0
    batches: list[Sequence[Transaction]] = []
    for _ in range(2):
        store = await SqliteStore.open(path, connect=connect_through(disk, replaced))
        for _ in range(BATCHES // 2):
            batch = batch_after(revision, random)
            revision = batch[-1].revision
            run.states[revision] = await state_after([*batches, batch])
            disk.failing = fail_one_sync() if random.random() < failing else fail_nothing
            if await attempt(store, batch, disk):
                batches.append(batch)
        disk.failing = fail_nothing
        await store.close()
    return run


async def attempt(store: SqliteStore, batch: Sequence[Transaction], disk: Disk) -> bool:
    """Commit, with marks at its start and end."""
    disk.operations.append(Operation("mark", "begun", batch[-1].revision))
    try:
        await store.commit(batch)
        disk.operations.append(Operation("mark", "acknowledged", store.revision))
    except StoreUnavailable:
        disk.operations.append(Operation("mark", "begun", store.revision))
        return False
    return True


async def state_after(batches: Sequence[Sequence[Transaction]]) -> Sequence[Entry]:
    """The content of a store after these batches."""
    twin = MemoryStore("a history")
    for batch in batches:
        await twin.commit(batch)
    return await twin.list("")


def crashes(run: Run, random: Random) -> Iterator[Crash]:
    """Crashes at random moments of a run, in order."""
    medium = Medium(run.initial, random)
    reached = {"acknowledged": 0, "begun": 0}
    moments = Counter(random.choices(range(len(run.operations)), k=CRASHES))
    for moment, operation in enumerate(run.operations):
        medium.follow(operation)
        if operation.kind == "mark":
            reached[operation.name] = operation.offset
        for _ in range(moments[moment]):
            yield Crash(medium.crash(), **reached)


def restore(files: Mapping[str, bytes], directory: Path) -> None:
    """Write the files of a crash to disk."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)


async def verdict(crash: Crash, run: Run, directory: Path) -> str:
    """The error in the store after a crash; empty if it is correct."""
    restore(crash.files, directory)
    try:
        store = await SqliteStore.open(directory / "store.db")
    except StoreCorrupt as error:
        return error.message
    found = await store.list("")
    await store.close()
    if store.revision < crash.acknowledged:
        return f"revision {crash.acknowledged} was acknowledged, {store.revision} is left"
    if store.revision > crash.begun or found != run.states.get(store.revision):
        return f"what is found at revision {store.revision} was never committed"
    return ""


async def verdicts(run: Run, directory: Path, seed: int) -> Sequence[str]:
    """The errors after all crashes."""
    found = [await verdict(crash, run, directory / "crashed") for crash in crashes(run, Random(seed))]
    return [each for each in found if each]


@pytest.mark.parametrize("seed", range(2))
async def test_crash_keeps_acknowledged_batches_and_no_partial_one(tmp_path: Path, disk: Disk, seed: int) -> None:
    run = await record(disk, tmp_path)
    assert await verdicts(run, tmp_path, seed) == []


@pytest.mark.parametrize("seed", range(2))
async def test_crash_does_not_restore_refused_batches(tmp_path: Path, disk: Disk, seed: int) -> None:
    run = await record(disk, tmp_path, failing=0.3)
    assert sum(each.kind == "failed sync" for each in run.operations) > 10
    assert await verdicts(run, tmp_path, seed) == []


async def test_the_run_is_checkpointed_many_times(tmp_path: Path, disk: Disk) -> None:
    run = await record(disk, tmp_path)
    syncs = [each.name for each in run.operations if each.kind == "sync"]
    assert syncs.count("store.db") > 10
    assert syncs.count("store.db-wal") >= BATCHES


@pytest.mark.parametrize("synchronous", ["OFF", "NORMAL"])
async def test_the_same_crashes_find_a_loss_when_commits_are_not_synced(
    tmp_path: Path, disk: Disk, synchronous: str
) -> None:
    run = await record(disk, tmp_path, synchronous)
    assert any("was acknowledged" in each for each in await verdicts(run, tmp_path, seed=0))
