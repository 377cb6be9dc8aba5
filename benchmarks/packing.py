"""The height of packings on public traces: online (exact best fit) against published figures, offline against capacity.

Online a buffer's place is chosen when it is allocated; the height is divided by the most bytes alive at one time. The
published figures are those of an exact best fit that lets the memory grow only if no hole is large enough. Offline the
planner knows the whole trace: the minimalloc traces have a capacity, most of them with no byte to spare; for the other
ones the height is compared with that of best fit.

The traces are beside the repository, in ../shared/data/memory_traces. With --quick a small made-up trace is packed.
"""

from __future__ import annotations

import random
from pathlib import Path
from time import process_time

from benchmarks.harness import Figure, main
from forged.memory.traces import Buffer, events, plan, read_trace, replay

TRACES = Path(__file__).parents[2] / "shared" / "data" / "memory_traces"
PUBLISHED = {"somas_pangu_2.6B": 1.120, "iopddl_G_1": 1.003}
ROUNDING = 0.0005
"""The published figures have three decimals."""
CAPACITY = 1_048_576
SECONDS_MAX = 60.0


def measure(quick: bool) -> list[Figure]:
    """Pack each trace online and offline."""
    if quick:
        return _figures("made-up", _made_up(), None)
    if not TRACES.is_dir():
        raise SystemExit(f"the public traces are missing: put them into {TRACES}, or run with --quick")
    figures = []
    for path in sorted(TRACES.glob("*.csv")):
        name = path.stem.removesuffix(f".{CAPACITY}")
        figures += _figures(name, read_trace(path).buffers, CAPACITY if name != path.stem else None)
    return figures


def _figures(name: str, buffers: list[Buffer], capacity: int | None) -> list[Figure]:
    online = replay(events(buffers))
    published = PUBLISHED.get(name)
    limit = None if published is None else published + ROUNDING
    began = process_time()
    offline = plan(buffers, capacity)
    seconds = process_time() - began
    against = online.height if capacity is None else capacity
    reference = "best fit" if capacity is None else "the capacity"
    return [
        Figure(f"{name}: best fit, height / peak", "", online.height / online.peak, limit, 1.0, higher_is_better=False),
        Figure(
            f"{name}: plan, height against {reference}",
            "bytes",
            offline.height,
            against,
            aim=1.0,
            higher_is_better=False,
        ),
        Figure(f"{name}: plan, height / peak", "", offline.height / offline.peak),
        Figure(f"{name}: plan, processor time", "s", seconds, SECONDS_MAX, aim=1.0, higher_is_better=False),
    ]


def _made_up() -> list[Buffer]:
    rng = random.Random(7)
    lives = [(rng.randrange(200), rng.randrange(1, 40), rng.randrange(1, 64) * 512) for _ in range(120)]
    return [Buffer(number, lower, lower + life, size) for number, (lower, life, size) in enumerate(lives)]


if __name__ == "__main__":
    main("packing", measure)
