"""A replica group of one process that trains the benchmarks' transformer with torchft, as its examples do.

Runs in the peers' environment, without anything of forged. Arguments: `LIGHTHOUSE NAME`. It writes `ready PID` when it
is connected to its lighthouse, waits for a line, and writes a line for each committed step. A generation is the number
of a quorum.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

from benchmarks.torch_model import loss_of, model_and_optimizer, say_ready, say_step, wait_for_go

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=2)
"""Of collectives. Where half of the survivors hang in one, the others wait in vain for a quorum until it has passed."""
PATIENCE = timedelta(seconds=60)
"""Torchft's own default for the rest: what takes longer ends the process."""


def _reduced(manager: Any, bucket: Any) -> Any:
    manager.allreduce(bucket.buffer()).wait()
    reduced: Any = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


class Ddp(DistributedDataParallel):  # type: ignore[misc]
    """Torchft's, whose hook ends the process with an AssertionError when the quorum of a step has failed."""

    # Without annotations, which torch would compare, and which are texts here.
    _comm_hook = staticmethod(lambda manager, bucket: _reduced(manager, bucket))


def main() -> None:
    """Train without end."""
    lighthouse, name = sys.argv[1:]
    model, inner = model_and_optimizer()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
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
    net, optimizer = Ddp(manager, model), Optimizer(manager, inner)
    say_ready()
    wait_for_go()
    while True:
        optimizer.zero_grad()  # Starts the quorum.
        before = manager.current_step()
        loss_of(net, before, int(name[1:])).backward()
        optimizer.step()
        if manager.current_step() > before:
            # Nothing public tells which quorum it is.
            generation, rank = manager._quorum_id, manager.participating_rank()
            say_step(manager.current_step(), generation, manager.num_participants(), -1 if rank is None else rank)


if __name__ == "__main__":
    main()
