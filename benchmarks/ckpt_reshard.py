"""What four ranks have saved, loaded by three, against torch DCP doing the same.

Every array is cut by rows, over all ranks; each rank is a process, and the load takes as long as the slowest of them.
Files are in the page cache. What is read is what the processes have asked the system for, their manifests included.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.ckpt_contest import Comparison, Scale, after_warming, run
from benchmarks.ckpt_peer import Peer
from benchmarks.ckpt_scene import Load, room, warm
from benchmarks.harness import Figure

SAVING, LOADING = 4, 3
READ_LIMIT, DCP_AIM = 1.05, 1.5
OURS, TORCH = "benchmarks.ckpt_rank", "benchmarks.ckpt_torch_rank"


class World:
    """Ranks that do the same at the same time."""

    def __init__(self, module: str, size: int, meet: Path, load: Load) -> None:
        with ExitStack() as stack:
            self._ranks = [
                stack.enter_context(Peer(module, [str(rank), str(size), str(meet), *load.words]))
                for rank in range(size)
            ]
            self._open = stack.pop_all()
        self.do("join", meet)

    def do(self, action: str, path: Path) -> list[dict[str, float]]:
        """Have all do something, and wait for all."""
        for rank in self._ranks:
            rank.tell(action, path)
        return [rank.told() for rank in self._ranks]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def measure(scale: Scale) -> list[Figure]:
    """All rows."""
    modules = {"ours": OURS} if scale.no_torch else {"ours": OURS, "dcp": TORCH}
    read: dict[str, list[float]] = {name: [] for name in modules}
    with room() as path, ExitStack() as stack:
        worlds = {}
        for name, module in modules.items():
            with World(module, SAVING, path / f"{name}-saving", scale.large) as saving:
                saving.do("save", path / name)
            worlds[name] = stack.enter_context(World(module, LOADING, path / f"{name}-loading", scale.large))

        def load(name: str) -> float:
            warm(path / name)
            said = worlds[name].do("load", path / name)
            read[name].append(sum(one["read"] for one in said))
            return max(one["s"] for one in said)

        subjects = {name: (lambda name=name: load(name)) for name in worlds}
        found = after_warming(scale.rounds, subjects)
        worlds["ours"].do("check", path)
    return _figures(scale, found, read)


def _figures(scale: Scale, found: dict[str, list[float]], read: dict[str, list[float]]) -> list[Figure]:
    what = f"{SAVING} ranks to {LOADING}"
    why = f" ({scale.no_torch})" if scale.no_torch else ""
    return [
        *Comparison(what, found["ours"], scale.large.gib).against(f"torch DCP{why}", found.get("dcp"), DCP_AIM),
        _of_needed(f"{what}: bytes read / needed, against the limit", scale, read["ours"], READ_LIMIT, 1.0),
        *(_of_needed(f"{what}: bytes read / needed by torch DCP", scale, one, None, None) for one in _theirs(read)),
    ]


def _theirs(read: dict[str, list[float]]) -> Sequence[list[float]]:
    return [read["dcp"]] if "dcp" in read else []


def _of_needed(name: str, scale: Scale, read: list[float], limit: float | None, aim: float | None) -> Figure:
    return Figure(name, "times", max(read) / scale.large.nbytes, limit, aim, higher_is_better=False)


if __name__ == "__main__":
    run("ckpt_reshard", measure)
