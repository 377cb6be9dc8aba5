"""The benchmark's side of a measured process.

Invariants:
- Processes are measured in turn; one that is not measured costs only its memory.
- A missing or failing reference is named in its row; a failure of forged ends the benchmark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.ckpt_workload import Workload

PEERS = Path(sys.prefix) / "peers" / "bin" / "python"
OURS, TORCH = "benchmarks.ckpt_forged", "benchmarks.ckpt_torch"
WITH_TORCH = (TORCH, "benchmarks.torch_")
"""The modules of processes that run in the peers' environment."""
END_S = 60.0


class MeasuredProcess:
    """A process that runs a module with `benchmarks.ckpt_server`."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        is_torch = module.startswith(WITH_TORCH)
        python = PEERS if is_torch else Path(sys.executable)
        self._what = " ".join([module, *arguments])
        self._process = subprocess.Popen(
            [str(python), "-m", module, *arguments],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_torch else None,
            text=True,
            # Torch's threads spin while they wait; with one per core they slow down everything that runs beside them.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            self._read_answer()
        except BaseException:
            self.close()
            raise

    def run(self, action: str, path: Path) -> dict[str, float]:
        """Run an action and wait for its figures."""
        self.send(action, path)
        return self.receive()

    def send(self, action: str, path: Path) -> None:
        """Start an action."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": action, "path": str(path)}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, float]:
        """The figures of the started action."""
        figures: dict[str, float] = self._read_answer()
        return figures

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._what} has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self._what}: {answer['error']}")
        return dict(answer)


def forged_process(load: Workload) -> MeasuredProcess:
    """A process with forged."""
    return MeasuredProcess(OURS, load.arguments)


def torch_process(load: Workload) -> MeasuredProcess:
    """A process with torch."""
    return MeasuredProcess(TORCH, load.arguments)


def torch_unavailable(*, quick: bool) -> str:
    """Why torch cannot be measured; empty if it can."""
    if quick:
        return "left out to be quick"
    return "" if PEERS.exists() else "not installed, see `make bench-torch`"
