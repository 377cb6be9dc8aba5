"""The demo's training script: when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from forged.demo.records import NONE
from forged.demo.train import Recorder, steps
from forged.worker.blocking import Training


class CountingTraining:
    """Yields the numbers of steps; a worker without a world."""

    def __init__(self, drains_at: int = 1_000) -> None:
        self.state: dict[str, Any] = {"ends_at": NONE}
        self.step = 0
        self.total: int | None = None
        """What the script has asked for last."""
        self._drains_at = drains_at

    def steps(self, total: int | None = None) -> Iterator[int]:
        self.total = total
        while self.step != total and self.step < self._drains_at:
            yield self.step
            self.step += 1


def steps_of(worker: CountingTraining, tmp_path: Path) -> Iterator[int]:
    return steps(cast("Training", worker), Recorder(tmp_path / "records"))


def test_worker_knows_the_end_before_it_begins_the_last_step(tmp_path: Path) -> None:
    worker, taken = CountingTraining(), []
    for step in steps_of(worker, tmp_path):
        taken.append((int(step), worker.total))
        if step == 3:
            worker.state["ends_at"] = 5
    assert taken == [(0, None), (1, None), (2, None), (3, None), (4, 5)]
    assert worker.total == 5


def test_drained_worker_makes_no_further_step(tmp_path: Path) -> None:
    worker = CountingTraining(drains_at=2)
    assert [int(step) for step in steps_of(worker, tmp_path)] == [0, 1]
    assert worker.total is None
