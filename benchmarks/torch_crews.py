"""Ours and its peers, by turns: torchrun and torchft, each tuned to its fastest.

They live in an environment of their own inside ours (`make bench-torch` makes it), because torch is large and nothing
of forged needs it. Where that is missing, or a peer does not run, the reason stands in the place of its figures.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from benchmarks.crew import HOST, Crew, Ours, Trainee
from benchmarks.harness import Figure

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
"""Whole seconds, none of which can be less. With fewer attempts, agents that live count each other as dead."""
LIGHTHOUSE = ("--min_replicas=1", "--join_timeout_ms=100", "--heartbeat_timeout_ms=500", "--quorum_tick_ms=10")


class Torchrun(Crew):
    """Four agents of one process each, which go on with three; agent and process are killed together."""

    def open(self) -> None:
        self._port = int(self._serve(str(PEERS / "python"), str(HERE / "torchrun_store.py")))

    def trainee(self, name: str) -> Trainee:
        settings = ",".join(f"{key}={value}" for key, value in RENDEZVOUS.items())
        command = [
            *(str(PEERS / "torchrun"), "--nnodes=3:4", "--nproc-per-node=1", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint={HOST}:{self._port}", "--rdzv-id=benchmark", f"--rdzv-conf={settings}"),
            *("--monitor-interval=0.1", "--max-restarts=1000000", f"--local-addr={HOST}"),
            str(HERE / "torchrun_trainee.py"),
        ]
        # Without the first it does not recover; the second is where its logs go.
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": str(self.directory)}
        return Trainee(command, self.directory / f"{name}.log", environment)


class Torchft(Crew):
    """Four replica groups of one process each, and a lighthouse."""

    def open(self) -> None:
        self._port = _free_port()
        command = [str(PEERS / "torchft_lighthouse"), f"--bind={HOST}:{self._port}", *LIGHTHOUSE]
        self._services.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
        )

    def trainee(self, name: str) -> Trainee:
        command = [str(PEERS / "python"), str(HERE / "torchft_trainee.py"), f"http://{HOST}:{self._port}", name]
        return Trainee(command, self.directory / f"{name}.log")


def _free_port() -> int:
    """One that was free a moment ago: the lighthouse does not say which one it has taken."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


CREWS: dict[str, type[Crew]] = {"ours": Ours, "torchft": Torchft, "torchrun": Torchrun}
PROGRAMS = {"torchft": "torchft_lighthouse", "torchrun": "torchrun"}


@dataclass(slots=True)
class Contest(Generic[T]):
    """What the crews did in their turns, and why some did nothing."""

    results: dict[str, list[T]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def hold(self, names: Sequence[str], rounds: int, turn: Callable[[str, Crew], list[T]], *, quick: bool) -> None:
        """Have each take its turns, with a new cluster every time; every other round goes backwards."""
        self.missing = {name: why for name in names if (why := _why_not(name, quick=quick))}
        order = list(names)
        for _ in range(rounds):
            for name in order:
                if name not in self.missing:
                    self._take_turn(name, turn)
            order.reverse()

    def _take_turn(self, name: str, turn: Callable[[str, Crew], list[T]]) -> None:
        try:
            with CREWS[name]() as crew:
                self.results.setdefault(name, []).extend(turn(name, crew))
        except RuntimeError as error:
            if name == "ours":
                raise
            self.missing[name] = f"it did not run: {error}"
            self.results.pop(name, None)

    def against(self, peer: str, what: str, unit: str, summary: Callable[[list[T]], float], aim: float) -> Figure:
        """A duration of ours beside a peer's."""
        theirs = self.results.get(peer, [])
        name = f"{what}, against {peer}" + (f" ({len(theirs)} times)" if theirs else f" ({self.missing[peer]})")
        reference = summary(theirs) if theirs else None
        return Figure(name, unit, summary(self.results["ours"]), reference, aim, higher_is_better=False)


def _why_not(name: str, *, quick: bool) -> str:
    """Why a crew cannot be measured; empty if it can."""
    if name == "ours":
        return ""
    if quick:
        return "left out to be quick"
    return "" if (PEERS / PROGRAMS[name]).exists() else "not installed, see `make bench-torch`"
