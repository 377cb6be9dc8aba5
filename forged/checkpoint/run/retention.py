"""Which checkpoints of a run are the newest, and which of them to keep: names and numbers, without I/O.

Invariants:
- A checkpoint of a later step than the current one is never superseded: the run may reach it again.
- Checkpoints that cannot be restored do not count among those that are kept, so the last restorable one stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count

_NAME = re.compile(r"step-([0-9]{8,16})(?:-([0-9]{1,6}))?")


def name_of(step: int, is_taken: Callable[[str], bool]) -> str:
    """A free name for the checkpoint of a step: `step-00000500`, or `step-00000500-2` if that is taken."""
    names = (f"step-{step:08d}" + (f"-{number}" if number > 1 else "") for number in count(1))
    return next(name for name in names if not is_taken(name))


def newest_first(names: Iterable[str]) -> list[str]:
    """The names of the checkpoints of a run, by step and number; other names are left out."""
    found = [(order, name) for name in names if (order := _order_of(name)) is not None]
    return [name for _, name in sorted(found, reverse=True)]


def step_of(name: str) -> int:
    """The step of a checkpoint of a run."""
    order = _order_of(name)
    assert order is not None, "only the names of a run's checkpoints have steps"
    return order[0]


def restore_order(names: Iterable[str], offered: Sequence[str], excluded: Collection[str]) -> list[str]:
    """The checkpoints of a run that may be restored, the best first: by step, and of one step those `offered` first."""
    places = {name: place for place, name in enumerate(offered)}
    left = [name for name in newest_first(names) if name not in excluded]
    return sorted(left, key=lambda name: (-step_of(name), places.get(name, len(places))))


def superseded(names: Iterable[str], step: int, keep: int, is_restorable: Callable[[str], bool]) -> list[str]:
    """The checkpoints older than the newest `keep` restorable ones up to a step."""
    past = [name for name in newest_first(names) if step_of(name) <= step]
    kept = 0
    for place, name in enumerate(past):
        kept += is_restorable(name)
        if kept == keep:
            return past[place + 1 :]
    return []


def _order_of(name: str) -> tuple[int, int] | None:
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 1))
