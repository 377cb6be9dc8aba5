"""What a worker has to say to whoever runs its script.

Law: it goes to Python's own `logging`, as the logger `forged`, so that the script decides where it is written; a script
that decides nothing sees warnings and errors on its standard error. What failed in the script's own code comes with its
traceback.
"""

from __future__ import annotations

import logging
import sys
from itertools import chain
from typing import Any

from forged.log import LEVELS, Log

NAME = "forged"


class ScriptLog:
    """Says it through `logging`."""

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
        # Put together by `logging`, which survives what cannot be shown.
        text = f"{NAME}: %s ({told})" if fields else f"{NAME}: %s"
        self._logger.log(LEVELS[level], text, event, *chain(*fields.items()), exc_info=with_traceback)


SCRIPT_LOG: Log = ScriptLog()
