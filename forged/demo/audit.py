"""The audit of a training run by its workers' records.

Every committed step must be shown to have used each sample of its batch exactly once, in one world on whose members all
records agree. A missing or duplicate record is a problem; each problem is a sentence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from forged.data.messages import AuditView
from forged.demo.records import Committed, Entered, Entry, Finished, Used

Log = Sequence[Entry]
Logs = Mapping[str, Log]
"""The records of each worker, in order."""
Worlds = Mapping[int, Sequence[str]]
"""The members of each generation, by rank."""


@dataclass(frozen=True, slots=True)
class StepCoverage:
    """The number of committed steps, of those proven to have used their batch once, and of repeated ones."""

    steps: int
    covered: int
    repeated: int
    problems: list[str]


def coverage(logs: Logs, worlds: Worlds, batch: int) -> StepCoverage:
    """Check each committed step."""
    uses: dict[int, dict[int, list[tuple[str, Used]]]] = defaultdict(lambda: defaultdict(list))
    commits: dict[int, list[tuple[str, Committed]]] = defaultdict(list)
    for worker, entry in _entries(logs):
        if isinstance(entry, Used):
            uses[entry.step][entry.generation].append((worker, entry))
        elif isinstance(entry, Committed):
            commits[entry.step].append((worker, entry))
    steps = max(commits, default=-1) + 1
    found = [list(_step(step, uses[step], commits[step], worlds, batch)) for step in range(steps)]
    return StepCoverage(
        steps,
        sum(not problems for problems in found),
        sum(len(uses[step]) > 1 for step in range(steps)),
        [problem for problems in found for problem in problems],
    )


def _step(
    step: int,
    uses: Mapping[int, Sequence[tuple[str, Used]]],
    commits: Sequence[tuple[str, Committed]],
    worlds: Worlds,
    batch: int,
) -> Iterator[str]:
    if not uses:
        yield f"step {step} is committed, but no worker has used samples in it"
        return
    if not commits:
        yield f"step {step} is missing: no worker has committed it"
    last = max(uses)
    for worker, commit in commits:
        if commit.generation != last:
            yield f"{worker} committed step {step} of generation {commit.generation}, but it was repeated in {last}"
    users = [worker for worker, _ in uses[last]]
    if sorted(users) != sorted(worlds.get(last, ())):
        yield f"step {step} was made by {_names(users)}, but generation {last} is {_names(worlds.get(last, ()))}"
    yield from _tiling(step, uses[last], batch)


def _tiling(step: int, uses: Sequence[tuple[str, Used]], batch: int) -> Iterator[str]:
    """Samples of the batch that are left out or used twice, and samples beyond it."""
    reached, before = 0, ""
    for worker, use in sorted(uses, key=lambda one: (one[1].first, one[1].end)):
        if use.first > reached:
            yield f"step {step} left out samples {reached} to {use.first - 1}"
        elif use.first < min(reached, use.end):
            yield f"step {step} used sample {use.first} twice: by {before} and by {worker}"
        if use.end > reached:
            reached, before = use.end, worker
    if reached < batch:
        yield f"step {step} left out samples {reached} to {batch - 1}"
    elif reached > batch:
        yield f"step {step} used samples beyond its batch of {batch}"


def order_problems(logs: Logs) -> list[str]:
    """Violations of the order of commits: each worker commits each step once, and leaves none out."""
    problems = []
    for worker, log in logs.items():
        steps = [entry.step for entry in log if isinstance(entry, Committed)]
        problems += [
            f"{worker} committed step {after} after step {before}"
            for before, after in pairwise(steps)
            if after != before + 1
        ]
    return problems


def worlds_of(logs: Logs) -> tuple[dict[int, Sequence[str]], list[str]]:
    """The world of each generation according to its members, and their disagreements."""
    worlds: dict[int, Sequence[str]] = {}
    problems = []
    for worker, entry in _entries(logs):
        if not isinstance(entry, Entered):
            continue
        told = worlds.setdefault(entry.generation, entry.workers)
        if told != entry.workers:
            problems.append(f"generation {entry.generation} is {_names(entry.workers)} for {worker},")
            problems[-1] += f" and {_names(told)} for other workers"
        if entry.workers[entry.rank : entry.rank + 1] != [worker]:
            problems.append(f"{worker} took rank {entry.rank} of generation {entry.generation}, which is not its rank")
    return worlds, problems


def world_mismatches(told: Worlds, decided: Worlds) -> list[str]:
    """Generations whose world differs between the workers and the daemon."""
    return [
        f"generation {generation} is {_names(decided.get(generation, ()))} for the daemon, {_names(names)} for workers"
        for generation, names in told.items()
        if list(names) != list(decided.get(generation, ()))
    ]


def end_problems(logs: Logs, workers: Iterable[str], steps: int) -> list[str]:
    """Violations of: these workers finished after the last step with the same parameters."""
    ends = {worker: entry for worker, entry in _entries(logs) if isinstance(entry, Finished)}
    missing = [worker for worker in workers if worker not in ends]
    problems = [f"{worker} has not finished" for worker in missing]
    there = {worker: ends[worker] for worker in workers if worker in ends}
    problems += [
        f"{worker} finished after {end.steps} of {steps} steps" for worker, end in there.items() if end.steps != steps
    ]
    if len({end.parameters for end in there.values()}) > 1:
        problems.append(f"{_names(there)} have different parameters")
    return problems


def audit_problems(audits: Sequence[AuditView], used: int) -> list[str]:
    """The problems in the daemon's audits of all epochs, if `used` samples were used in all.

    The last epoch may be incomplete.
    """
    problems = []
    for number, one in enumerate(audits):
        if one.epoch != number:
            problems.append(f"the audit of epoch {number} describes epoch {one.epoch}")
        if one.repeated_total:
            problems.append(f"epoch {one.epoch} used {one.repeated_total} samples more than once")
        if number < len(audits) - 1 and not one.complete:
            problems.append(f"epoch {one.epoch} did not use {one.missing_total} samples")
    total = sum(one.used for one in audits)
    if total != used:
        problems.append(f"the audits contain {total:,} used samples, the steps {used:,}")
    return problems


def first_commit(log: Log, *, above: int) -> float | None:
    """The time of the first commit in a generation above `above`."""
    return next((entry.at for entry in log if isinstance(entry, Committed) and entry.generation > above), None)


def commits_between(log: Log, begin: float, end: float) -> int:
    """The number of commits in `(begin, end]`."""
    return sum(isinstance(entry, Committed) and begin < entry.at <= end for entry in log)


def _entries(logs: Logs) -> Iterator[tuple[str, Entry]]:
    return ((worker, entry) for worker, log in logs.items() for entry in log)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "no worker"
