"""`python -m tests.simulation --seeds 0:200`: simulate clusters; exit with 1 at the first violated invariant."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from functools import partial
from itertools import product

from tests.simulation.catalog import simulation as catalog
from tests.simulation.data import simulation as data
from tests.simulation.elastic import tally
from tests.simulation.memory import simulation as memory
from tests.simulation.registry import simulation as registry
from tests.simulation.runner import MUTANTS, Kind, Outcome, command, kinds_for, simulate_pair

TRACE_LINES = 40
PROCESSES = 2
COVERING_SEEDS = 200
"""The first so many seeds meet all of `MUST_HAPPEN`."""
MUST_HAPPEN = (
    *tally.MUST_HAPPEN,
    *data.MUST_HAPPEN,
    *catalog.MUST_HAPPEN,
    *registry.MUST_HAPPEN,
    *memory.MUST_HAPPEN,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds; returns 0 if no invariant was violated, or the mutant was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default=f"0:{COVERING_SEEDS}", metavar="FIRST:END")
    parser.add_argument("--kind", choices=[*Kind], help="simulate only this kind; default: all kinds for each seed")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="introduce this bug and expect it to be caught")
    parser.add_argument("--trace", action="store_true", help="print the trace")
    parser.add_argument("--counts", action="store_true", help="print how often each event happened")
    parser.add_argument(
        "--check-coverage",
        action="store_true",
        help=f"fail if an expected event never happened; {COVERING_SEEDS} seeds meet all of them",
    )
    options = parser.parse_args(arguments)
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    kinds = kinds_for(options.mutant) if options.kind is None else (Kind(options.kind),)
    started = time.monotonic()
    facts = starts = 0
    met: Counter[str] = Counter()
    with contextlib.closing(_outcomes(seeds, kinds, options.mutant)) as outcomes:
        for outcome in outcomes:
            if options.trace:
                print("\n".join(outcome.trace))
            if outcome.error:
                return _report_failure(outcome, options.mutant)
            facts += outcome.facts
            starts += outcome.starts
            met.update(outcome.met)
    if options.mutant:
        print(f"mutant {options.mutant} was not caught by {len(seeds)} seeds", file=sys.stderr)
        return 1
    if options.check_coverage and (unmet := [what for what in MUST_HAPPEN if not met[what]]):
        more = f" (run --seeds 0:{COVERING_SEEDS}, which meet all of them)" if len(seeds) < COVERING_SEEDS else ""
        print(
            f"expected events never happened in {len(seeds)} seeds{more}, so nothing tested their invariants:"
            f" {', '.join(unmet)}",
            file=sys.stderr,
        )
        return 1
    if options.counts:
        print("\n".join(f"{count:8} {what}" for what, count in sorted(met.items())))
    took_s = time.monotonic() - started
    done = f"{starts} daemon starts, {met['worlds']} committed worlds, {met['workers failed']} failed workers"
    print(f"{len(seeds)} seeds passed, 0 failed: {done}, {facts} facts, {took_s:.1f} s")
    return 0


def _outcomes(seeds: range, kinds: Sequence[Kind], mutant: str | None) -> Generator[Outcome, None, None]:
    worlds = list(product(seeds, kinds))
    if len(seeds) == 1:
        yield from (simulate_pair(mutant, world) for world in worlds)
        return
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        yield from pool.imap(partial(simulate_pair, mutant), worlds)


def _report_failure(outcome: Outcome, mutant: str | None) -> int:
    if mutant and outcome.violation:
        print(f"mutant {mutant} was caught by seed {outcome.seed}: {outcome.violation}")
        return 0
    print("\n".join(outcome.trace[-TRACE_LINES:]), file=sys.stderr)
    print(outcome.error, file=sys.stderr)
    print(
        f"seed {outcome.seed} failed ({outcome.kind} simulation); replay it with: {command(outcome, mutant)}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
