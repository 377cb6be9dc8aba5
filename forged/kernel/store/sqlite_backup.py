"""A copy of a database, made while it is in use.

Law: the copy shows one revision, the one at which it was finished. It is made in slices in key order, and commits go on
between them: what they change among the keys already copied is changed in the copy too, and the rest is yet to be read.

The copy has a history of its own, for from here on it may be written differently from the original: a restored backup
is not the same past as the store that went on without it.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from forged.errors import RequestRefused
from forged.kernel.store.batch import Decision, Write
from forged.kernel.store.sqlite_database import Database, write
from forged.kernel.store.sqlite_file import NEW_SUFFIX, start

SLICE_ENTRIES_MAX = 256
SLICE_BYTES_MAX = 1 << 20

_SLICE = "SELECT key, value, revision FROM kv WHERE key > ? ORDER BY key LIMIT ?"


class Backup:
    """One copy in the making; everything here runs on the thread of the database."""

    def __init__(self, database: Database, path: Path) -> None:
        self._database = database
        self._path = path
        self._history = database.opening.new_history()
        self.new = path.with_name(f"{path.name}.{self._history}{NEW_SUFFIX}")
        self._position = ""
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Start the file beside the path, and follow what is committed from here on."""
        if self._path.exists() and self._path.samefile(self._database.opening.path):
            raise RequestRefused("backup_onto_store", f"{self._path} is the store itself", "name another file")
        self._target = start(self.new, self._database.opening, self._history)
        self._target.execute("BEGIN")
        self._database.followers.append(self)

    def step(self) -> bool:
        """Copy one slice; False when that was the last, and the file is complete but not yet durable."""
        if self._failure is not None:
            raise self._failure
        rows = self._slice()
        write(self._target, rows, self._database.revision)
        if rows:
            self._position = rows[-1][0]
            return True
        self._target.execute("COMMIT")
        self._let_go()
        return False

    def follow(self, decision: Decision) -> None:
        """Repeat a commit's writes among the keys already copied; a failure is the backup's, not the commit's."""
        try:
            behind = [each for each in decision.writes.values() if each[0] <= self._position]
            write(self._target, behind, decision.revision)
        except (sqlite3.Error, OSError) as failure:
            self._failure = failure

    def abandon(self) -> None:
        """Remove the unfinished copy."""
        if self in self._database.followers:
            self._let_go()
        self.new.unlink(missing_ok=True)

    def _let_go(self) -> None:
        self._database.followers.remove(self)
        self._target.close()

    def _slice(self) -> list[Write]:
        rows: list[Write] = []
        size_bytes = 0
        with closing(self._database.connection.execute(_SLICE, (self._position, SLICE_ENTRIES_MAX))) as found:
            for row in found:
                rows.append(row)
                size_bytes += len(row[1])
                if size_bytes >= SLICE_BYTES_MAX:
                    break
        return rows
