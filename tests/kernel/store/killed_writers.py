"""A process that forks writers to be killed: `python -m tests.kernel.store.killed_writers`, with a path on each line.

A writer prints `born` and its pid, then `acknowledged` and each acknowledged revision; the forking process prints
`dead` when the writer has ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from forged.kernel.store.port import Entry, Transaction
from forged.kernel.store.sqlite import SqliteStore

BATCH_TRANSACTIONS = 3
KEPT_REVISIONS = 30
STDOUT = 1


def batch_after(revision: int) -> Sequence[Transaction]:
    """The batch that a writer commits at this revision."""
    revisions = range(revision + 1, revision + 1 + BATCH_TRANSACTIONS)
    return [
        Transaction(
            each,
            {f"a/{each:06}": payload(each), f"b/{each:06}": payload(each), "head": payload(each)},
            deletes=[f"{half}/{each - KEPT_REVISIONS:06}" for half in "ab" if each > KEPT_REVISIONS],
        )
        for each in revisions
    ]


def state_at(revision: int) -> Sequence[Entry]:
    """The content of a store at this revision."""
    kept = range(max(1, revision - KEPT_REVISIONS + 1), revision + 1)
    halves = [Entry(f"{half}/{each:06}", payload(each), each) for half in "ab" for each in kept]
    return [*halves, Entry("head", payload(revision), revision)] if revision else []


def payload(revision: int) -> bytes:
    """A value of 0 bytes to several pages."""
    return f"{revision},".encode() * (revision * 37 % 2000)


async def write(path: Path) -> None:
    """Commit until killed."""
    store = await SqliteStore.open(path)
    while True:
        await store.commit(batch_after(store.revision))
        say("acknowledged", store.revision)


def say(word: str, number: int) -> None:
    """Print one line with one write."""
    os.write(STDOUT, f"{word} {number}\n".encode())


def main() -> None:
    """Fork one writer per line and wait for its end."""
    for line in sys.stdin:
        writer = os.fork()
        if writer == 0:
            say("born", os.getpid())
            asyncio.run(write(Path(line.rstrip("\n"))))
        os.waitpid(writer, 0)
        say("dead", writer)


if __name__ == "__main__":
    main()
