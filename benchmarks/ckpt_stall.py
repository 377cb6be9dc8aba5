"""How long an asynchronous save keeps its caller waiting, and how much memory it takes.

Every round starts each process anew, so that there is a first save in each; the others after it are the later ones.
Ours has touched its memory before, as a trainer does that calls `prepare`; how long that takes is told. The reference
is one memcpy of the state into memory that is warm. Torch stages into memory that it keeps. Memory is the peak of the
process, shared memory included, above what it had in use with nothing but its state.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.ckpt_contest import Comparison, Scale, run
from benchmarks.ckpt_peer import Peer, ours, torch
from benchmarks.ckpt_plain import Plain, removed
from benchmarks.ckpt_scene import Load, room
from benchmarks.harness import Figure

LATER = 2
MEMCPY_AIM, FIRST_AIM, LATER_AIM = 0.77, 3.33, 1.0
"""At most 1.3 times a memcpy, 0.3 times a peer's first save, and no more than its later ones."""
MEMORY_LIMIT = 1.1
KINDS: dict[str, tuple[Callable[[Load], Peer], str]] = {
    "ours": (ours, "stall"),
    "thread": (torch, "stall_thread"),
    "process": (torch, "stall_process"),
}
PEERS = {"thread": "torch DCP (thread)", "process": "torch DCP (process, shared memory)"}


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    load, plain = scale.large, Plain(scale.large)
    found: defaultdict[str, list[float]] = defaultdict(list)
    names = [name for name in KINDS if name == "ours" or not scale.no_torch]
    with room() as path:
        for _ in range(scale.rounds):
            for name in names:
                plain.copy()  # What was not touched for a while is not warm.
                found["memcpy"].append(plain.copy())
                _take_turn(name, load, path, found)
            names.reverse()
    return _figures(scale, found)


def _take_turn(name: str, load: Load, path: Path, found: defaultdict[str, list[float]]) -> None:
    kind, action = KINDS[name]
    with kind(load) as peer:
        if name == "ours":
            found["prepare"].append(peer.do("prepare", path)["s"])
        for number in range(1 + LATER):
            said: dict[str, float] = {}
            removed(path / name, lambda its: said.update(peer.do(action, its)) or 0.0)  # noqa: B023
            found[f"{name}, {'later' if number else 'first'}"].append(said["s"])
            found[f"{name}, all"].append(said["all_s"])
        found[f"{name}, memory"].append(said["extra"] / load.nbytes)


def _figures(scale: Scale, found: dict[str, list[float]]) -> list[Figure]:
    figures, why = [], f" ({scale.no_torch})" if scale.no_torch else ""
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
