"""Durable saves, against what the disk takes at most, and against torch and safetensors.

The state is 2 GiB of float32 in 200 arrays (`--mib` for another size). All are durable when they count: ours with its
checksums, its manifest and the directories; the peers' files are flushed. The raw ceiling writes one warm block over
and over, with O_DIRECT by two threads, or through the page cache; it never copies the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks.ckpt_contest import Comparison, Scale, after_warming, best_of, run
from benchmarks.ckpt_peer import ours, torch
from benchmarks.ckpt_plain import Plain, removed, write_buffered, write_direct
from benchmarks.ckpt_scene import room
from benchmarks.harness import Figure

CEILING_AIM, DCP_AIM = 0.9, 1.4
CEILINGS = {"direct": "the raw disk (O_DIRECT, fsync)", "buffered": "the raw disk (page cache, fsync)"}


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    load = scale.large
    with room() as path, ExitStack() as stack:
        forged, plain = stack.enter_context(ours(load)), Plain(load)
        subjects: dict[str, Callable[[], float]] = {
            "ours": lambda: removed(path / "ours", lambda its: forged.do("save", its)["s"]),
            "direct": lambda: removed(path / "direct", lambda its: write_direct(its, load.nbytes)),
            "buffered": lambda: removed(path / "buffered", lambda its: write_buffered(its, load.nbytes)),
            "safetensors": lambda: removed(path / "safetensors", plain.save_safetensors),
        }
        if not scale.no_torch:
            peer = stack.enter_context(torch(load))
            subjects["dcp"] = lambda: removed(path / "dcp", lambda its: peer.do("save", its)["s"])
            subjects["torch"] = lambda: removed(path / "torch", lambda its: peer.do("save_plain", its)["s"])
        return _figures(scale, after_warming(scale.rounds, subjects))


def _figures(scale: Scale, found: dict[str, list[float]]) -> list[Figure]:
    saved = Comparison("durable save", found["ours"], scale.large.gib)
    why = f" ({scale.no_torch})" if scale.no_torch else ""
    ceiling: tuple[str, Sequence[float]] = best_of(found, CEILINGS)
    return [
        *saved.against(*ceiling, CEILING_AIM),
        *saved.against(f"torch DCP{why}", found.get("dcp"), DCP_AIM),
        *saved.against("safetensors, fsync", found["safetensors"]),
        *saved.against(f"torch.save, fsync{why}", found.get("torch")),
    ]


if __name__ == "__main__":
    run("ckpt_save", measure)
