"""Exit codes and output of the commands `forged` and `forgectl`.

Invariants:
- The exit code says which kind of error occurred, with the same codes in both commands.
- The reader of the output may close it at any time; that is no failure.
- Output that cannot be written for another reason is a failure, and is reported on standard error.
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
    """Run a command and handle its errors and output errors; returns the exit code."""
    # `sys.stdout` is None if the parent process closed the stream.
    if not sys.stdout:
        closed = ForgedError("output_failed", "standard output is closed; nothing was done", "redirect it to /dev/null")
        return print_error(program, closed, json=json)
    try:
        return _act(program, act, json=json)
    except BrokenPipeError:
        stop_writing()
        return EXIT_OK
    except OSError as error:
        stop_writing()
        failure = ForgedError("output_failed", f"cannot write the output: {error.strerror}")
        return print_error(program, failure, json=json)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def print_error(program: str, error: ForgedError, *, json: bool = False) -> int:
    """Print an error to standard error, as text or JSON; returns the exit code."""
    remark(_as_json(error) if json else f"{program}: {error}")
    return next((code for kind, code in _CODES if isinstance(error, kind)), EXIT_FAILED)


def say(text: str) -> None:
    """Print to standard output; ignore a closed or full output."""
    try:
        print(text, flush=True)
    except OSError:
        stop_writing()


def remark(text: str) -> None:
    """Print to standard error without control characters; ignore a closed or full output."""
    if not sys.stderr:
        return
    try:
        print("\n".join(map(plain, text.split("\n"))), file=sys.stderr, flush=True)
    except OSError:
        _send_nowhere(sys.stderr)


def plain(text: str) -> str:
    """The text with control characters escaped."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def stop_writing() -> None:
    """Discard further output to standard output; else Python would fail to flush it at exit."""
    _send_nowhere(sys.stdout)


def stop_remarking() -> None:
    """Discard further output to standard error."""
    if sys.stderr:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        _send_nowhere(sys.stderr)


def stop_without_reader() -> None:
    """Raise `BrokenPipeError` if the reader of standard output has closed it."""
    with contextlib.suppress(ValueError):  # a test may replace the stream with an object without a descriptor
        watch = select.poll()
        watch.register(sys.stdout.fileno(), 0)
        if watch.poll(0):
            raise BrokenPipeError


def _act(program: str, act: Callable[[], int], *, json: bool) -> int:
    try:
        return act()
    except ForgedError as error:
        sys.stdout.flush()
        return print_error(program, error, json=json)
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
