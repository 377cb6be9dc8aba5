"""A worker process for the benchmark of slots: `ENDPOINT DIRECTORY COUNT SHAPE...`.

It does what each line of its input says, and answers with the seconds that its caller was blocked: `stage` copies the
state into a slot, `save` saves it durably without slots.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import forged.checkpoint
from benchmarks.ckpt_workload import workload_from
from forged.checkpoint import DistributedCheckpoint, SaveOptions
from forged.checkpoint.blocking import BlockingCheckpoint
from forged.checkpoint.storage.local import LocalStorage
from forged.elastic.config import ElasticTrainingConfig
from forged.worker.blocking import join

CONFIG = ElasticTrainingConfig(
    stability_window_ms=0, failure_tolerance_percentage=100, max_consecutive_failures=1_000_000
)


def main() -> None:
    endpoint, directory = sys.argv[1], Path(sys.argv[2])
    state = workload_from(sys.argv[3:]).state()
    with join(endpoint, job="benchmark", state={}, config=CONFIG) as worker:
        checkpoint = BlockingCheckpoint(DistributedCheckpoint(worker, LocalStorage(directory / "emergency")))
        for number, step in enumerate(worker.steps()):
            with step:
                line = sys.stdin.readline().strip()
                began = time.perf_counter()
                if line == "stage":
                    # Later than all before, also those of workers that were killed.
                    place = time.time_ns() // 1_000_000
                    options = SaveOptions(f"step-{place}", include_rng_state=False, step=place)
                    if not checkpoint.keep_in_memory(state, options=options):
                        raise SystemExit("the daemon has given no slots")
                elif line == "save":
                    forged.checkpoint.save(directory / f"plain-{number}", state)
                else:
                    return
            print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
