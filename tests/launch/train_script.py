"""A training script for launches.

train_script.py STEPS [STOP_FILE]: train STEPS steps, or until one of the workers finds the file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

import forged


def main(steps: int, stop_file: Path) -> None:
    state = {"w": np.zeros(4)}
    told = 0
    with forged.join(state=state) as worker:
        for step in worker.steps(steps):
            with step:
                is_over = worker.all_reduce(np.array([float(stop_file.exists())]), "max")[0]
                state["w"] += worker.all_reduce(np.ones(4), "mean")
            if worker.generation > told:
                told = worker.generation
                print(f"{os.getpid()} trains in a world of {worker.world_size}")
            if is_over and not step.aborted:
                break
        print(f"made {worker.step} steps")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "/nowhere"))
