"""What both commands are as processes: their exit codes, and how they write.

Law: the exit code says which kind of thing went wrong, the same way in both. Whoever reads our output may stop at any
time; that is no failure. Output that cannot be written is one, and is told where it still can be.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

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


def run(program: str, act: Callable[[], int], *, json: bool = False) -> int:
    """Act to the end, whatever becomes of the output; returns the exit code."""
    # Python has no such object for a stream that was closed by whoever started it.
    if not sys.stdout:
        closed = ForgedError("output_failed", "standard output is closed; nothing was done", "send it to /dev/null")
        return complain(program, closed, json=json)
    try:
        return _act(program, act, json=json)
    except BrokenPipeError:
        stop_writing()
        return EXIT_OK
    except OSError as error:
        stop_writing()
        failure = ForgedError("output_failed", f"the output cannot be written: {error.strerror}")
        return complain(program, failure, json=json)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def complain(program: str, error: ForgedError, *, json: bool = False) -> int:
    """Say what went wrong, to people or to a program; returns the exit code."""
    remark(_as_json(error) if json else f"{program}: {error}")
    return next((code for kind, code in _CODES if isinstance(error, kind)), EXIT_FAILED)


def say(text: str) -> None:
    """Say something on standard output; what is being done goes on when nobody hears it."""
    try:
        print(text, flush=True)
    except OSError:
        stop_writing()


def remark(text: str) -> None:
    """Say something on standard error, if anybody can hear it; never with what a terminal would obey."""
    if not sys.stderr:
        return
    try:
        print("\n".join(map(plain, text.split("\n"))), file=sys.stderr, flush=True)
    except OSError:
        _send_nowhere(sys.stderr)


def plain(text: str) -> str:
    """The text without what a terminal would obey."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def stop_writing() -> None:
    """Drop what has not been written, or Python would try once more at exit, and complain."""
    _send_nowhere(sys.stdout)


def stop_remarking() -> None:
    """Have nobody hear what is said on standard error from now on."""
    if sys.stderr:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        _send_nowhere(sys.stderr)


def heed_reader() -> None:
    """Stop, as a write would, when nobody can read what will be written."""
    with contextlib.suppress(ValueError):  # what a test puts into its place is no file
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)
        if watch.poll(0):
            raise BrokenPipeError


def _act(program: str, act: Callable[[], int], *, json: bool) -> int:
    try:
        return act()
    except ForgedError as error:
        sys.stdout.flush()
        return complain(program, error, json=json)
    finally:
        sys.stdout.flush()


def _as_json(error: ForgedError) -> str:
    from json import dumps

    what = {"kind": error.kind, "code": error.code, "message": error.message, "fix": error.fix}
    if isinstance(error, ConfigError) and error.problems:
        what["message"] = "; ".join([error.message, *map(str, error.problems)])
    return dumps({"error": what})


def _send_nowhere(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
