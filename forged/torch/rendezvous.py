"""`torchrun --rdzv-backend=forged`: the agents of torchrun meet as workers of a job.

Each agent is one worker, whose steps are short meetings of all agents. So a death, a join and a drain become a new
world as in any job, without the timeouts of torchrun's own backends.

Invariants:
- A rendezvous is complete when all agents of one world have come to it; all of them get the same answer, in the same
  step.
- Each rendezvous has a store of its own, at the agent of rank 0, so nothing of an earlier one is found in it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import socket
import threading
from dataclasses import dataclass

import numpy as np
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

import forged
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import WorldOver
from forged.errors import ForgedError
from forged.worker.blocking import Training

BACKEND = "forged"
JOIN_TIMEOUT_S = 600
"""c10d's limit for a rendezvous."""
CLOSE_TIMEOUT_S = 30
LAST_CALL_S = 1
"""How long a world that could be larger waits for further agents."""
STORE_TIMEOUT = dt.timedelta(seconds=60)
STEP_INTERVAL_S = 0.1
"""Between two meetings of the agents: as often as torchrun looks at its workers."""


@dataclass(frozen=True)
class Round:
    """A complete rendezvous, as one agent sees it."""

    generation: int
    rank: int
    world_size: int
    host: str
    """Of rank 0."""
    store_port: int
    master_port: int
    server: TCPStore | None
    """The store itself, at rank 0."""


