"""Comparison of forged with torchrun and torchft, each tuned to be as fast as it can.

The peers are installed in a virtual environment of their own inside that of forged (`make bench-torch` creates it),
because torch is large and forged does not need it. If it is missing, or a peer does not run, the reason is reported in
place of its figures.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from benchmarks.harness import Figure
from benchmarks.training_cluster import HOST, ForgedCluster, TrainingCluster, TrainingProcess

T = TypeVar("T")

PEERS = Path(sys.prefix) / "peers" / "bin"
HERE = Path(__file__).parent

RENDEZVOUS = {
    "is_host": "0",
    "join_timeout": "60",
    "last_call_timeout": "1",
    "close_timeout": "1",
    "heartbeat_timeout": "1",
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "3",
}
"""The smallest whole seconds that work. With fewer keep-alive attempts, live agents declare each other dead."""
LIGHTHOUSE = ("--min_replicas=1", "--join_timeout_ms=100", "--heartbeat_timeout_ms=500", "--quorum_tick_ms=10")


class Torchrun(TrainingCluster):
    """Four agents of one process each; three suffice. Agent and process are killed together."""

    nodes = "3:4"
    joins_when_told = False
    worker: Sequence[str] = (str(HERE / "torchrun_worker.py"),)
    """What torchrun starts: a script, or `-m` and a module, and its arguments."""

    def open(self) -> None:
        self._port = int(self._serve(str(PEERS / "python"), str(HERE / "torchrun_store.py")))

    def worker_process(self, name: str) -> TrainingProcess:
        settings = ",".join(f"{key}={value}" for key, value in RENDEZVOUS.items())
        command = [
            *(str(PEERS / "torchrun"), f"--nnodes={self.nodes}", "--nproc-per-node=1", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint={HOST}:{self._port}", "--rdzv-id=benchmark", f"--rdzv-conf={settings}"),
            *("--monitor-interval=0.1", "--max-restarts=1000000", f"--local-addr={HOST}"),
            *self.worker,
        ]
        # Without the first variable torchrun does not recover; the second is where its logs go.
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": str(self.directory)}
        return TrainingProcess(command, self.directory / f"{name}.log", environment)


class Torchft(TrainingCluster):
    """Four replica groups of one process each, and a lighthouse."""

    worker: Sequence[str] = (str(HERE / "torchft_worker.py"),)

    def open(self) -> None:
        self._port = _free_port()
        command = [str(PEERS / "torchft_lighthouse"), f"--bind={HOST}:{self._port}", *LIGHTHOUSE]
        self._services.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
        )

    def worker_process(self, name: str) -> TrainingProcess:
        command = [str(PEERS / "python"), *self.worker, f"http://{HOST}:{self._port}", name]
        return TrainingProcess(command, self.directory / f"{name}.log")


def _free_port() -> int:
    """A port that was free a moment ago: the lighthouse does not report which one it uses."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


CLUSTERS: dict[str, type[TrainingCluster]] = {"ours": ForgedCluster, "torchft": Torchft, "torchrun": Torchrun}
PROGRAMS = {"torchft": "torchft_lighthouse", "torchrun": "torchrun"}


@dataclass(slots=True)
class Comparison(Generic[T]):
    """The results of the clusters, and why some have none."""

    clusters: Mapping[str, type[TrainingCluster]] = field(default_factory=lambda: CLUSTERS)
    results: dict[str, list[T]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def run_rounds(
        self, names: Sequence[str], rounds: int, turn: Callable[[str, TrainingCluster], list[T]], *, quick: bool
    ) -> None:
        """Measure the systems in turn, with a new cluster each time; every second round in reverse order."""
        self.missing = {name: why for name in names if (why := _why_not(name, quick=quick))}
        order = list(names)
        for _ in range(rounds):
            for name in order:
                if name not in self.missing:
                    self._take_turn(name, turn)
            order.reverse()

    def _take_turn(self, name: str, turn: Callable[[str, TrainingCluster], list[T]]) -> None:
        try:
            with self.clusters[name]() as cluster:
                self.results.setdefault(name, []).extend(turn(name, cluster))
        except RuntimeError as error:
            if name == "ours":
                raise
            self.missing[name] = f"did not run: {error}"
            self.results.pop(name, None)

    def against(self, peer: str, what: str, unit: str, summary: Callable[[list[T]], float], aim: float) -> Figure:
        """A duration of forged beside that of a peer."""
        theirs = self.results.get(peer, [])
        name = f"{what}, against {peer}" + (f" ({len(theirs)} times)" if theirs else f" ({self.missing[peer]})")
        reference = summary(theirs) if theirs else None
        return Figure(name, unit, summary(self.results["ours"]), reference, aim, higher_is_better=False)


def _why_not(name: str, *, quick: bool) -> str:
    """Why a system cannot be measured; empty if it can."""
    if name == "ours":
        return ""
    if quick:
        return "left out by --quick"
    return "" if (PEERS / PROGRAMS[name]).exists() else "not installed, see `make bench-torch`"
