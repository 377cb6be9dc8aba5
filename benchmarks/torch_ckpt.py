"""The state of a model sharded by FSDP2 and its AdamW: saved by four ranks, and loaded by three, against torch DCP.

The same processes save and load in both ways, in turns; an action takes as long as its slowest rank. Saves are durable.
Files that are loaded are in the page cache, and what was loaded is compared with what was saved.
"""

from __future__ import annotations

import itertools
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.ckpt_comparison import Comparison, Scale, measured_rounds, run
from benchmarks.ckpt_reshard import LOADING, SAVING, World
from benchmarks.ckpt_workload import Workload, fill_page_cache, temporary_directory
from benchmarks.harness import Figure

SYSTEMS = ("forged", "dcp")
WITH_MOMENTS = 3
"""AdamW keeps two moments for each parameter."""
SAVE_AIM, LOAD_AIM = 1.4, 1.5
RANK = "benchmarks.torch_ckpt_rank"


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    load = Workload(max(1, scale.large.count // WITH_MOMENTS), scale.large.shape)
    with temporary_directory() as path, ExitStack() as stack:
        saving = stack.enter_context(World(RANK, SAVING, path / "saving", load))
        paths: dict[str, Path] = {}
        numbers = itertools.count()

        def save(system: str) -> float:
            if system in paths:
                shutil.rmtree(paths[system].parent)
            paths[system] = path / f"{system}-{next(numbers)}" / "checkpoint"
            return max(one["s"] for one in saving.run(f"save_{system}", paths[system]))

        saved = measured_rounds(scale.rounds, {one: partial(save, one) for one in SYSTEMS})
        stack.close()
        loading = stack.enter_context(World(RANK, LOADING, path / "loading", load))

        def loaded_s(system: str) -> float:
            fill_page_cache(paths[system])
            loading.run("forget", path)
            seconds = max(one["s"] for one in loading.run(f"load_{system}", paths[system]))
            loading.run("check", path)
            return seconds

        loaded = measured_rounds(scale.rounds, {one: partial(loaded_s, one) for one in SYSTEMS})
    gib = WITH_MOMENTS * load.gib
    return [
        *Comparison(f"FSDP2, save with {SAVING} ranks", saved["forged"], gib).against(
            "torch DCP", saved["dcp"], SAVE_AIM
        ),
        *Comparison(f"FSDP2, {SAVING} ranks to {LOADING}, load", loaded["forged"], gib).against(
            "torch DCP", loaded["dcp"], LOAD_AIM
        ),
    ]


if __name__ == "__main__":
    run("torch_ckpt", measure)
