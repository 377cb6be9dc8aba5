"""How long training stops when the host of a worker disappears without sending a packet.

The daemon and each of four workers run in network namespaces of their own; the link of one worker goes down. Measured
are the time until the daemon publishes that the worker failed, and the time until every survivor has committed a step
in the next world: once with collectives that fit any TCP window, and once with large ones, whose bytes are always in
flight. Then the host comes back and its worker is restarted. The namespaces need root.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from random import Random

from benchmarks.harness import Figure, main
from benchmarks.host_cluster import ELEMENTS, HostCluster
from benchmarks.host_worker import JOB
from benchmarks.hosts import why_not
from forged.elastic.messages import WorkerFailed
from forged.kernel.messages import Record

WORKERS = ("w1", "w2", "w3", "w4")
ROUNDS = 10
LARGE = 1 << 17
GONE_HOST_MAX_S = 2.5


def _one(cluster: HostCluster, victim: str) -> tuple[float, float]:
    """Seconds from the loss of a host to `WorkerFailed`, and to the next step of the last survivor."""
    generation = cluster.until_together(*WORKERS)
    wall_less_monotonic_s = time.time() - time.monotonic()
    cluster.hosts.unplug(victim)
    gone_at = time.monotonic()
    survivors = [name for name in WORKERS if name != victim]
    after = cluster.until_together(*survivors, after=generation)
    stepped_at = max(cluster.workers[name].steps_in(after)[0]["at"] for name in survivors)
    told = cluster.client.past_facts(WorkerFailed, jobs=[JOB])[-1]
    if not isinstance(told, Record):
        raise TypeError(f"the journal no longer has the failure: {told}")
    cluster.hosts.plug_in(victim)
    cluster.until(lambda: bool(cluster.workers[victim].ended))
    cluster.start(victim)
    cluster.until_together(*WORKERS, after=after)
    return told.at - wall_less_monotonic_s - gone_at, stepped_at - gone_at


def _rounds(elements: int, rounds: int) -> list[tuple[float, float]]:
    random = Random(1)
    with tempfile.TemporaryDirectory() as directory, HostCluster(directory, *WORKERS, elements=elements) as cluster:
        return [_one(cluster, random.choice(WORKERS)) for _ in range(rounds)]


def measure(quick: bool) -> list[Figure]:
    """Measure lost hosts."""
    if reason := why_not():
        raise SystemExit(f"network namespaces are not available: {reason}")
    figures = []
    for kind, elements in (("small", ELEMENTS), ("large", LARGE)):
        noticed, stepped = zip(*_rounds(elements, 1 if quick else ROUNDS), strict=True)
        for name, times in (
            (f"failure published, {kind} collectives", noticed),
            (f"next step of all survivors, {kind} collectives", stepped),
        ):
            figures.append(_bounded(f"host lost to {name}, p50", statistics.median(times)))
            figures.append(_bounded(f"host lost to {name}, worst", max(times)))
    return figures


def _bounded(name: str, seconds: float) -> Figure:
    return Figure(name, "s", seconds, GONE_HOST_MAX_S, aim=1.0, higher_is_better=False)


if __name__ == "__main__":
    main("gone_host", measure)
