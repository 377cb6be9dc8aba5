"""Network partitions: the daemon and each worker on a simulated host of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from benchmarks.host_cluster import DAEMON, ELEMENTS, HostCluster
from benchmarks.host_worker import JOB
from benchmarks.hosts import why_not
from forged.elastic.messages import RescaleStarted, WorkerFailed, WorkerLost, WorkerReturned
from forged.kernel.messages import Fact, Record

WORKERS = ("w1", "w2", "w3")
LARGE = 1 << 17
"""The elements of an array larger than the TCP window."""

F = TypeVar("F", bound=Fact)
Make = Callable[..., HostCluster]


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Make]:
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(HostCluster(str(tmp_path), *WORKERS, **options))


def by_rank(cluster: HostCluster, *ranks: int) -> list[str]:
    """The names of the workers with these ranks."""
    names = {worker.rank: name for name, worker in cluster.workers.items()}
    return [names[rank] for rank in ranks]


def facts(cluster: HostCluster, kind: type[F]) -> list[F]:
    """The facts so far."""
    records = cluster.client.past_facts(kind, jobs=[JOB])
    return [record.fact for record in records if isinstance(record, Record) and isinstance(record.fact, kind)]


def failed(cluster: HostCluster) -> list[str]:
    return [fact.worker_id for fact in facts(cluster, WorkerFailed)]


def wait_for(cluster: HostCluster, kind: type[WorkerLost | WorkerReturned], *names: str) -> None:
    """Wait for a fact about each of these workers."""
    missing = set(names)
    for record in cluster.client.facts(kind, since=0, jobs=[JOB]):
        assert isinstance(record, Record)
        assert isinstance(record.fact, kind)
        missing.discard(record.fact.worker_id)
        if not missing:
            return


def more_steps(cluster: HostCluster, *names: str, steps: int = 20) -> None:
    """Wait until these workers have made more steps."""
    goals = {name: cluster.workers[name].steps[-1]["step"] + steps for name in names}
    cluster.until(lambda: all(cluster.workers[name].steps[-1]["step"] >= goal for name, goal in goals.items()))


@pytest.mark.parametrize("elements", [ELEMENTS, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("rank", [0, 1], ids=["hub", "member"])
def test_only_the_worker_of_a_lost_host_fails_and_may_join_again(clusters: Make, rank: int, elements: int) -> None:
    cluster = clusters(elements=elements)
    generation = cluster.until_together(*WORKERS)
    (victim,) = by_rank(cluster, rank)
    survivors = [name for name in WORKERS if name != victim]

    cluster.hosts.unplug(victim)
    generation = cluster.until_together(*survivors, after=generation)
    assert failed(cluster) == [victim]

    cluster.hosts.plug_in(victim)
    cluster.until(lambda: bool(cluster.workers[victim].ended))
    assert cluster.workers[victim].ended == "worker_evicted"

    cluster.start(victim)
    cluster.until_together(*WORKERS, after=generation)
    assert failed(cluster) == [victim]


def test_higher_rank_of_two_unconnected_members_is_evicted(clusters: Make) -> None:
    cluster = clusters()
    generation = cluster.until_together(*WORKERS)
    hub, member, parted = by_rank(cluster, 0, 1, 2)

    cluster.hosts.part(hub, parted)
    cluster.until_together(hub, member, after=generation)
    assert failed(cluster) == [parted]
    cluster.until(lambda: bool(cluster.workers[parted].ended))
    assert cluster.workers[parted].ended == "worker_evicted"


def test_an_unreachable_state_source_is_evicted(clusters: Make) -> None:
    """It alone missed the commit of the step, so all other workers need its state."""
    cluster = clusters()
    generation = cluster.until_together(*WORKERS)
    hub, member, silenced = by_rank(cluster, 0, 1, 2)

    cluster.hosts.silence(hub, silenced)
    cluster.until_together(hub, member, after=generation)
    assert failed(cluster) == [silenced]
    cluster.until(lambda: bool(cluster.workers[silenced].ended))
    assert cluster.workers[silenced].ended == "worker_evicted"


def test_members_without_a_connection_to_each_other_keep_training(clusters: Make) -> None:
    cluster = clusters()
    generation = cluster.until_together(*WORKERS)
    attempts = len(facts(cluster, RescaleStarted))
    members = by_rank(cluster, 1, 2)

    cluster.hosts.part(*members)
    more_steps(cluster, *WORKERS)
    cluster.hosts.bring_together(*members)
    more_steps(cluster, *WORKERS)
    assert cluster.until_together(*WORKERS) == generation
    assert len(facts(cluster, RescaleStarted)) == attempts


def test_training_continues_without_the_daemon_and_the_world_is_kept(clusters: Make) -> None:
    cluster = clusters()
    generation = cluster.until_together(*WORKERS)
    attempts = len(facts(cluster, RescaleStarted))
    ranks = by_rank(cluster, 0, 1, 2)

    cluster.hosts.unplug(DAEMON)
    wait_for(cluster, WorkerLost, *WORKERS)
    more_steps(cluster, *WORKERS)
    cluster.hosts.plug_in(DAEMON)
    wait_for(cluster, WorkerReturned, *WORKERS)
    more_steps(cluster, *WORKERS)

    assert cluster.until_together(*WORKERS) == generation
    assert by_rank(cluster, 0, 1, 2) == ranks
    assert len(facts(cluster, RescaleStarted)) == attempts
    assert failed(cluster) == []
