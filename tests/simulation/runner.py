"""Run one seed of the simulation and report its outcome.

Every outcome carries its seed. A loop that never yields would stop virtual time and every check; such a seed is aborted
by a CPU time limit.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from tests.simulation.catalog import mutants as catalog_mutants
from tests.simulation.catalog import simulation as catalog
from tests.simulation.daemon import mutants as daemon_mutants
from tests.simulation.daemon import simulation as daemon
from tests.simulation.data import mutants as data_mutants
from tests.simulation.elastic import group_mutants
from tests.simulation.elastic import mutants as elastic_mutants
from tests.simulation.elastic import simulation as elastic
from tests.simulation.memory import mutants as memory_mutants
from tests.simulation.memory import simulation as memory
from tests.simulation.oracle import InvariantViolated
from tests.simulation.registry import mutants as registry_mutants
from tests.simulation.registry import simulation as registry

CPU_S_MAX = 60.0
"""The CPU time limit of one seed; most take less than a second."""
ELASTIC_MUTANTS = {**elastic_mutants.MUTANTS, **data_mutants.MUTANTS}
MUTANTS = {
    **daemon_mutants.MUTANTS,
    **ELASTIC_MUTANTS,
    **group_mutants.MUTANTS,
    **catalog_mutants.MUTANTS,
    **registry_mutants.MUTANTS,
    **memory_mutants.MUTANTS,
}


class NeverYields(SystemExit):
    """The CPU time limit was exceeded. A `SystemExit`, so that no task handles it as its own failure."""


class Kind(StrEnum):
    """What is simulated."""

    SERVICE = "service"
    """Clients, plugins and the journal."""
    ELASTIC = "elastic"
    """Elastic training jobs with data."""
    GROUPS = "groups"
    """Elastic training jobs whose workers form replica groups."""
    CATALOG = "catalog"
    """The checkpoint catalogue and the files of checkpoints."""
    REGISTRY = "registry"
    """The model registry: promoters, trainers and canaries."""
    MEMORY = "memory"
    """GPU memory: workers with devices, and workers with blocks on the devices of others."""


SIMULATE: dict[Kind, Callable[[int, Callable[[Any], None]], Any]] = {
    Kind.SERVICE: daemon.simulate,
    Kind.ELASTIC: elastic.simulate,
    Kind.GROUPS: partial(elastic.simulate, in_groups=True),
    Kind.CATALOG: catalog.simulate,
    Kind.REGISTRY: registry.simulate,
    Kind.MEMORY: memory.simulate,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one seed."""

    seed: int
    kind: Kind
    error: str = ""
    violation: str = ""
    """The violated invariant in one line; empty for any other error."""
    trace: Sequence[str] = ()
    facts: int = 0
    starts: int = 0
    met: Mapping[str, int] = field(default_factory=dict)
    """How often each counted event happened."""


def kinds_for(mutant: str | None) -> tuple[Kind, ...]:
    """The kinds in which the mutant has an effect; all kinds without a mutant."""
    if mutant is None:
        return tuple(Kind)
    if mutant in group_mutants.MUTANTS:
        return (Kind.GROUPS,)
    if mutant in catalog_mutants.MUTANTS:
        return (Kind.CATALOG,)
    if mutant in registry_mutants.MUTANTS:
        return (Kind.REGISTRY,)
    if mutant in memory_mutants.MUTANTS:
        return (Kind.MEMORY,)
    return (Kind.ELASTIC if mutant in ELASTIC_MUTANTS else Kind.SERVICE,)


def simulate_seed(seed: int, mutant: str | None = None, kind: Kind = Kind.SERVICE) -> Outcome:
    """Simulate one seed, with a mutant if one is named."""
    simulations: list[Any] = []
    try:
        with MUTANTS[mutant]() if mutant else contextlib.nullcontext(), _cpu_limit():
            simulated = SIMULATE[kind](seed, simulations.append)
    except (Exception, NeverYields):  # noqa: BLE001 - any error is a finding
        error = traceback.format_exc(limit=-12)
        return Outcome(seed, kind, error, _violation(error), simulations[0].trace if simulations else ())
    facts, met = len(simulated.oracle.facts), getattr(simulated, "met", {})
    return Outcome(seed, kind, "", "", simulated.trace, facts, simulated.starts, met)


def simulate_pair(mutant: str | None, world: tuple[int, Kind]) -> Outcome:
    """`simulate_seed` with picklable arguments for a process pool."""
    seed, kind = world
    return simulate_seed(seed, mutant, kind)


@contextlib.contextmanager
def _cpu_limit() -> Iterator[None]:
    """Raise `NeverYields` in the block after `CPU_S_MAX`, and again after each further interval."""

    def end(*_: object) -> None:
        raise NeverYields(f"it used {CPU_S_MAX:g} s of CPU time: a loop never yields")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, CPU_S_MAX, CPU_S_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def command(outcome: Outcome, mutant: str | None) -> str:
    """The command that replays the seed."""
    bug = f" --mutant {mutant}" if mutant else ""
    seeds = f"{outcome.seed}:{outcome.seed + 1}"
    return f"python -m tests.simulation --seeds {seeds} --kind {outcome.kind}{bug} --trace"


def _violation(error: str) -> str:
    lines = (line.partition(f"{InvariantViolated.__name__}: ")[2] for line in error.splitlines())
    return next(filter(None, lines), "")
