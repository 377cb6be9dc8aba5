"""torch's default process group, made anew in this process for each world.

Invariants:
- A group belongs to one world. It is made in the script's thread when the world is entered, and dropped before the next
  one is made.
- When the world is over, each rank that waits in a collective of one of its groups gets an error at once: the worker's
  thread shuts the connections down while the script's thread waits in C.
- All ranks make groups in the same order, so they tell each other of new ones before the same step.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from forged.elastic.model import ClusterTopology, WorldOver
from forged.errors import RequestRefused
from forged.torch.collective_errors import Repeats, is_collective_error
from forged.torch.sockets import GroupSockets, addresses_of, interface_of
from forged.worker.blocking import Training
from forged.worker.errors import StepAborted

GLOO, NCCL = "gloo", "nccl"
BACKENDS = (GLOO, NCCL)
MAKE_TIMEOUT = dt.timedelta(seconds=60)
"""How long the processes of a world may take to make a group."""
CONNECT_TIMEOUT = dt.timedelta(seconds=5)
"""How long one try to connect to the store may take. Between two tries, the world may be over."""
TIMEOUT = dt.timedelta(minutes=30)
"""How long a collective may take. A rank that hangs is found sooner: by `worker.meeting` and `stall_timeout_ms`."""
_INTERFACE_VARIABLES = {GLOO: "GLOO_SOCKET_IFNAME", NCCL: "NCCL_SOCKET_IFNAME"}


class ProcessGroups:
    """The default process groups of one worker, one after the other; a context manager."""

    def __init__(self, worker: Training, backend: str = GLOO, timeout: dt.timedelta = TIMEOUT) -> None:
        if backend not in BACKENDS:
            raise RequestRefused(
                "backend_unknown",
                f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}",
                "choose one of them",
            )
        self.backend = backend
        self.made = 0
        """How many groups have been made."""
        self.repeats = Repeats()
        self._worker = worker
        self._timeout = timeout
        self._store: dist.TCPStore | None = None
        self._told = 0
        """How many groups the ranks of this world have told each other of."""
        self._lock = threading.Lock()
        self._sockets: GroupSockets | None = None
        """Those of the present world; None while there is none."""
        self._over = -1
        """The newest generation whose world is over."""

    def open(self) -> None:
        """Have a group in every world that the worker enters from now on."""
        if dist.is_initialized():
            raise RequestRefused(
                "group_exists",
                "torch.distributed has a default process group already, which the script has made",
                "leave `init_process_group` out of the script: the group of each world is made for it",
            )
        if self.backend == NCCL:
            # The end of a world is found by the library, which aborts the group; torch would end the process.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._worker.world_entered.subscribe(self._make)
        self._worker.world_over.subscribe(self._break_off)

    def close(self) -> None:
        """Drop the present group, and make no more."""
        self._worker.world_entered.unsubscribe(self._make)
        self._worker.world_over.unsubscribe(self._break_off)
        self._drop()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # In the script's thread.

    @property
    def group(self) -> Any:
        """The process group of the present world."""
        if self._store is None or not dist.is_initialized():
            raise RequestRefused(
                "group_missing", "there is no process group outside a world", "use it in a step, or in `run.on_world`"
            )
        return dist.group.WORLD

    @property
    def is_over(self) -> bool:
        """Whether the world of the present group is over."""
        return self._over >= self._worker.generation

    def count_abort(self, step: int, error: Exception) -> None:
        """This worker voids the step; raises if it has done so too often in unchanged membership."""
        topology = self._worker.current_topology
        if topology is not None and not self.is_over:
            self.repeats.count(step, frozenset(worker.id for worker in topology.workers), error)

    @contextlib.contextmanager
    def entering(self, failure: str) -> Iterator[None]:
        """An error of a collective while a world is entered sends the worker to the next one."""
        try:
            yield
        except Exception as error:
            if isinstance(error, StepAborted) or not is_collective_error(error):
                raise
            self.count_abort(self._worker.step, error)
            raise StepAborted(f"{failure}: {error}") from error

    def tell_of_groups(self) -> None:
        """Tell the other ranks where this rank's groups listen, if there are new groups. All ranks call it together."""
        made = dist.distributed_c10d._world.group_count
        if made == self._told or self._store is None or self._sockets is None:
            return
        self._told = made
        size, rank = dist.get_world_size(), dist.get_rank()
        try:
            self._store.set(_key(made, rank), json.dumps(self._sockets.listeners()))
            told = self._store.multi_get([_key(made, other) for other in range(size)])
        except dist.DistError as error:
            raise StepAborted(f"the store of the process groups failed: {error}") from error
        self._sockets.learn((host, port) for one in told for host, port in json.loads(one))

    def _make(self, topology: ClusterTopology) -> None:
        """Make the group of this world; all its ranks do so together."""
        with self.entering("the process group was not made"):
            self._make_group(topology)

    def _make_group(self, topology: ClusterTopology) -> None:
        self._drop()
        worker, rank = self._worker, topology.rank_of(self._worker.worker_id)
        self._choose_interface(topology.workers[rank].hostname)
        host = topology.workers[0].hostname
        if rank == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=MAKE_TIMEOUT)
        port = int(worker.broadcast(self._store.port if self._store is not None else 0))
        self._begin(GroupSockets(addresses_of(host, port), topology.world_size), topology.generation)
        if self._store is None:
            self._store = self._connected(host, port)
        dist.init_process_group(
            self.backend, store=self._store, rank=rank, world_size=topology.world_size, timeout=MAKE_TIMEOUT
        )
        if self.is_over:
            # The group has connections that are closed.
            raise _over_too_early()
        dist.distributed_c10d._set_pg_timeout(self._timeout)
        self.made += 1

    def _connected(self, host: str, port: int) -> dist.TCPStore:
        """Connect to the store of rank 0, unless the world is over before: the library's news ends no try."""
        deadline = time.monotonic() + MAKE_TIMEOUT.total_seconds()
        while True:
            try:
                store = dist.TCPStore(host, port, is_master=False, timeout=CONNECT_TIMEOUT)
            except dist.DistError:
                if self.is_over or time.monotonic() > deadline:
                    raise
            else:
                if self.is_over:
                    # Perhaps it was connected after the connections were shut down.
                    raise _over_too_early()
                store.set_timeout(MAKE_TIMEOUT)
                return store

    def _choose_interface(self, hostname: str) -> None:
        """Have torch listen at the address at which the other workers reach this one, unless the script has chosen."""
        variable = _INTERFACE_VARIABLES[self.backend]
        if variable not in os.environ and (name := interface_of(hostname)):
            os.environ[variable] = name

    def _begin(self, sockets: GroupSockets, generation: int) -> None:
        with self._lock:
            if generation <= self._over:
                raise _over_too_early()
            self._sockets = sockets

    def _drop(self) -> None:
        with self._lock:
            self._sockets = None
        self._told = 0
        if dist.is_initialized():
            dist.destroy_process_group()
        # A group that was not made is counted, too, and the names of groups are their numbers. The ranks find each
        # other by the name, and the last group may have been made at some of them.
        dist.distributed_c10d._world.group_count = 0
        self._store = None

    # In the worker's thread.

    def _break_off(self, over: WorldOver) -> None:
        """Let each rank that waits in a collective of the world's groups come out of it, here and elsewhere."""
        with self._lock:
            self._over = max(self._over, over.generation)
            if over.is_orderly or self._sockets is None:
                return
            self._sockets.shut_down()
            if dist.distributed_c10d._world.group_count != self._told:
                # The script's thread perhaps makes one at present.
                self._sockets.release_maker()
        if self.backend == NCCL:
            # NCCL's abort waits for the device, and this thread answers the daemon meanwhile.
            threading.Thread(target=_abort_groups, name="forged-torch-abort", daemon=True).start()


def init_process_group(worker: Training, backend: str = GLOO, timeout: dt.timedelta = TIMEOUT) -> ProcessGroups:
    """Make torch's default process group anew in each world that the worker enters; call it before the first step.

    `with ft.init_process_group(worker): ...` drops the last group at the end.
    """
    groups = ProcessGroups(worker, backend, timeout)
    groups.open()
    return groups


def _over_too_early() -> StepAborted:
    return StepAborted("the world was over before its process group was made")


def _abort_groups() -> None:
    for group in list(dist.distributed_c10d._world.pg_names):
        group.abort()


def _key(round_: int, rank: int) -> str:
    return f"forged/listeners/{round_}/{rank}"
