"""Clusters whose processes train the benchmarks' transformer: with `forged.torch`, torchft and torchrun.

All run in the peers' environment, with the same torch. Without it (`make bench-torch` creates it) nothing is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.torch_clusters import PEERS, Torchft, Torchrun
from benchmarks.training_cluster import ForgedCluster, TrainingCluster

PYTHON = PEERS / "python"


class ForgedTorch(ForgedCluster):
    """Workers of `forged.torch`."""

    worker = (str(PYTHON), "-m", "benchmarks.torch_forged_worker")


class TorchrunDdp(Torchrun):
    """Workers of torchrun with plain DistributedDataParallel."""

    worker: Sequence[str] = ("-m", "benchmarks.torch_ddp_worker")


class TorchftDdp(Torchft):
    """Replica groups of torchft with its DistributedDataParallel."""

    worker = ("-m", "benchmarks.torch_torchft_worker")


CLUSTERS: dict[str, type[TrainingCluster]] = {"ours": ForgedTorch, "torchft": TorchftDdp, "torchrun": TorchrunDdp}


def why_not() -> str:
    """Why nothing can be measured; empty if it can."""
    return "" if PYTHON.exists() else "torch is not installed, see `make bench-torch`"


def run_torch(*arguments: str) -> str:
    """What a Python of the peers' environment writes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    here = Path(__file__).parent.parent
    command = [str(PYTHON), *arguments]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=environment, cwd=here
    ).stdout
