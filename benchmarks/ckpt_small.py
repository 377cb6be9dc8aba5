"""Small checkpoints: durable saves and hot loads, against safetensors and torch DCP.

Ten thousand arrays of 1 KiB are saved by a process with an event loop; 1 MiB in 64 arrays by a script without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import forged.checkpoint
from benchmarks.ckpt_baseline import Baseline, removed
from benchmarks.ckpt_comparison import Comparison, Scale, measured_rounds, run
from benchmarks.ckpt_process import forged_process, torch_process
from benchmarks.ckpt_workload import Workload, temporary_directory
from benchmarks.harness import Figure

SAFETENSORS_AIM, DCP_AIM = 0.7, 15.0
MIB_AIM = 1 / 3
ONE_MIB = Workload(64, (64, 64))
MIB_TURNS = 5
"""A call takes a few milliseconds, so each round has several."""


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    with temporary_directory() as path, ExitStack() as stack:
        ours, plain = stack.enter_context(forged_process(scale.small)), Baseline(scale.small)
        saves: dict[str, Callable[[], float]] = {
            "ours": lambda: removed(path / "ours", lambda its: ours.run("save", its)["s"]),
            "safetensors": lambda: removed(path / "safetensors", plain.save_safetensors),
        }
        loads: dict[str, Callable[[], float]] = {
            "ours": lambda: ours.run("load", path / "kept")["s"],
            "safetensors": lambda: plain.read_safetensors(path / "kept.safetensors"),
        }
        ours.run("save", path / "kept")
        plain.save_safetensors(path / "kept.safetensors")
        if not scale.torch_missing:
            peer = stack.enter_context(torch_process(scale.small))
            saves["dcp"] = lambda: removed(path / "dcp", lambda its: peer.run("save", its)["s"])
            loads["dcp"] = lambda: peer.run("load", path / "kept.dcp")["s"]
            peer.run("save", path / "kept.dcp")
        saved, loaded = measured_rounds(scale.rounds, saves), measured_rounds(scale.rounds, loads)
        figures = [*_figures(scale, "save", saved), *_figures(scale, "load", loaded)]
        return [*figures, *_figures_of_one_mib(scale, path)]


def _figures_of_one_mib(scale: Scale, path: Path) -> list[Figure]:
    """A script that saves and loads 1 MiB."""
    plain, state = Baseline(ONE_MIB), {"model": ONE_MIB.state()}
    kept, kept_plain = path / "mib", path / "mib.safetensors"
    forged.checkpoint.save(kept, state)
    plain.save_safetensors(kept_plain)
    saves: dict[str, Callable[[], float]] = {
        "ours": lambda: removed(path / "ours", lambda its: _seconds(lambda: forged.checkpoint.save(its, state))),
        "safetensors": lambda: removed(path / "safetensors", plain.save_safetensors),
    }
    loads: dict[str, Callable[[], float]] = {
        "ours": lambda: _seconds(lambda: forged.checkpoint.load(kept)),
        "safetensors": lambda: plain.read_safetensors(kept_plain),
    }
    rounds = scale.rounds * MIB_TURNS
    saved, loaded = measured_rounds(rounds, saves), measured_rounds(rounds, loads)
    return [
        *Comparison("save, 1 MiB in 64 arrays", saved["ours"]).against(
            "safetensors, fsync", saved["safetensors"], MIB_AIM
        ),
        *Comparison("load, 1 MiB in 64 arrays", loaded["ours"]).against("safetensors", loaded["safetensors"], MIB_AIM),
    ]


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _figures(scale: Scale, what: str, found: dict[str, list[float]]) -> list[Figure]:
    mine = Comparison(f"{what}, {scale.small.count:,} arrays of 1 KiB", found["ours"])
    dcp = f"torch DCP ({scale.torch_missing})" if scale.torch_missing else "torch DCP"
    durably = ", fsync" if what == "save" else ""
    return [
        *mine.against(f"safetensors{durably}", found["safetensors"], SAFETENSORS_AIM),
        *mine.against(dcp, found.get("dcp"), DCP_AIM),
    ]


if __name__ == "__main__":
    run("ckpt_small", measure)
