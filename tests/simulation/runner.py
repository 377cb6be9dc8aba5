"""Living through one world, and saying what became of it.

Law: whatever becomes of a world is told with its seed. A loop that never yields keeps virtual time, and everything that
watches it, from having its turn: that is broken off by the processor time that the world takes.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.simulation import data_mutants, elastic, elastic_mutants, mutants, service
from tests.simulation.oracle import InvariantViolated

CPU_S_MAX = 60.0
"""What a world may take; one takes less than a second."""
OF_TRAINING = {**elastic_mutants.MUTANTS, **data_mutants.MUTANTS}
MUTANTS = {**mutants.MUTANTS, **OF_TRAINING}


class NeverYields(SystemExit):
    """A world goes on for ever: a loop somewhere in it never yields. No task may take this for its own affair."""


class Kind(StrEnum):
    """What a world is about."""

    SERVICE = "service"
    """Clients, plugins and the record."""
    ELASTIC = "elastic"
    """Jobs that train."""


SIMULATE: dict[Kind, Callable[[int, Callable[[Any], None]], Any]] = {
    Kind.SERVICE: service.simulate,
    Kind.ELASTIC: elastic.simulate,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed."""

    seed: int
    kind: Kind
    error: str = ""
    violation: str = ""
    """The promise that was not kept, in a line; empty when something else went wrong."""
    trace: Sequence[str] = ()
    facts: int = 0
    starts: int = 0
    met: Mapping[str, int] = field(default_factory=dict)
    """How often what is counted was met."""


def kinds_for(mutant: str | None) -> tuple[Kind, ...]:
    """The worlds in which a bug matters; all of them without one."""
    if mutant is None:
        return tuple(Kind)
    return (Kind.ELASTIC if mutant in OF_TRAINING else Kind.SERVICE,)


def simulate_seed(seed: int, mutant: str | None = None, kind: Kind = Kind.SERVICE) -> Outcome:
    """Simulate one seed, with a deliberate bug if one is named."""
    worlds: list[Any] = []
    try:
        with MUTANTS[mutant]() if mutant else contextlib.nullcontext(), _ended():
            lived = SIMULATE[kind](seed, worlds.append)
    except (Exception, NeverYields):  # noqa: BLE001 - whatever it is, it is what this program is looking for
        error = traceback.format_exc(limit=-12)
        return Outcome(seed, kind, error, _promise(error), worlds[0].trace if worlds else ())
    return Outcome(seed, kind, "", "", lived.trace, len(lived.oracle.facts), lived.starts, getattr(lived, "met", {}))


def simulate_pair(mutant: str | None, world: tuple[int, Kind]) -> Outcome:
    """The same, with the arguments as they are handed to other processes."""
    seed, kind = world
    return simulate_seed(seed, mutant, kind)


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    """Break off what takes far more of the processor than a world does; what comes behind it, too."""

    def end(*_: object) -> None:
        raise NeverYields(f"it has taken {CPU_S_MAX:g} s of the processor: something in it loops and never yields")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, CPU_S_MAX, CPU_S_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def command(outcome: Outcome, mutant: str | None) -> str:
    """How to see it again."""
    bug = f" --mutant {mutant}" if mutant else ""
    seeds = f"{outcome.seed}:{outcome.seed + 1}"
    return f"python -m tests.simulation --seeds {seeds} --kind {outcome.kind}{bug} --trace"


def _promise(error: str) -> str:
    lines = (line.partition(f"{InvariantViolated.__name__}: ")[2] for line in error.splitlines())
    return next(filter(None, lines), "")
