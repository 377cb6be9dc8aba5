"""Ten thousand arrays of 1 KiB: durable saves and hot loads, against safetensors and torch DCP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from benchmarks.ckpt_baseline import Baseline, removed
from benchmarks.ckpt_comparison import Comparison, Scale, measured_rounds, run
from benchmarks.ckpt_process import forged_process, torch_process
from benchmarks.ckpt_workload import temporary_directory
from benchmarks.harness import Figure

SAFETENSORS_AIM, DCP_AIM = 0.7, 15.0


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    with temporary_directory() as path, ExitStack() as stack:
        forged, plain = stack.enter_context(forged_process(scale.small)), Baseline(scale.small)
        saves: dict[str, Callable[[], float]] = {
            "ours": lambda: removed(path / "ours", lambda its: forged.run("save", its)["s"]),
            "safetensors": lambda: removed(path / "safetensors", plain.save_safetensors),
        }
        loads: dict[str, Callable[[], float]] = {
            "ours": lambda: forged.run("load", path / "kept")["s"],
            "safetensors": lambda: plain.read_safetensors(path / "kept.safetensors"),
        }
        forged.run("save", path / "kept")
        plain.save_safetensors(path / "kept.safetensors")
        if not scale.torch_missing:
            peer = stack.enter_context(torch_process(scale.small))
            saves["dcp"] = lambda: removed(path / "dcp", lambda its: peer.run("save", its)["s"])
            loads["dcp"] = lambda: peer.run("load", path / "kept.dcp")["s"]
            peer.run("save", path / "kept.dcp")
        saved, loaded = measured_rounds(scale.rounds, saves), measured_rounds(scale.rounds, loads)
        return [*_figures(scale, "save", saved), *_figures(scale, "load", loaded)]


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
