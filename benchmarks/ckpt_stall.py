"""How long an asynchronous save blocks its caller, and how much memory it takes.

Every round starts new processes, so that each has a first save and later ones. The forged process calls `prepare`
before, as a trainer does; the time of that is a row. The reference is a memcpy of the state into warm memory. Torch
stages into memory that it keeps. Memory is the peak of the process, shared memory included, above its memory with only
the state.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.ckpt_baseline import Baseline, removed
from benchmarks.ckpt_comparison import Comparison, Scale, run
from benchmarks.ckpt_process import MeasuredProcess, forged_process, torch_process
from benchmarks.ckpt_workload import Workload, temporary_directory
from benchmarks.harness import Figure

LATER = 2
MEMCPY_AIM, FIRST_AIM, LATER_AIM = 0.77, 3.33, 1.0
"""At most 1.3 times a memcpy, 0.3 times a peer's first save, and no more than its later ones."""
MEMORY_LIMIT = 1.1
KINDS: dict[str, tuple[Callable[[Workload], MeasuredProcess], str]] = {
    "ours": (forged_process, "stall"),
    "thread": (torch_process, "stall_thread"),
    "process": (torch_process, "stall_process"),
}
PEERS = {"thread": "torch DCP (thread)", "process": "torch DCP (process, shared memory)"}


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    load, plain = scale.large, Baseline(scale.large)
    found: defaultdict[str, list[float]] = defaultdict(list)
    names = [name for name in KINDS if name == "ours" or not scale.torch_missing]
    with temporary_directory() as path:
        for _ in range(scale.rounds):
            for name in names:
                plain.copy()  # Memory that was not touched for a while is not warm.
                found["memcpy"].append(plain.copy())
                _take_turn(name, load, path, found)
            names.reverse()
    return _figures(scale, found)


def _take_turn(name: str, load: Workload, path: Path, found: defaultdict[str, list[float]]) -> None:
    kind, action = KINDS[name]
    with kind(load) as peer:
        if name == "ours":
            found["prepare"].append(peer.run("prepare", path)["s"])
        for number in range(1 + LATER):
            result: dict[str, float] = {}
            removed(path / name, lambda its: result.update(peer.run(action, its)) or 0.0)  # noqa: B023
            found[f"{name}, {'later' if number else 'first'}"].append(result["s"])
            found[f"{name}, all"].append(result["all_s"])
        found[f"{name}, memory"].append(result["extra"] / load.nbytes)


def _figures(scale: Scale, found: dict[str, list[float]]) -> list[Figure]:
    figures, why = [], f" ({scale.torch_missing})" if scale.torch_missing else ""
    for when, aim in (("first", FIRST_AIM), ("later", LATER_AIM)):
        stall = Comparison(f"caller waits, {when}", found[f"ours, {when}"])
        figures += stall.against("one memcpy", found["memcpy"], MEMCPY_AIM)
        for name, peer in PEERS.items():
            figures += stall.against(f"{peer}{why}", found.get(f"{name}, {when}"), aim)
    whole = Comparison("until it is committed", found["ours, all"])
    memory = max(found["ours, memory"])
    return [
        *figures,
        *whole.against(f"{PEERS['thread']}{why}", found.get("thread, all")),
        Figure("memory touched beforehand", "s", statistics.median(found["prepare"])),
        Figure("peak extra memory / state, against the limit", "", memory, MEMORY_LIMIT, 1.0, higher_is_better=False),
    ]


if __name__ == "__main__":
    run("ckpt_stall", measure)
