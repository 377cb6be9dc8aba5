"""A worker's log in its training script.

Invariants:
- Messages go to the logger `forged` of Python's `logging`, which the script configures. Without a configuration,
  warnings and errors appear on standard error.
- An error in the script's own code is logged with its traceback.
"""

from __future__ import annotations

import logging
import sys
from itertools import chain
from typing import Any

from forged.log import LEVELS, Log

NAME = "forged"


class ScriptLog:
    """Logs through `logging`."""

    def __init__(self, **bound: Any) -> None:
        self._logger = logging.getLogger(NAME)
        self._bound = bound

    def hears(self, level: str, /) -> bool:
        return self._logger.isEnabledFor(LEVELS[level])

    def debug(self, event: str, **fields: Any) -> None:
        self._say("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._say("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._say("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._say("error", event, fields, with_traceback=sys.exc_info()[0] is not None)

    def bind(self, **fields: Any) -> Log:
        return ScriptLog(**self._bound | fields)

    def _say(self, level: str, event: str, fields: dict[str, Any], *, with_traceback: bool = False) -> None:
        fields = self._bound | fields
        told = ", ".join(["%s=%s"] * len(fields))
        # `logging` formats the message, and survives a field that cannot be formatted.
        text = f"{NAME}: %s ({told})" if fields else f"{NAME}: %s"
        self._logger.log(LEVELS[level], text, event, *chain(*fields.items()), exc_info=with_traceback)


SCRIPT_LOG: Log = ScriptLog()
