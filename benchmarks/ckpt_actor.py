"""A process that does what it is told and says how long that took; the side that runs in the process.

Law: it measures itself, so that no pipe is part of a figure, and does nothing but what it is told: who is not measured
stands still. Needs nothing but Python, because the peers import it in an environment of their own.

It writes `{"ready": true}` when it has made what it needs, and then one line of JSON for each that it is given:
`{"do": NAME, "path": PATH}` is answered by the figures of that action, or by `{"error": WHY}`.
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
PEAK_ANEW = "5"
"""What has the kernel begin anew with the peak of a process's memory."""


def serve(actions: Mapping[str, Action]) -> None:
    """Do as told until nobody tells any more."""
    lines, answers = sys.stdin, os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What a library prints is no answer.
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in lines:
        wish = json.loads(line)
        answers.write(json.dumps(_answer(actions[wish["do"]], Path(wish["path"]))) + "\n")


def _answer(action: Action, path: Path) -> Mapping[str, object]:
    try:
        return action(path)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side has to learn of it
        return {"error": f"{type(error).__name__}: {error}"}


def timed(act: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and how many seconds it took."""
    start = time.perf_counter()
    made = act()
    return made, time.perf_counter() - start


def begin_peak() -> int:
    """How much memory the process has in use, in bytes; its peak begins anew."""
    Path("/proc/self/clear_refs").write_text(PEAK_ANEW)
    return _kib("VmRSS") * 1024


def peak() -> int:
    """How much memory, shared or its own, the process has had in use at most since then."""
    return _kib("VmHWM") * 1024


def read_bytes() -> int:
    """How much the process has read so far, from disk or page cache."""
    return next(int(line.split()[1]) for line in IO.read_text().splitlines() if line.startswith("rchar:"))


def _kib(name: str) -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
