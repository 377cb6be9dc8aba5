"""What both commands are as processes: their exit codes, and how they write.

Law: the exit code says which kind of thing went wrong, the same way in both. Whoever reads our output may stop at any
time; that is no failure.
"""

from __future__ import annotations

import os
import sys

from forged.errors import ConfigError, ForgedError, RequestRefused, Unavailable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_UNAVAILABLE = 4
EXIT_INTERRUPTED = 130

_CODES: tuple[tuple[type[ForgedError], int], ...] = (
    (ConfigError, EXIT_USAGE),
    (RequestRefused, EXIT_REFUSED),
    (Unavailable, EXIT_UNAVAILABLE),
)


def complain(program: str, error: ForgedError, *, json: bool = False) -> int:
    """Say what went wrong, to people or to a program; returns the exit code."""
    print(_as_json(error) if json else f"{program}: {error}", file=sys.stderr)
    return next((code for kind, code in _CODES if isinstance(error, kind)), EXIT_FAILED)


def _as_json(error: ForgedError) -> str:
    from json import dumps

    what = {"kind": error.kind, "code": error.code, "message": error.message, "fix": error.fix}
    if isinstance(error, ConfigError) and error.problems:
        what["message"] = "; ".join([error.message, *map(str, error.problems)])
    return dumps({"error": what})


def stop_writing() -> None:
    """Drop what has not been written, or Python would try once more at exit, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
