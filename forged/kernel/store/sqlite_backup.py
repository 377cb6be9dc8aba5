"""Online backup of a database.

Invariants:
- The copy shows exactly one revision: the one at which it is finished. It is made in slices in key order; commits
  between slices are repeated in the copy for the keys already copied.
- The copy gets a new history name, because a restored backup and the original diverge.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from forged.errors import RequestRefused
from forged.kernel.store.batch import BatchOutcome, Write
from forged.kernel.store.sqlite_database import Database, write
from forged.kernel.store.sqlite_file import NEW_SUFFIX, create_file

SLICE_ENTRIES_MAX = 256
SLICE_BYTES_MAX = 1 << 20

_SLICE = "SELECT key, value, revision FROM kv WHERE key > ? ORDER BY key LIMIT ?"


class Backup:
    """One backup under way; runs on the thread of the database."""

    def __init__(self, database: Database, path: Path) -> None:
        self._database = database
        self._path = path
        self._history = database.options.new_history()
        self.new = path.with_name(f"{path.name}.{self._history}{NEW_SUFFIX}")
        self._position = ""
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Create the temporary file and observe commits from here on."""
        if self._path.exists() and self._path.samefile(self._database.options.path):
            raise RequestRefused(
                "backup_onto_store", f"backup path {self._path} is the store itself", "use another file"
            )
        self._target = create_file(self.new, self._database.options, self._history)
        self._target.execute("BEGIN")
        self._database.observers.append(self)

    def step(self) -> bool:
        """Copy one slice; False if it was the last: the file is complete but not durable yet."""
        if self._failure is not None:
            raise self._failure
        rows = self._slice()
        write(self._target, rows, self._database.revision)
        if rows:
            self._position = rows[-1][0]
            return True
        self._target.execute("COMMIT")
        self._detach()
        return False

    def committed(self, outcome: BatchOutcome) -> None:
        """Repeat a commit's writes to the keys already copied; a failure fails the backup, not the commit."""
        try:
            copied = [each for each in outcome.writes.values() if each[0] <= self._position]
            write(self._target, copied, outcome.revision)
        except (sqlite3.Error, OSError) as failure:
            self._failure = failure

    def abandon(self) -> None:
        """Remove the unfinished copy."""
        if self in self._database.observers:
            self._detach()
        self.new.unlink(missing_ok=True)

    def _detach(self) -> None:
        self._database.observers.remove(self)
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