class ForgedRendezvous(RendezvousHandler):
    """The rendezvous of one agent."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._parameters = parameters
        self._changed = threading.Condition()
        self._is_waiting = False
        """Whether the agent waits for a rendezvous."""
        self._is_formed = False
        """Whether the last rendezvous still holds."""
        self._closes = False
        """Whether this agent wants it closed."""
        self._is_closed = False
        self._error: Exception | None = None
        self._round: Round | None = None
        self._over = 0
        """The generation of the last world that is over."""
        self._thread: threading.Thread | None = None

    def get_backend(self) -> str:
        """The name of the backend."""
        return BACKEND

    def get_run_id(self) -> str:
        """The name of the job."""
        run_id: str = self._parameters.run_id
        return run_id

    @property
    def use_agent_store(self) -> bool:
        """The script's rank 0 serves its own store: in older versions of torch, a store of the agents would need equal
        numbers of restarts at all of them."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a world in which all agents have come to a rendezvous."""
        with self._changed:
            self._round, self._is_formed, self._is_waiting = None, False, True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="forged-rendezvous")
                self._thread.start()
            self._changed.notify_all()
            timeout_s = self._parameters.get_as_int("join_timeout", JOIN_TIMEOUT_S)
            is_over = self._changed.wait_for(lambda: self._round or self._is_closed or self._error, timeout_s)
            self._is_waiting = False
            if self._is_closed:
                raise RendezvousClosedError(f"the rendezvous {self.get_run_id()} is closed")
            if self._error is not None:
                raise RendezvousConnectionError(str(self._error)) from self._error
            if not is_over or self._round is None:
                raise RendezvousTimeoutError(f"no rendezvous of {self.get_run_id()} within {timeout_s} s")
            found = self._round
        return RendezvousInfo(_store_of(found), found.rank, found.world_size, _master(found))

    def is_closed(self) -> bool:
        """Whether an agent has closed it."""
        return self._is_closed

    def set_closed(self) -> None:
        """Close it for all agents, which complete the job."""
        with self._changed:
            self._closes = True
            self._changed.notify_all()

    def num_nodes_waiting(self) -> int:
        """1 if the agent is to come to another rendezvous: agents have joined or left, or wait for one."""
        with self._changed:
            return int(not self._is_formed and self._error is None and not self._is_closed)

    def shutdown(self) -> bool:
        """Close it and leave the job."""
        self.set_closed()
        if self._thread is not None:
            self._thread.join(self._parameters.get_as_int("close_timeout", CLOSE_TIMEOUT_S))
        return self._error is None

    # In the thread of the worker.

    def _run(self) -> None:
        try:
            with self._worker() as worker:
                threading.Thread(target=_leave_with_agent, args=(worker,), name="forged-rendezvous-end").start()
                self._meet(worker)
        except forged.JobEnded:
            self._end(None)
        except ForgedError as error:
            self._end(None if error.code == "job_over" else error)
        except Exception as error:  # noqa: BLE001 - the agent raises it
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        with self._changed:
            self._error, self._is_closed, self._is_formed = error, error is None, False
            self._changed.notify_all()

    def _worker(self) -> Training:
        given = self._parameters
        return forged.join(
            *_endpoints(given.endpoint),
            job=self.get_run_id(),
            token=given.get("token"),
            local_world_size=given.get_as_int("local_world_size", 1),
            config=ElasticTrainingConfig(
                min_workers=given.min_nodes,
                max_workers=given.max_nodes,
                stability_window_ms=1000 * (given.get_as_int("last_call_timeout", LAST_CALL_S) or 0),
            ),
        )

    def _meet(self, worker: Training) -> None:
        """Meet the other agents until the rendezvous is closed."""
        worker.world_over.subscribe(self._world_over)
        while (step := worker.begin_step(worker.step if self._is_closed else None)) is not None:
            formed = None
            with step:
                formed = self._agree(worker)
            if worker.finish_step() and formed is not None:
                self._publish(formed)
            with self._changed:
                if not (self._is_waiting or self._is_closed):
                    self._changed.wait(STEP_INTERVAL_S)

    def _world_over(self, over: WorldOver) -> None:
        with self._changed:
            self._over, self._is_formed = over.generation, False

    def _publish(self, formed: Round) -> None:
        """Give the agent the rendezvous that all agents have."""
        with self._changed:
            self._round, self._is_formed = formed, formed.generation > self._over
            self._changed.notify_all()

    def _agree(self, worker: Training) -> Round | None:
        """One meeting: whether an agent does not wait for a rendezvous, whether one does, and whether one closes it."""
        with self._changed:
            waits = self._is_waiting and self._round is None
            mine = np.array([not waits, waits, self._closes], np.int64)
        one_trains, one_waits, one_closes = worker.all_reduce(mine, "max")
        if one_closes or (one_waits and one_trains):
            with self._changed:
                self._is_closed, self._is_formed = bool(one_closes), False
                self._changed.notify_all()
        return None if one_closes or one_trains else self._form(worker)

    def _form(self, worker: Training) -> Round:
        """Make the store of a rendezvous, and tell all agents of it."""
        server, told = None, b""
        if worker.rank == 0:
            host = self._parameters.local_addr or worker.worker_id.hostname
            server = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
            told = json.dumps([host, server.port, _free_port()]).encode()
        host, store_port, master_port = json.loads(worker.broadcast(told))
        return Round(worker.generation, worker.rank, worker.world_size, host, store_port, master_port, server)


def _leave_with_agent(worker: Training) -> None:
    """Leave in good order when the agent's process ends, as it does after SIGTERM without a word to the handler."""
    threading.main_thread().join()
    with contextlib.suppress(ForgedError):
        worker.drain("the agent of torchrun has ended")


def _store_of(found: Round) -> Store:
    """The store of the agents; at rank 0 the server."""
    store = found.server or TCPStore(found.host, found.store_port, wait_for_workers=False, timeout=STORE_TIMEOUT)
    return PrefixStore("agents", store)


def _master(found: Round) -> RendezvousStoreInfo:
    """Where the workers of the agents meet."""
    return RendezvousStoreInfo(found.host, found.master_port)


def _endpoints(endpoint: str) -> list[str]:
    """The endpoint that torchrun names, as `host:port` too; none: those of the environment."""
    if not endpoint:
        return []
    return [endpoint if "://" in endpoint else f"tcp://{endpoint}"]


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
    return port
