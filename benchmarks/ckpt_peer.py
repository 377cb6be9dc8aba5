"""Processes that checkpoint, each in its own way, seen from the side that tells them what to do.

Law: they take turns, and one that does nothing costs nothing but its memory. What a peer lacks, or cannot do, is said
in the place of its figures; ours fails loudly.
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

from benchmarks.ckpt_scene import Load

PEERS = Path(sys.prefix) / "peers" / "bin" / "python"
OURS, TORCH = "benchmarks.ckpt_ours", "benchmarks.ckpt_torch"
END_S = 60.0


class Peer:
    """A process that runs a module with `benchmarks.ckpt_actor`."""

    def __init__(self, module: str, words: Sequence[str]) -> None:
        is_torch = module.startswith(TORCH)
        python = PEERS if is_torch else Path(sys.executable)
        self._what = " ".join([module, *words])
        self._process = subprocess.Popen(
            [str(python), "-m", module, *words],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_torch else None,
            text=True,
            # Torch's threads wait for each other in loops; with as many as there are cores it is slower, unless alone.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            self._heard()
        except BaseException:
            self.close()
            raise

    def do(self, action: str, path: Path) -> dict[str, float]:
        """Have it do something, and wait."""
        self.tell(action, path)
        return self.told()

    def tell(self, action: str, path: Path) -> None:
        """Have it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": action, "path": str(path)}) + "\n")
        self._process.stdin.flush()

    def told(self) -> dict[str, float]:
        """What came of what it was told last."""
        figures: dict[str, float] = self._heard()
        return figures

    def close(self) -> None:
        """Have it end."""
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

    def _heard(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._what} has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self._what}: {answer['error']}")
        return dict(answer)


def ours(load: Load) -> Peer:
    """A process with forged."""
    return Peer(OURS, load.words)


def torch(load: Load) -> Peer:
    """A process with torch."""
    return Peer(TORCH, load.words)


def why_no_torch(*, quick: bool) -> str:
    """Why torch cannot be measured; empty if it can."""
    if quick:
        return "left out to be quick"
    return "" if PEERS.exists() else "not installed, see `make bench-torch`"
