"""Verified loads into existing arrays, against memcpy, raw reads, torch DCP and safetensors.

Hot: all files are in the page cache. Cold: none is. The raw read reads forged's own file, with O_DIRECT or through the
page cache with two threads, whichever is faster. Only forged verifies what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.ckpt_baseline import Baseline, read_buffered, read_direct
from benchmarks.ckpt_comparison import Comparison, Scale, best_of, measured_rounds, run
from benchmarks.ckpt_process import forged_process, torch_process
from benchmarks.ckpt_workload import drop_page_cache, files_in, fill_page_cache, temporary_directory
from benchmarks.harness import Figure

MEMCPY_AIM, HOT_DCP_AIM, RAW_AIM, COLD_DCP_AIM = 0.5, 1.2, 0.65, 1.5
RAW = {"direct": "a raw read (O_DIRECT)", "buffered": "a raw read (page cache)"}


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    with temporary_directory() as path, ExitStack() as stack:
        forged, plain = stack.enter_context(forged_process(scale.large)), Baseline(scale.large)
        forged.run("save", path / "ours")
        plain.save_safetensors(path / "safetensors")
        loads: dict[str, Callable[[], float]] = {
            "ours": lambda: forged.run("load", path / "ours")["s"],
            "safetensors": lambda: plain.load_safetensors(path / "safetensors"),
        }
        if not scale.torch_missing:
            peer = stack.enter_context(torch_process(scale.large))
            peer.run("save", path / "dcp")
            loads["dcp"] = lambda: peer.run("load", path / "dcp")["s"]
        forged.run("forget", path / "ours")
        hot = measured_rounds(scale.rounds, {**_each_after(fill_page_cache, path, loads), "memcpy": plain.copy})
        forged.run("check", path / "ours")
        cold = measured_rounds(scale.rounds, _each_after(drop_page_cache, path, {**loads, **_raw(path)}))
        return _figures(scale, hot, cold)


def _each_after(
    prepare: Callable[[Path], None], path: Path, loads: dict[str, Callable[[], float]]
) -> dict[str, Callable[[], float]]:
    """The same loads, each with its files prepared just before."""

    def prepared(name: str) -> float:
        prepare(path / ("ours" if name in RAW else name))
        return loads[name]()

    return {name: lambda name=name: prepared(name) for name in loads}  # type: ignore[misc]


def _raw(path: Path) -> dict[str, Callable[[], float]]:
    largest = max(files_in(path / "ours"), key=lambda file: file.stat().st_size)
    return {"direct": lambda: read_direct(largest), "buffered": lambda: read_buffered(largest)}


def _figures(scale: Scale, hot: dict[str, list[float]], cold: dict[str, list[float]]) -> list[Figure]:
    hot_load = Comparison("load, hot", hot["ours"], scale.large.gib)
    cold_load = Comparison("load, cold", cold["ours"], scale.large.gib)
    dcp = f"torch DCP ({scale.torch_missing})" if scale.torch_missing else "torch DCP"
    return [
        *hot_load.against("one memcpy", hot["memcpy"], MEMCPY_AIM),
        *hot_load.against(dcp, hot.get("dcp"), HOT_DCP_AIM),
        *hot_load.against("safetensors", hot["safetensors"]),
        *cold_load.against(*best_of(cold, RAW), RAW_AIM),
        *cold_load.against(dcp, cold.get("dcp"), COLD_DCP_AIM),
        *cold_load.against("safetensors", cold["safetensors"]),
    ]


if __name__ == "__main__":
    run("ckpt_load", measure)
