"""Deliberate bugs in replica groups, to show that the simulation finds them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from forged.elastic.coordinator import records
from forged.elastic.coordinator.job_state import JobState
from forged.elastic.membership.member import Member
from forged.elastic.membership.world_membership import WorldMembership
from forged.elastic.messages import RescaleSynchronising
from forged.elastic.rescale import attempt
from forged.elastic.rescale.attempt import StopReport
from tests.simulation.elastic.mutants import Mutant
from tests.simulation.elastic.truth import Promise


@contextmanager
def take_the_state_of_another_group_rank() -> Iterator[None]:
    """Every worker takes the state of group rank 0."""
    with patch.object(RescaleSynchronising, "source_for", lambda self, group_rank: self.source):
        yield


@contextmanager
def admit_half_groups() -> Iterator[None]:
    """A group joins though workers of it are missing."""

    def some(self: WorldMembership) -> Iterator[list[Member]]:
        groups: dict[str, list[Member]] = {}
        for member in self.joiners():
            groups.setdefault(member.group, []).append(member)
        return iter(groups.values())

    with patch.object(WorldMembership, "joining_groups", some):
        yield


@contextmanager
def keep_members_of_broken_groups() -> Iterator[None]:
    """A group that has lost a member stays in the world with the rest."""
    with patch.object(WorldMembership, "_find_broken_groups", lambda self: None):
        yield


@contextmanager
def count_every_process_of_a_group() -> Iterator[None]:
    """Each member of a group that fails is a failure."""
    with patch.object(WorldMembership, "is_broken", lambda self, member: False):
        yield


@contextmanager
def drain_one_process_of_a_group() -> Iterator[None]:
    """The other members of a draining worker's group stay."""
    with patch.object(WorldMembership, "partners", lambda self, member: []):
        yield


@contextmanager
def choose_sources_at_different_steps() -> Iterator[None]:
    """Each group rank takes the state with the most steps that it can get."""

    def furthest(
        members: Sequence[str],
        stops: Mapping[str, StopReport],
        added: Collection[str] = (),
        group_ranks: Mapping[str, int] = attempt.NO_GROUPS,
        group_size: int = 1,
    ) -> tuple[str, ...]:
        holders = [worker for worker in members if stops[worker].holds_state]
        by_rank = [
            [one for one in holders if group_ranks.get(one, 0) == rank]
            or [one for one in members if group_ranks.get(one, 0) == rank]
            for rank in range(group_size)
        ]
        return tuple(max(found, key=lambda worker: stops[worker].position) for found in by_rank)

    with patch.object(attempt, "choose_sources", furthest):
        yield


@contextmanager
def forget_the_group_size_at_restart() -> Iterator[None]:
    """A daemon that has restarted takes every worker for a group of its own."""
    take = records._restore_cluster

    def forgetful(found: JobState, record: records.ClusterRecord) -> None:
        take(found, record)
        found.membership.group_size = 1

    with patch.object(records, "_restore_cluster", forgetful):
        yield


BREAKS: dict[str, Promise] = {
    "take_the_state_of_another_group_rank": Promise.STATE,
    "admit_half_groups": Promise.GROUPS,
    "keep_members_of_broken_groups": Promise.GROUPS,
    "count_every_process_of_a_group": Promise.TOLERANCE,
    "drain_one_process_of_a_group": Promise.GROUPS,
    "choose_sources_at_different_steps": Promise.STATE,
    "forget_the_group_size_at_restart": Promise.GROUPS,
}
"""The promise that each of them breaks."""

MUTANTS: dict[str, Mutant] = {name: globals()[name] for name in BREAKS}
