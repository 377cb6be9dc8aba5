"""How fast a model and its optimizer go to a joining torch worker, against bare sockets.

One process trains a model with AdamW of 1 GiB together; another joins, takes the state into a fresh model and optimizer
and begins its first step. The time from its registration to that step, less that of a worker that takes almost nothing,
is the time of the state. The reference sends as many bytes over one connection, into memory of which as much is new.
All three take turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.harness import Figure, main, turns
from benchmarks.torch_training import PYTHON, ForgedTorch, run_torch

MIB, MIB_QUICK, MIB_TINY = 1024, 64, 1
ROUNDS, ROUNDS_QUICK = 5, 1
AIM = 0.7
WORKER = "benchmarks.torch_state_worker"


class Daemon(ForgedTorch):
    """A daemon whose workers this benchmark starts itself."""

    size = 0

    def wait_until_whole(self) -> None:
        """There is nothing to wait for."""


@contextmanager
def _giving(*arguments: str) -> Iterator[str]:
    """A process that gives; its first line."""
    command = [str(PYTHON), "-m", WORKER, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    here = Path(__file__).parent.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=here) as giver:
        assert giver.stdout is not None
        try:
            line = giver.stdout.readline()
            if not line:
                raise RuntimeError(f"{WORKER} {' '.join(arguments)} has ended with {giver.wait()}")
            # A giver that trains goes on to write its steps.
            drain = subprocess.Popen(["cat"], stdin=giver.stdout, stdout=subprocess.DEVNULL)
            yield line.strip()
        finally:
            giver.kill()
        drain.wait()


def _join_s(endpoint: str, jobs: Iterator[int], mib: int) -> float:
    """The time of a join with a state of this size."""
    job = f"state-{next(jobs)}"
    with _giving("give", endpoint, job, str(mib)):
        return float(run_torch("-m", WORKER, "take", endpoint, job, str(mib)).split()[-1])


def _bare_s(port: str, mib: int) -> float:
    return float(run_torch("-m", WORKER, "receive", port, str(mib)))


def measure(quick: bool, mib: int, rounds: int) -> list[Figure]:
    """Measure the transfer."""
    size = MIB_QUICK if quick else mib
    with Daemon() as daemon, _giving("send", str(size)) as port:
        jobs = itertools.count()
        subjects = {
            "ours": partial(_join_s, daemon.endpoint, jobs, size),
            "bare": partial(_bare_s, port, size),
            "tiny": partial(_join_s, daemon.endpoint, jobs, MIB_TINY),
        }
        found = turns(ROUNDS_QUICK if quick else rounds, subjects)
    for name, times in found.items():
        sys.stderr.write(f"  {name}: {' '.join(f'{one:.3f}' for one in times)} s\n")
    p50 = {name: statistics.median(times) for name, times in found.items()}
    ours_s = max(p50["ours"] - p50["tiny"], 1e-9)
    what = f"{size} MiB of parameters and optimizer to a joiner"
    return [
        Figure(f"{what}, against a bare socket", "GiB/s", size / 1024 / ours_s, size / 1024 / p50["bare"], AIM),
        Figure("join with 1 MiB", "s", p50["tiny"]),
    ]


def run() -> None:
    """Run the benchmark with a state of the size that the command line says."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--mib", type=int, default=MIB)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options, rest = parser.parse_known_args()
    main("torch_state", lambda quick: measure(quick, options.mib, options.rounds), rest)


if __name__ == "__main__":
    run()
