"""`python -m tests.simulation --seeds 0:200`: live through many worlds; the first that breaks a promise is an error."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Generator, Sequence
from functools import partial

from tests.simulation.mutants import MUTANTS
from tests.simulation.runner import Outcome, command, live_through

TRACE_LINES = 40
PROCESSES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds; 0 when every promise was kept, or the mutant was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:200", metavar="FIRST:END")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug, and expect to find it")
    parser.add_argument("--trace", action="store_true", help="print all that happened")
    options = parser.parse_args(arguments)
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    started = time.monotonic()
    facts = starts = 0
    with contextlib.closing(_outcomes(seeds, options.mutant)) as outcomes:
        for outcome in outcomes:
            if options.trace:
                print("\n".join(outcome.trace))
            if outcome.error:
                return _broken(outcome, options.mutant)
            facts += outcome.facts
            starts += outcome.starts
    if options.mutant:
        print(f"the mutant {options.mutant} survived {len(seeds)} seeds", file=sys.stderr)
        return 1
    took_s = time.monotonic() - started
    print(f"{len(seeds)} seeds passed, 0 failed: {starts} daemons lived, {facts} facts, {took_s:.1f} s")
    return 0


def _outcomes(seeds: range, mutant: str | None) -> Generator[Outcome, None, None]:
    run = partial(live_through, mutant=mutant)
    if len(seeds) == 1:
        yield run(seeds[0])
        return
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        yield from pool.imap(run, seeds)


def _broken(outcome: Outcome, mutant: str | None) -> int:
    if mutant and outcome.broken:
        print(f"the mutant {mutant} was caught by seed {outcome.seed}: {outcome.broken}")
        return 0
    print("\n".join(outcome.trace[-TRACE_LINES:]), file=sys.stderr)
    print(outcome.error, file=sys.stderr)
    print(f"seed {outcome.seed} failed; see it again with: {command(outcome.seed, mutant)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
