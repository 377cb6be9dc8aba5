"""Tells an observer how a save goes.

Invariants:
- No report delays or fails a save.
- A save has one end. One that was committed has not failed, also if its ranks fail afterwards.
- The start names the base as the parent, because the save may use its files. The end names the checkpoint whose files
  it uses, which is known when all ranks have written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from forged.checkpoint.ports import ObservedSave, SaveObserver
from forged.errors import describe
from forged.log import Log


class SaveReport:
    """The reports about one save, by the root."""

    def __init__(
        self, observer: SaveObserver, save: ObservedSave, log: Log, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Tells that the save has started."""
        self._observer = observer
        self._save = save
        self._log = log
        self._monotonic = monotonic
        self._began_at = monotonic()
        self._is_over = False
        self._tell(lambda: observer.save_started(save))

    def committed(self, size_bytes: int, parent: str = "") -> None:
        """The checkpoint exists, and uses files of its parent, if it has one."""
        seconds = self._monotonic() - self._began_at
        save = replace(self._save, parent=parent)
        self._end(lambda: self._observer.save_committed(save, size_bytes, seconds))

    def failed(self, error: BaseException) -> None:
        """There is no checkpoint. No effect after the end."""
        self._end(lambda: self._observer.save_failed(self._save, describe(error)))

    def _end(self, tell: Callable[[], None]) -> None:
        if not self._is_over:
            self._is_over = True
            self._tell(tell)

    def _tell(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # noqa: BLE001 - the save goes on
            self._log.error("a save could not be reported", prefix=self._save.prefix, reason=describe(error))
