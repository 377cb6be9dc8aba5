"""What the tests of all simulations check: mutants break their promises, and traces are the same everywhere."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

import pytest

from tests.simulation.runner import Kind, simulate_seed

ROOT = Path(__file__).parents[2]


def require_broken(mutant: str, promise: Enum, seeds: Iterable[int], kind: Kind = Kind.ELASTIC) -> None:
    """Fail unless the mutant breaks this promise in one of the seeds; in another seed it may break another one."""
    named, others = promise.name.lower(), set[str]()
    for seed in seeds:
        outcome = simulate_seed(seed, mutant, kind)
        broken = outcome.violation.partition(":")[0]
        if broken == named:
            return
        assert broken or not outcome.error, f"{mutant} was noticed by accident:\n{outcome.error}"
        others.add(broken)
    pytest.fail(f"{mutant} has broken {sorted(filter(None, others))}, and not {named}")


def trace_hashes(seeds: Iterable[int], kind: Kind) -> list[str]:
    """A hash of the trace of each seed."""
    return [hashlib.sha256("\n".join(simulate_seed(seed, None, kind).trace).encode()).hexdigest() for seed in seeds]


def trace_hashes_elsewhere(seeds: Iterable[int], kind: Kind, *, hash_seed: int, ballast: int) -> list[str]:
    """The same from another process."""
    code = (
        "from tests.simulation.checks import trace_hashes; from tests.simulation.runner import Kind; "
        f"print(*trace_hashes({list(seeds)}, Kind({kind.value!r})), sep='\\n')"
    )
    return printed_in_another_process(code, hash_seed=hash_seed, ballast=ballast)


def printed_in_another_process(code: str, *, hash_seed: int, ballast: int) -> list[str]:
    """The lines that code prints in a process with this seed of hashes, and so many objects before on its heap."""
    before = f"ballast = [object() for _ in range({ballast})]; del ballast[::3]; "
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", before + code]
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()
