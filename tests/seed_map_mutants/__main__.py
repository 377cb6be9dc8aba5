"""`python -m tests.seed_map_mutants`: list the mutants that their tests do not catch."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

from tests.seed_map import node_ids
from tests.seed_map_mutants.catalog import mutants
from tests.seed_map_mutants.mutation import Mutation, MutationError
from tests.seed_map_mutants.runs import Outcome, TreeCopy, Verdict, tree_copy


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.seed_map_mutants", description=__doc__)
    parser.add_argument("texts", nargs="*", help="only rows whose seed, declaration or test has one of these texts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many tests run at once")
    arguments = parser.parse_args()
    chosen = [
        (row, mutation, node_ids(row.test))
        for row, mutation in mutants()
        if not arguments.texts or any(text in f"{row.seed} {row.declared} {row.test}" for text in arguments.texts)
    ]
    if not chosen:
        parser.error("no row has one of these texts")
    began, not_caught = time.monotonic(), 0
    copies: SimpleQueue[TreeCopy] = SimpleQueue()

    def judge(mutation: Mutation, tests: Sequence[str]) -> Verdict:
        copy = copies.get()
        try:
            return copy.judge(mutation, tests)
        except MutationError as error:
            return Verdict(Outcome.INVALID, str(error))
        finally:
            copies.put(copy)

    with ExitStack() as stack, ThreadPoolExecutor(arguments.jobs) as threads:
        for _ in range(arguments.jobs):
            copies.put(stack.enter_context(tree_copy()))
        rows, mutations, tests = zip(*chosen, strict=True)
        for row, verdict in zip(rows, threads.map(judge, mutations, tests), strict=True):
            if verdict.outcome is not Outcome.CAUGHT:
                not_caught += 1
                print(f"{verdict.outcome}: {row.declared} ({row.test})", flush=True)
                if verdict.outcome is Outcome.INVALID:
                    print(verdict.output[-2000:], flush=True)
    print(f"{len(chosen) - not_caught} of {len(chosen)} mutants caught in {time.monotonic() - began:.0f} s")
    return 1 if not_caught else 0


if __name__ == "__main__":
    sys.exit(main())
