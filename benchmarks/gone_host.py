"""How long a training stands still when the host of a worker is gone: not a packet tells anybody.

The daemon and each of four workers have a network namespace of their own; the link of one goes down. Taken are the time
until the daemon has told that its worker failed, and until all others have committed a step in the next world; once
with collectives that fit any window, and once with large ones, of which bytes are always under way. Then the host is
back, its worker is started anew, and it is another one's turn. It needs root, for the namespaces.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from random import Random

from benchmarks.harness import Figure, main
from benchmarks.hosted import ELEMENTS, HostedCluster
from benchmarks.hosted_trainee import JOB
from benchmarks.hosts import why_not
from forged.elastic.messages import WorkerFailed
from forged.kernel.messages import Record

WORKERS = ("w1", "w2", "w3", "w4")
ROUNDS = 10
LARGE = 1 << 17
GONE_HOST_MAX_S = 2.5


def _one(cluster: HostedCluster, victim: str) -> tuple[float, float]:
    """From the loss of a host to the news of it, and to the next step of the last of the others."""
    generation = cluster.until_together(*WORKERS)
    wall_less_monotonic_s = time.time() - time.monotonic()
    cluster.hosts.unplug(victim)
    gone_at = time.monotonic()
    survivors = [name for name in WORKERS if name != victim]
    after = cluster.until_together(*survivors, after=generation)
    stepped_at = max(cluster.workers[name].steps_in(after)[0]["at"] for name in survivors)
    told = cluster.client.past_facts(WorkerFailed, jobs=[JOB])[-1]
    if not isinstance(told, Record):
        raise TypeError(f"the daemon has forgotten who failed: {told}")
    cluster.hosts.plug_in(victim)
    cluster.until(lambda: bool(cluster.workers[victim].ended))
    cluster.start(victim)
    cluster.until_together(*WORKERS, after=after)
    return told.at - wall_less_monotonic_s - gone_at, stepped_at - gone_at


def _rounds(elements: int, rounds: int) -> list[tuple[float, float]]:
    random = Random(1)
    with tempfile.TemporaryDirectory() as directory, HostedCluster(directory, *WORKERS, elements=elements) as cluster:
        return [_one(cluster, random.choice(WORKERS)) for _ in range(rounds)]


def measure(quick: bool) -> list[Figure]:
    """Host after host."""
    if reason := why_not():
        raise SystemExit(f"there can be no hosts: {reason}")
    figures = []
    for kind, elements in (("small", ELEMENTS), ("large", LARGE)):
        noticed, stepped = zip(*_rounds(elements, 1 if quick else ROUNDS), strict=True)
        for name, times in ((f"told, {kind} collectives", noticed), (f"next step of all, {kind} collectives", stepped)):
            figures.append(_bounded(f"gone host to {name}, p50", statistics.median(times)))
            figures.append(_bounded(f"gone host to {name}, worst", max(times)))
    return figures


def _bounded(name: str, seconds: float) -> Figure:
    return Figure(name, "s", seconds, GONE_HOST_MAX_S, aim=1.0, higher_is_better=False)


if __name__ == "__main__":
    main("gone_host", measure)
