"""The measured side of a checkpoint benchmark: a process that runs actions on request and reports their figures.

It writes `{"ready": true}` after its setup, and then answers each line of JSON: `{"do": NAME, "path": PATH}` with the
figures of that action, or with `{"error": WHY}`. It needs only the standard library, because torch's processes import
it in an environment of their own.

Invariants:
- The process measures itself, so that no pipe is part of a figure.
- It runs nothing between requests, so that processes that are not measured stand still.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
Figures = dict[str, float]
Action = Callable[[Path], Figures]

STATUS, IO = Path("/proc/self/status"), Path("/proc/self/io")
RESET_PEAK = "5"
"""The value for clear_refs that resets the peak of the process's memory."""


def serve(actions: Mapping[str, Action]) -> None:
    """Answer requests until standard input ends."""
    lines, answers = sys.stdin, os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Keep the output of libraries out of the answers.
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in lines:
        command = json.loads(line)
        answers.write(json.dumps(_answer(actions[command["do"]], Path(command["path"]))) + "\n")


def _answer(action: Action, path: Path) -> Mapping[str, object]:
    try:
        return action(path)
    except Exception as error:  # noqa: BLE001 - every error is reported to the benchmark
        return {"error": f"{type(error).__name__}: {error}"}


def timed(act: Callable[[], T]) -> tuple[T, float]:
    """The result, and the seconds it took."""
    start = time.perf_counter()
    result = act()
    return result, time.perf_counter() - start


def reset_peak() -> int:
    """The memory in use, in bytes; resets the peak."""
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    return _kib("VmRSS") * 1024


def peak() -> int:
    """The peak memory since the reset, shared memory included."""
    return _kib("VmHWM") * 1024


def read_bytes() -> int:
    """The bytes read so far, from disk or page cache."""
    return next(int(line.split()[1]) for line in IO.read_text().splitlines() if line.startswith("rchar:"))


def _kib(name: str) -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
