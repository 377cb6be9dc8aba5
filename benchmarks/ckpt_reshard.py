"""A checkpoint of four ranks loaded by three, against torch DCP.

Every array is divided by rows over all ranks. Each rank is a process; the load takes as long as the slowest rank. Files
are in the page cache. Bytes read are those that the processes requested from the system, manifests included.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.ckpt_comparison import Comparison, Scale, measured_rounds, run
from benchmarks.ckpt_process import MeasuredProcess
from benchmarks.ckpt_workload import Workload, fill_page_cache, temporary_directory
from benchmarks.harness import Figure

SAVING, LOADING = 4, 3
READ_LIMIT, DCP_AIM = 1.05, 1.5
OURS, TORCH = "benchmarks.ckpt_forged_rank", "benchmarks.ckpt_torch_rank"


class World:
    """Ranks that run the same action at the same time."""

    def __init__(self, module: str, size: int, socket_path: Path, load: Workload) -> None:
        with ExitStack() as stack:
            self._ranks = [
                stack.enter_context(MeasuredProcess(module, [str(rank), str(size), str(socket_path), *load.arguments]))
                for rank in range(size)
            ]
            self._open = stack.pop_all()
        self.run("join", socket_path)

    def run(self, action: str, path: Path) -> list[dict[str, float]]:
        """Run an action at all ranks and wait for all."""
        for rank in self._ranks:
            rank.send(action, path)
        return [rank.receive() for rank in self._ranks]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    modules = {"ours": OURS} if scale.torch_missing else {"ours": OURS, "dcp": TORCH}
    read: dict[str, list[float]] = {name: [] for name in modules}
    with temporary_directory() as path, ExitStack() as stack:
        worlds = {}
        for name, module in modules.items():
            with World(module, SAVING, path / f"{name}-saving", scale.large) as saving:
                saving.run("save", path / name)
            worlds[name] = stack.enter_context(World(module, LOADING, path / f"{name}-loading", scale.large))

        def load(name: str) -> float:
            fill_page_cache(path / name)
            result = worlds[name].run("load", path / name)
            read[name].append(sum(one["read"] for one in result))
            return max(one["s"] for one in result)

        subjects = {name: (lambda name=name: load(name)) for name in worlds}
        found = measured_rounds(scale.rounds, subjects)
        worlds["ours"].run("check", path)
    return _figures(scale, found, read)


def _figures(scale: Scale, found: dict[str, list[float]], read: dict[str, list[float]]) -> list[Figure]:
    what = f"{SAVING} ranks to {LOADING}"
    why = f" ({scale.torch_missing})" if scale.torch_missing else ""
    return [
        *Comparison(what, found["ours"], scale.large.gib).against(f"torch DCP{why}", found.get("dcp"), DCP_AIM),
        _of_needed(f"{what}: bytes read / needed, against the limit", scale, read["ours"], READ_LIMIT, 1.0),
        *(_of_needed(f"{what}: bytes read / needed by torch DCP", scale, one, None, None) for one in _dcp_reads(read)),
    ]


def _dcp_reads(read: dict[str, list[float]]) -> Sequence[list[float]]:
    return [read["dcp"]] if "dcp" in read else []


def _of_needed(name: str, scale: Scale, read: list[float], limit: float | None, aim: float | None) -> Figure:
    return Figure(name, "times", max(read) / scale.large.nbytes, limit, aim, higher_is_better=False)


if __name__ == "__main__":
    run("ckpt_reshard", measure)
