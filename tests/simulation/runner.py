"""Living through one world, and saying what became of it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulation.mutants import MUTANTS
from tests.simulation.oracle import Broken
from tests.simulation.world import World, simulate


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed."""

    seed: int
    error: str = ""
    broken: str = ""
    """The promise that was not kept, in a line; empty when something else went wrong."""
    trace: Sequence[str] = ()
    facts: int = 0
    starts: int = 0


def live_through(seed: int, mutant: str | None = None) -> Outcome:
    """Simulate one seed, with a deliberate bug if one is named."""
    worlds: list[World] = []
    try:
        with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
            world = simulate(seed, worlds.append)
    except Exception:  # noqa: BLE001 - whatever it is, it is what this program is looking for
        error = traceback.format_exc(limit=-12)
        return Outcome(seed, error, _promise(error), worlds[0].trace if worlds else ())
    return Outcome(seed, "", "", world.trace, len(world.oracle.facts), world.starts)


def command(seed: int, mutant: str | None) -> str:
    """How to see it again."""
    bug = f" --mutant {mutant}" if mutant else ""
    return f"python -m tests.simulation --seeds {seed}:{seed + 1}{bug} --trace"


def _promise(error: str) -> str:
    lines = (line.partition(f"{Broken.__name__}: ")[2] for line in error.splitlines())
    return next(filter(None, lines), "")
