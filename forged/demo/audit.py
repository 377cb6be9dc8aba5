"""Whether a training was right, by what its workers wrote about themselves.

Law: nothing is taken for granted. Each step that counts has to be shown to have used each sample of its batch once, in
one world whose members all agree who they were; what is missing is a problem, as is what is there twice. Each problem
is a sentence.
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
"""What each worker wrote, in its order."""
Worlds = Mapping[int, Sequence[str]]
"""The members of each generation, by rank."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many steps count, how many of them are proven to have used their batch once, and how many were repeated."""

    steps: int
    covered: int
    repeated: int
    problems: list[str]


def coverage(logs: Logs, worlds: Worlds, batch: int) -> Coverage:
    """Look at each step that counts."""
    uses: dict[int, dict[int, list[tuple[str, Used]]]] = defaultdict(lambda: defaultdict(list))
    commits: dict[int, list[tuple[str, Committed]]] = defaultdict(list)
    for worker, entry in _entries(logs):
        if isinstance(entry, Used):
            uses[entry.step][entry.generation].append((worker, entry))
        elif isinstance(entry, Committed):
            commits[entry.step].append((worker, entry))
    steps = max(commits, default=-1) + 1
    found = [list(_step(step, uses[step], commits[step], worlds, batch)) for step in range(steps)]
    return Coverage(
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
        yield f"step {step} counts, and nobody has used anything in it"
        return
    if not commits:
        yield f"step {step} is passed over: nobody says that it counts"
    last = max(uses)
    for worker, commit in commits:
        if commit.generation != last:
            yield f"step {step} counts for {worker} as of generation {commit.generation}, and was repeated in {last}"
    users = [worker for worker, _ in uses[last]]
    if sorted(users) != sorted(worlds.get(last, ())):
        yield f"step {step} was done by {_names(users)}, and generation {last} is {_names(worlds.get(last, ()))}"
    yield from _tiling(step, uses[last], batch)


def _tiling(step: int, uses: Sequence[tuple[str, Used]], batch: int) -> Iterator[str]:
    """What the ranges leave out of the batch, use twice, or take from beyond it."""
    reached, before = 0, ""
    for worker, use in sorted(uses, key=lambda one: (one[1].first, one[1].end)):
        if use.first > reached:
            yield f"step {step} has left out samples {reached} to {use.first - 1}"
        elif use.first < min(reached, use.end):
            yield f"step {step} has used sample {use.first} twice: by {before} and by {worker}"
        if use.end > reached:
            reached, before = use.end, worker
    if reached < batch:
        yield f"step {step} has left out samples {reached} to {batch - 1}"
    elif reached > batch:
        yield f"step {step} has used samples beyond its batch of {batch}"


def order(logs: Logs) -> list[str]:
    """What is wrong with the order in which steps count for each worker: each one once, and none left out."""
    problems = []
    for worker, log in logs.items():
        steps = [entry.step for entry in log if isinstance(entry, Committed)]
        problems += [
            f"for {worker} step {after} counts behind step {before}"
            for before, after in pairwise(steps)
            if after != before + 1
        ]
    return problems


def worlds_of(logs: Logs) -> tuple[dict[int, Sequence[str]], list[str]]:
    """The world of each generation as its members were told, and where they were not told the same."""
    worlds: dict[int, Sequence[str]] = {}
    problems = []
    for worker, entry in _entries(logs):
        if not isinstance(entry, Entered):
            continue
        told = worlds.setdefault(entry.generation, entry.workers)
        if told != entry.workers:
            problems.append(f"{worker} was told that generation {entry.generation} is {_names(entry.workers)}, and")
            problems[-1] += f" others that it is {_names(told)}"
        if entry.workers[entry.rank : entry.rank + 1] != [worker]:
            problems.append(f"{worker} took rank {entry.rank} of generation {entry.generation}, which is not its own")
    return worlds, problems


def disagreements(told: Worlds, decided: Worlds) -> list[str]:
    """Where workers were told another world than the daemon has on record."""
    return [
        f"the daemon's generation {generation} is {_names(decided.get(generation, ()))}, the workers' {_names(names)}"
        for generation, names in told.items()
        if list(names) != list(decided.get(generation, ()))
    ]


def endings(logs: Logs, workers: Iterable[str], steps: int) -> list[str]:
    """Whether these workers have ended behind the last step with the same parameters."""
    ends = {worker: entry for worker, entry in _entries(logs) if isinstance(entry, Finished)}
    missing = [worker for worker in workers if worker not in ends]
    problems = [f"{worker} has not come to its end" for worker in missing]
    there = {worker: ends[worker] for worker in workers if worker in ends}
    problems += [
        f"{worker} ended behind {end.steps} steps of {steps}" for worker, end in there.items() if end.steps != steps
    ]
    if len({end.parameters for end in there.values()}) > 1:
        problems.append(f"{_names(there)} have learnt different parameters")
    return problems


def misuses(audits: Sequence[AuditView], used: int) -> list[str]:
    """What is wrong with the epochs by what the daemon has on record, if so many samples were used in all.

    The last of them need not be over.
    """
    problems = []
    for number, one in enumerate(audits):
        if one.epoch != number:
            problems.append(f"epoch {number} was asked for, and epoch {one.epoch} is told of")
        if one.repeated_total:
            problems.append(f"epoch {one.epoch} has used {one.repeated_total} samples more than once")
        if number < len(audits) - 1 and not one.complete:
            problems.append(f"epoch {one.epoch} has not used {one.missing_total} samples")
    total = sum(one.used for one in audits)
    if total != used:
        problems.append(f"{total:,} samples are known to be used, and the steps have used {used:,}")
    return problems


def first_commit(log: Log, *, above: int) -> float | None:
    """When the first step counted that was done in a generation above that one."""
    return next((entry.at for entry in log if isinstance(entry, Committed) and entry.generation > above), None)


def commits_between(log: Log, begin: float, end: float) -> int:
    """How many steps have come to count in that time."""
    return sum(isinstance(entry, Committed) and begin < entry.at <= end for entry in log)


def _entries(logs: Logs) -> Iterator[tuple[str, Entry]]:
    return ((worker, entry) for worker, log in logs.items() for entry in log)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "nobody"
