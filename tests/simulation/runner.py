"""Living through one world, and saying what became of it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.simulation import data_mutants, elastic, elastic_mutants, mutants, world
from tests.simulation.oracle import Broken

OF_TRAINING = {**elastic_mutants.MUTANTS, **data_mutants.MUTANTS}
MUTANTS = {**mutants.MUTANTS, **OF_TRAINING}


class Kind(StrEnum):
    """What a world is about."""

    SERVICE = "service"
    """Clients, plugins and the record."""
    ELASTIC = "elastic"
    """Jobs that train."""


SIMULATE: dict[Kind, Callable[[int, Callable[[Any], None]], Any]] = {
    Kind.SERVICE: world.simulate,
    Kind.ELASTIC: elastic.simulate,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed."""

    seed: int
    kind: Kind
    error: str = ""
    broken: str = ""
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


def live_through(seed: int, mutant: str | None = None, kind: Kind = Kind.SERVICE) -> Outcome:
    """Simulate one seed, with a deliberate bug if one is named."""
    worlds: list[Any] = []
    try:
        with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
            lived = SIMULATE[kind](seed, worlds.append)
    except Exception:  # noqa: BLE001 - whatever it is, it is what this program is looking for
        error = traceback.format_exc(limit=-12)
        return Outcome(seed, kind, error, _promise(error), worlds[0].trace if worlds else ())
    return Outcome(seed, kind, "", "", lived.trace, len(lived.oracle.facts), lived.starts, getattr(lived, "met", {}))


def live(mutant: str | None, world: tuple[int, Kind]) -> Outcome:
    """The same, with the arguments as they are handed to other processes."""
    seed, kind = world
    return live_through(seed, mutant, kind)


def command(outcome: Outcome, mutant: str | None) -> str:
    """How to see it again."""
    bug = f" --mutant {mutant}" if mutant else ""
    seeds = f"{outcome.seed}:{outcome.seed + 1}"
    return f"python -m tests.simulation --seeds {seeds} --world {outcome.kind}{bug} --trace"


def _promise(error: str) -> str:
    lines = (line.partition(f"{Broken.__name__}: ")[2] for line in error.splitlines())
    return next(filter(None, lines), "")
