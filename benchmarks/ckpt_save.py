"""Durable saves, against the disk's ceiling, torch and safetensors.

The state is 2 GiB of float32 in 200 arrays (`--mib` for another size). All saves are durable: forged's with checksums,
manifest and directories; files of torch and safetensors are flushed. The ceiling writes one warm block repeatedly, with
O_DIRECT and two threads or through the page cache; it never copies the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks.ckpt_baseline import Baseline, removed, write_buffered, write_direct
from benchmarks.ckpt_comparison import Comparison, Scale, best_of, measured_rounds, run
from benchmarks.ckpt_process import forged_process, torch_process
from benchmarks.ckpt_workload import temporary_directory
from benchmarks.harness import Figure

CEILING_AIM, DCP_AIM = 0.9, 1.4
CEILINGS = {"direct": "the raw disk (O_DIRECT, fsync)", "buffered": "the raw disk (page cache, fsync)"}


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    load = scale.large
    with temporary_directory() as path, ExitStack() as stack:
        forged, plain = stack.enter_context(forged_process(load)), Baseline(load)
        subjects: dict[str, Callable[[], float]] = {
            "ours": lambda: removed(path / "ours", lambda its: forged.run("save", its)["s"]),
            "direct": lambda: removed(path / "direct", lambda its: write_direct(its, load.nbytes)),
            "buffered": lambda: removed(path / "buffered", lambda its: write_buffered(its, load.nbytes)),
            "safetensors": lambda: removed(path / "safetensors", plain.save_safetensors),
        }
        if not scale.torch_missing:
            peer = stack.enter_context(torch_process(load))
            subjects["dcp"] = lambda: removed(path / "dcp", lambda its: peer.run("save", its)["s"])
            subjects["torch"] = lambda: removed(path / "torch", lambda its: peer.run("save_plain", its)["s"])
        return _figures(scale, measured_rounds(scale.rounds, subjects))


def _figures(scale: Scale, found: dict[str, list[float]]) -> list[Figure]:
    saved = Comparison("durable save", found["ours"], scale.large.gib)
    why = f" ({scale.torch_missing})" if scale.torch_missing else ""
    ceiling: tuple[str, Sequence[float]] = best_of(found, CEILINGS)
    return [
        *saved.against(*ceiling, CEILING_AIM),
        *saved.against(f"torch DCP{why}", found.get("dcp"), DCP_AIM),
        *saved.against("safetensors, fsync", found["safetensors"]),
        *saved.against(f"torch.save, fsync{why}", found.get("torch")),
    ]


if __name__ == "__main__":
    run("ckpt_save", measure)
