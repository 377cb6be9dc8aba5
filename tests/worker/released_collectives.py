"""A training script that sums over datagrams, which do not tell that a peer is gone: `world_over` releases its ranks.

    python -m tests.worker.released_collectives ENDPOINT NAME TOTAL VICTIM_RANK dies|hangs

Each world has sockets of its own, made when it is entered and shut down when it is over. The worker of rank VICTIM_RANK
kills itself in the first world, without a word to the other ranks, or hangs before it meets them. A rank that is
released prints the time. A worker that comes to the end prints its step and its state.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import time

import numpy as np

import forged
from forged.elastic.model import ClusterTopology
from forged.worker.blocking import Training
from tests.worker.own_collectives import SAMPLES, advance, chain_after
from tests.worker.trainers import JOB, config

__all__ = ["chain_after"]

WORKERS = 3
KILLED_AT = 5
MEETING = "sum of the samples"
NUMBER = struct.Struct("!qq")


class Datagrams:
    """The socket of one rank, and the ports of its peers."""

    def __init__(self, worker: Training) -> None:
        self._worker = worker
        self._socket: socket.socket | None = None
        self._ports: list[int] = []
        worker.world_entered.subscribe(self._enter)
        worker.world_over.subscribe(self._shut)

    def _enter(self, topology: ClusterTopology) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        own = np.zeros(topology.world_size, np.int64)
        own[self._worker.rank] = self._socket.getsockname()[1]
        self._ports = [int(port) for port in self._worker.all_reduce(own)]

    def _shut(self, over: forged.WorldOver) -> None:
        """In the worker's thread, while the script's waits in `recv`."""
        print(f"{time.monotonic():.4f} over: {over.reason}", file=sys.stderr)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def wait_for_peers(self) -> None:
        """Return when all peers wait for this rank."""
        assert self._socket is not None
        for _ in self._ports[1:]:
            self._socket.recv(NUMBER.size)

    def all_reduce(self, step: int, own: int) -> int:
        assert self._socket is not None
        for rank, port in enumerate(self._ports):
            if rank != self._worker.rank:
                self._socket.sendto(NUMBER.pack(step, own), ("127.0.0.1", port))
        total = own
        for _ in self._ports[1:]:
            data = self._socket.recv(NUMBER.size)
            if len(data) < NUMBER.size:
                raise RuntimeError("own collective: the socket was shut down")
            sent_in, number = NUMBER.unpack(data)
            assert sent_in == step
            total += number
        return total


def fail(how: str) -> None:
    print(f"{time.monotonic():.4f} {how}", file=sys.stderr, flush=True)
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()


def main(endpoint: str, name: str, total: int, victim_rank: int, how: str) -> None:
    state = {"chain": np.zeros(1, np.int64)}
    settings = config(
        max_workers=WORKERS, stability_window_ms=60_000, worker_heartbeat_timeout_ms=3000, stall_timeout_ms=2000
    )
    with forged.join(endpoint, job=JOB, worker_id=name, state=state, config=settings) as worker:
        own = Datagrams(worker)
        for step in worker.steps(total):
            with step:
                worker.barrier()
                if step == KILLED_AT and worker.rank == victim_rank and worker.world_size == WORKERS:
                    own.wait_for_peers()
                    fail(how)
                try:
                    with worker.meeting(MEETING):
                        summed = own.all_reduce(step, sum(worker.share(SAMPLES)))
                except RuntimeError:
                    print(f"{time.monotonic():.4f} released")
                    raise
                step.commit()
                state["chain"][0] = advance(int(state["chain"][0]), step, summed)
        print(worker.step, int(state["chain"][0]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
