"""Ten thousand arrays of 1 KiB: durable saves and hot loads, against safetensors and torch DCP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from benchmarks.ckpt_contest import Comparison, Scale, after_warming, run
from benchmarks.ckpt_peer import ours, torch
from benchmarks.ckpt_plain import Plain, removed
from benchmarks.ckpt_scene import room
from benchmarks.harness import Figure

SAFETENSORS_AIM, DCP_AIM = 0.7, 15.0


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    with room() as path, ExitStack() as stack:
        forged, plain = stack.enter_context(ours(scale.small)), Plain(scale.small)
        saves: dict[str, Callable[[], float]] = {
            "ours": lambda: removed(path / "ours", lambda its: forged.do("save", its)["s"]),
            "safetensors": lambda: removed(path / "safetensors", plain.save_safetensors),
        }
        loads: dict[str, Callable[[], float]] = {
            "ours": lambda: forged.do("load", path / "kept")["s"],
            "safetensors": lambda: plain.read_safetensors(path / "kept.safetensors"),
        }
        forged.do("save", path / "kept")
        plain.save_safetensors(path / "kept.safetensors")
        if not scale.no_torch:
            peer = stack.enter_context(torch(scale.small))
            saves["dcp"] = lambda: removed(path / "dcp", lambda its: peer.do("save", its)["s"])
            loads["dcp"] = lambda: peer.do("load", path / "kept.dcp")["s"]
            peer.do("save", path / "kept.dcp")
        saved, loaded = after_warming(scale.rounds, saves), after_warming(scale.rounds, loads)
        return [*_figures(scale, "save", saved), *_figures(scale, "load", loaded)]


def _figures(scale: Scale, what: str, found: dict[str, list[float]]) -> list[Figure]:
    mine = Comparison(f"{what}, {scale.small.count:,} arrays of 1 KiB", found["ours"])
    dcp = f"torch DCP ({scale.no_torch})" if scale.no_torch else "torch DCP"
    durably = ", fsync" if what == "save" else ""
    return [
        *mine.against(f"safetensors{durably}", found["safetensors"], SAFETENSORS_AIM),
        *mine.against(dcp, found.get("dcp"), DCP_AIM),
    ]


if __name__ == "__main__":
    run("ckpt_small", measure)
