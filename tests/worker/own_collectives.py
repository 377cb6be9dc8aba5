"""A training script that sums over sockets of its own inside `with step:`, as one does with torch or MPI.

    python -m tests.worker.own_collectives ENDPOINT NAME TOTAL VICTIM_RANK

Each new world connects its ranks anew, in a star around rank 0. A rank that loses a peer raises `RuntimeError` and
closes its sockets, so that the other ranks raise one, too. The worker of rank VICTIM_RANK kills itself in the first
world while the hub waits for it or, if it is the hub, while all others do. A worker that comes to the end prints its
step and its state.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys

import numpy as np

import forged
from forged.worker.blocking import Training
from tests.worker.trainers import JOB, config

WORKERS = 3
KILLED_AT = 5
SAMPLES = 240
PRIME = 2_147_483_647
NUMBER = struct.Struct("!q")
WAITING = b"w"
"""The hub sends it before it waits for the numbers of the others."""
PATIENCE_S = 30.0


def advance(chain: int, step: int, total: int) -> int:
    return (chain * 31 + step + total) % PRIME


def chain_after(steps: int) -> int:
    chain = 0
    for step in range(steps):
        chain = advance(chain, step, sum(range(SAMPLES)))
    return chain


class OwnCollectives:
    """The connections of one rank in one world."""

    def __init__(self, worker: Training) -> None:
        self.generation = worker.generation
        self.links: list[socket.socket] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = worker.broadcast(server.getsockname()[1])
            if worker.rank == 0:
                self.links = [server.accept()[0] for _ in range(worker.world_size - 1)]
            else:
                self.links = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)]
            self.is_hub = worker.rank == 0
            worker.barrier()

    def all_reduce(self, own: int) -> int:
        try:
            if self.is_hub:
                for link in self.links:
                    link.sendall(WAITING)
                total = own + sum(self._receive(link) for link in self.links)
                for link in self.links:
                    link.sendall(NUMBER.pack(total))
                return total
            self.links[0].sendall(NUMBER.pack(own))
            self.links[0].recv(len(WAITING))
            return self._receive(self.links[0])
        except OSError as error:
            self.close()
            raise RuntimeError(f"own collective: {error}") from error

    def wait_for_peers(self) -> None:
        """Return when the hub waits for this rank; on the hub, when all others wait for it."""
        for link in self.links:
            link.recv(NUMBER.size if self.is_hub else len(WAITING), socket.MSG_WAITALL)

    def _receive(self, link: socket.socket) -> int:
        data = link.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(data) < NUMBER.size:
            raise ConnectionError("connection closed by peer")
        number: int = NUMBER.unpack(data)[0]
        return number

    def close(self) -> None:
        for link in self.links:
            link.close()


def main(endpoint: str, name: str, total: int, victim_rank: int) -> None:
    state = {"chain": np.zeros(1, np.int64)}
    own: OwnCollectives | None = None
    settings = config(max_workers=WORKERS, stability_window_ms=60_000)
    with forged.join(endpoint, job=JOB, worker_id=name, state=state, config=settings) as worker:
        for step in worker.steps(total):
            with step:
                if own is None or own.generation != worker.generation:
                    if own is not None:
                        own.close()
                    own = OwnCollectives(worker)
                if step == KILLED_AT and worker.rank == victim_rank and worker.world_size == WORKERS:
                    own.wait_for_peers()
                    os.kill(os.getpid(), signal.SIGKILL)
                summed = own.all_reduce(sum(worker.share(SAMPLES)))
                state["chain"][0] = advance(int(state["chain"][0]), step, summed)
        print(worker.step, int(state["chain"][0]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
