"""The audit finds all planted errors, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.messages import AuditView
from forged.demo import audit
from forged.demo.audit import Logs
from forged.demo.records import Committed, Entered, Entry, Finished, Ready, Used

BATCH = 12
Rewrite = Callable[[dict[str, list[Entry]]], None]


def share(rank: int, size: int) -> tuple[int, int]:
    return BATCH * rank // size, BATCH * (rank + 1) // size


def trained(worlds: Sequence[tuple[Sequence[str], int]], broken_off: Sequence[int] = ()) -> dict[str, list[Entry]]:
    """The records of workers that train a number of steps in each of these worlds.

    In the generations of `broken_off` they begin another step, which is done again in the next one.
    """
    logs: dict[str, list[Entry]] = {name: [Ready(0.0)] for names, _ in worlds for name in names}
    step = 0
    for generation, (names, count) in enumerate(worlds, 1):
        for rank, name in enumerate(names):
            log = logs[name]
            log.append(Entered(float(step), generation, step, rank, list(names), 0.1))
            for number in range(step, step + count):
                log.append(Used(float(number), generation, number, *share(rank, len(names))))
                log.append(Committed(number + 0.5, generation, number, 1.0))
            if generation in broken_off:
                log.append(Used(float(step + count), generation, step + count, *share(rank, len(names))))
        step += count
    for name in worlds[-1][0]:
        logs[name].append(Finished(float(step), step, "same"))
    return logs


def usual() -> dict[str, list[Entry]]:
    """Three workers; one dies in step 4, then another one joins."""
    return trained([(["a", "b", "c"], 4), (["a", "c"], 3), (["a", "c", "d"], 2)], broken_off=[1])


def problems_of(logs: Logs) -> list[str]:
    worlds, found = audit.worlds_of(logs)
    return found + audit.coverage(logs, worlds, BATCH).problems + audit.order_problems(logs)


def used(log: list[Entry], step: int, generation: int) -> int:
    """Where it says that it uses something in this step."""
    return next(
        at for at, one in enumerate(log) if isinstance(one, Used) and (one.step, one.generation) == (step, generation)
    )


def test_a_training_that_was_right_has_no_problems() -> None:
    logs = usual()
    worlds, _ = audit.worlds_of(logs)
    found = audit.coverage(logs, worlds, BATCH)
    assert (found.steps, found.covered, found.repeated, found.problems) == (9, 9, 1, [])
    assert problems_of(logs) == []


def test_where_nothing_counts_there_is_nothing_to_prove() -> None:
    assert audit.coverage({}, {}, BATCH) == audit.StepCoverage(0, 0, 0, [])
    assert audit.coverage({"a": [Ready(0.0)]}, {}, BATCH).steps == 0


def test_more_workers_than_samples_leave_some_without_any() -> None:
    names = [f"w{number:02}" for number in range(BATCH + 5)]
    assert problems_of(trained([(names, 3)])) == []


def left_out(logs: dict[str, list[Entry]]) -> None:
    del logs["c"][used(logs["c"], 5, 2)]


def skipped_a_sample(logs: dict[str, list[Entry]]) -> None:
    logs["c"][used(logs["c"], 5, 2)] = Used(5.0, 2, 5, 7, 12)


def skipped_the_first(logs: dict[str, list[Entry]]) -> None:
    logs["a"][used(logs["a"], 5, 2)] = Used(5.0, 2, 5, 1, 6)


def skipped_the_last(logs: dict[str, list[Entry]]) -> None:
    logs["c"][used(logs["c"], 5, 2)] = Used(5.0, 2, 5, 6, 11)


def used_one_twice(logs: dict[str, list[Entry]]) -> None:
    logs["c"][used(logs["c"], 5, 2)] = Used(5.0, 2, 5, 5, 12)


def used_the_same_part(logs: dict[str, list[Entry]]) -> None:
    logs["c"][used(logs["c"], 5, 2)] = Used(5.0, 2, 5, 0, 6)


def went_beyond(logs: dict[str, list[Entry]]) -> None:
    logs["c"][used(logs["c"], 5, 2)] = Used(5.0, 2, 5, 6, 13)


def used_it_again(logs: dict[str, list[Entry]]) -> None:
    logs["a"].append(Used(9.0, 3, 5, 0, 4))


def took_the_old_world(logs: dict[str, list[Entry]]) -> None:
    logs["c"][used(logs["c"], 5, 2)] = Used(5.0, 1, 5, 6, 12)


def committed_what_was_broken_off(logs: dict[str, list[Entry]]) -> None:
    logs["a"].insert(used(logs["a"], 4, 1) + 1, Committed(4.5, 1, 4, 1.0))


def committed_twice(logs: dict[str, list[Entry]]) -> None:
    at = logs["a"].index(Committed(5.5, 2, 5, 1.0))
    logs["a"].insert(at, logs["a"][at])


def passed_over(logs: dict[str, list[Entry]]) -> None:
    for name in logs:
        logs[name] = [one for one in logs[name] if not (isinstance(one, Committed) and one.step == 5)]


def came_from_nowhere(logs: dict[str, list[Entry]]) -> None:
    for name in logs:
        logs[name] = [one for one in logs[name] if not (isinstance(one, Used) and one.step == 5)]


def unknown_worker_took_part(logs: dict[str, list[Entry]]) -> None:
    logs["x"] = [Used(5.0, 2, 5, 12, 12)]


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (left_out, "step 5 was made by a, but generation 2 is a, c"),
        (left_out, "step 5 left out samples 6 to 11"),
        (skipped_a_sample, "step 5 left out samples 6 to 6"),
        (skipped_the_first, "step 5 left out samples 0 to 0"),
        (skipped_the_last, "step 5 left out samples 11 to 11"),
        (used_one_twice, "step 5 used sample 5 twice: by a and by c"),
        (used_the_same_part, "step 5 used sample 0 twice: by a and by c"),
        (went_beyond, "step 5 used samples beyond its batch of 12"),
        (used_it_again, "c committed step 5 of generation 2, but it was repeated in 3"),
        (took_the_old_world, "step 5 left out samples 6 to 11"),
        (committed_what_was_broken_off, "a committed step 4 of generation 1, but it was repeated in 2"),
        (committed_twice, "a committed step 5 after step 5"),
        (passed_over, "step 5 is missing: no worker has committed it"),
        (came_from_nowhere, "step 5 is committed, but no worker has used samples in it"),
        (unknown_worker_took_part, "step 5 was made by a, c, x, but generation 2 is a, c"),
    ],
)
def test_planted_errors_are_found(plant: Rewrite, words: str) -> None:
    logs = usual()
    plant(logs)
    assert words in problems_of(logs)


def test_a_step_with_a_problem_is_not_covered() -> None:
    logs = usual()
    skipped_a_sample(logs)
    worlds, _ = audit.worlds_of(logs)
    assert audit.coverage(logs, worlds, BATCH).covered == 8


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=5), st.data())
def test_one_entry_that_is_missing_is_never_overlooked(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    logs = trained([([f"w{rank}of{at}" for rank in range(size)], steps) for at, (size, steps) in enumerate(sizes)])
    assert problems_of(logs) == []
    name = data.draw(st.sampled_from(sorted(logs)))
    uses = [entry for entry in logs[name] if isinstance(entry, Used)]
    logs[name].remove(data.draw(st.sampled_from(uses)))
    assert problems_of(logs)


# Worlds.


def test_two_worlds_for_one_generation_are_found() -> None:
    logs = usual()
    logs["c"] = [
        Entered(one.at, 2, one.step, 0, ["c", "a"], 0.1) if isinstance(one, Entered) and one.generation == 2 else one
        for one in logs["c"]
    ]
    assert audit.worlds_of(logs)[1] == ["generation 2 is c, a for c, and a, c for other workers"]


@pytest.mark.parametrize("rank", [0, 2, 7])
def test_a_rank_that_is_another_ones_is_found(rank: int) -> None:
    logs = {"b": [Entered(0.0, 1, 0, rank, ["a", "b", "c"], 0.1)]}
    assert audit.worlds_of(logs)[1] == [f"b took rank {rank} of generation 1, which is not its rank"]


def test_workers_and_daemon_have_to_agree() -> None:
    told = {1: ["a", "b"], 2: ["a"]}
    assert audit.world_mismatches(told, {1: ["a", "b"], 2: ["a"], 3: ["a", "c"]}) == []
    assert audit.world_mismatches(told, {1: ["b", "a"]}) == [
        "generation 1 is b, a for the daemon, a, b for workers",
        "generation 2 is no worker for the daemon, a for workers",
    ]


# The end.


def test_all_have_to_end_alike() -> None:
    logs = usual()
    assert audit.end_problems(logs, ["a", "c", "d"], 9) == []
    logs["c"][-1] = Finished(9.0, 9, "other")
    assert audit.end_problems(logs, ["a", "c", "d"], 9) == ["a, c, d have different parameters"]
    logs["c"][-1] = Finished(9.0, 8, "same")
    assert audit.end_problems(logs, ["a", "c", "d"], 9) == ["c finished after 8 of 9 steps"]
    logs["c"].pop()
    assert audit.end_problems(logs, ["a", "c", "d"], 9) == ["c has not finished"]


# The daemon's own audit.


def view(epoch: int, used: int = 100, repeated: int = 0, missing: int = 0) -> AuditView:
    return AuditView(
        job="run",
        epoch=epoch,
        samples=100,
        used=used,
        dropped=0,
        complete=not (repeated or missing),
        missing_total=missing,
        missing=[],
        repeated_total=repeated,
        repeated=[],
        forgotten=False,
        epochs=[],
    )


def test_epochs_that_are_over_have_to_be_complete_and_the_last_one_need_not() -> None:
    assert audit.audit_problems([view(0), view(1), view(2, 40, missing=60)], 240) == []
    assert audit.audit_problems([view(0, 40, missing=60)], 40) == []


@pytest.mark.parametrize(
    ("views", "used", "words"),
    [
        ([view(0, 90, missing=10), view(1)], 190, "epoch 0 did not use 10 samples"),
        ([view(0), view(1, 40, repeated=3, missing=60)], 140, "epoch 1 used 3 samples more than once"),
        ([view(0), view(2)], 200, "the audit of epoch 1 describes epoch 2"),
        ([view(0), view(1, 40, missing=60)], 150, "the audits contain 140 used samples, the steps 150"),
        ([], 1, "the audits contain 0 used samples, the steps 1"),
    ],
)
def test_unproven_audit_is_a_problem(views: list[AuditView], used: int, words: str) -> None:
    assert audit.audit_problems(views, used) == [words]


# Figures.


def test_recovery_ends_with_a_step_of_a_later_world() -> None:
    log = usual()["a"]
    assert audit.first_commit(log, above=1) == 4.5
    assert audit.first_commit(log, above=3) is None
    assert audit.first_commit([], above=0) is None


def test_steps_of_an_outage_are_those_that_came_to_count_in_it() -> None:
    log = usual()["a"]
    assert audit.commits_between(log, 1.5, 4.5) == 3
    assert audit.commits_between(log, 9.0, 10.0) == 0
