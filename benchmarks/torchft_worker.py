"""A replica group of torchft, of one process, for benchmarks: the loop of `benchmarks.forged_worker`, over gloo.

Runs in the peers' environment, without anything of forged. Like that one it writes `ready PID` when it is connected to
its lighthouse, waits for a line, and then writes a line for each committed step, `step generation world seconds`. A
generation is the number of a quorum.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]

ELEMENTS = 1024
HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=2)
"""Of collectives. Where half of the survivors hang in one, the others wait in vain for a quorum until it has passed."""
PATIENCE = timedelta(seconds=60)
"""Torchft's own default for the rest: what takes longer ends the process."""


def main() -> None:
    """Train for ever: `LIGHTHOUSE NAME`."""
    lighthouse, name = sys.argv[1:]
    torch.set_num_threads(1)
    weights = torch.zeros(ELEMENTS, dtype=torch.float64)

    def load(state: dict[str, Any]) -> None:
        weights.copy_(state["weights"])

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"weights": weights},
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=PATIENCE,
        connect_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname=HOST,
    )
    sys.stdout.write(f"ready {os.getpid()}\n")
    sys.stdout.flush()
    sys.stdin.readline()
    while True:
        manager.start_quorum()
        gradient = torch.ones(ELEMENTS, dtype=torch.float64)
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            weights -= 0.01 * gradient
            # Nothing public tells which quorum it is.
            generation, world = manager._quorum_id, manager.num_participants()
            sys.stdout.write(f"{manager.current_step()} {generation} {world} {time.monotonic()}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
