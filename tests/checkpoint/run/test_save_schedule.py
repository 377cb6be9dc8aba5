"""The schedule of saves on a virtual clock: alike at all ranks, on time, and with few questions."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.catalog.cadence import CadencePolicy, Measured
from forged.checkpoint.run.save_schedule import LOOK_INTERVAL_S, LOOK_STEPS_MAX, SaveSchedule


def policy(
    every_steps: int | None = None, every_seconds: float | None = None, *, automatic: bool = False
) -> CadencePolicy:
    return CadencePolicy(every_steps=every_steps, every_seconds=every_seconds, automatic=automatic)


@dataclass
class Run:
    """The ranks of a run that saves by its schedules; in each world the first rank decides."""

    policy: CadencePolicy
    save_s: float = 0.0
    ranks: list[SaveSchedule] = field(default_factory=list)
    now: float = 100.0
    step: int = 0
    generation: int = 1
    measured: Measured = field(default_factory=Measured)
    looks: list[float] = field(default_factory=list)
    saves: list[tuple[int, float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.join(1)

    def join(self, count: int) -> None:
        self.ranks += [SaveSchedule(self.policy, self.now) for _ in range(count)]

    def change_world(self, gone: int, joined: int) -> None:
        """Some of the first ranks are gone, and others join."""
        self.join(joined)
        self.ranks = self.ranks[min(gone, len(self.ranks) - 1) :]
        self.generation += 1

    def do_step(self, seconds: float) -> None:
        reason = self._reason()
        if reason:
            self.now += self.save_s
            self.saves.append((self.step, self.now, reason))
            for rank in self.ranks:
                rank.saved(self.step, self.now, self.save_s)
        self.now += seconds
        self.step += 1

    def _reason(self) -> str:
        (by_steps,) = {rank.is_due_by_steps(self.step) for rank in self.ranks}
        if by_steps:
            return self.ranks[0].steps_reason
        (is_look,) = {rank.is_look_due(self.step, self.generation) for rank in self.ranks}
        if not is_look:
            return ""
        look = self.ranks[0].look(self.step, self.now, self.measured)
        self.looks.append(self.now)
        for rank in self.ranks:
            rank.take(look, self.generation)
        assert self.step < look.next_step <= self.step + LOOK_STEPS_MAX
        return look.reason if look.is_due else ""


def test_interval_in_steps_needs_no_look() -> None:
    run = Run(policy(10))
    for _ in range(35):
        run.do_step(5.0)
    assert [step for step, *_ in run.saves] == [10, 20, 30]
    assert run.saves[0][2] == "every 10 steps"
    assert run.looks == []


def test_state_is_saved_after_so_many_seconds() -> None:
    run = Run(policy(every_seconds=10.0))
    for _ in range(400):
        run.do_step(0.1)
    times = [at - 100.0 for _, at, _ in run.saves]
    assert times == pytest.approx([10.0, 20.0, 30.0], abs=0.5)
    assert {reason for *_, reason in run.saves} == {"every 10 s"}


def test_either_interval_restarts_the_other() -> None:
    run = Run(policy(50, 8.0))
    for _ in range(100):
        run.do_step(0.1)
    assert [step for step, *_ in run.saves] == [50]
    for _ in range(40):
        run.do_step(0.5)
    assert [reason for *_, reason in run.saves[1:]] == ["every 50 steps", "every 8 s", "every 8 s"]


def test_automatic_interval_follows_the_cost_of_a_save() -> None:
    cheap, costly = Run(policy(automatic=True), save_s=0.1), Run(policy(automatic=True), save_s=5.0)
    for run in (cheap, costly):
        while run.now < 10_000.0:
            run.do_step(0.5)
    assert len(cheap.saves) > 3 * len(costly.saves) > 0
    assert "a save costs 5 s" in costly.saves[-1][2]


def test_automatic_interval_is_shorter_after_failures() -> None:
    def saves(failures: int) -> int:
        run = Run(policy(automatic=True), save_s=1.0)
        while run.now < 10_000.0:
            run.measured = Measured(failures=failures, observed_s=run.now)
            run.do_step(0.5)
        return len(run.saves)

    assert saves(50) > 2 * saves(0)


def test_drain_notice_tightens_the_interval() -> None:
    run = Run(policy(automatic=True), save_s=1.0)
    while len(run.saves) < 2:
        run.do_step(0.5)
    run.measured = Measured(drain_notice_s=60.0)
    before = run.now
    while len(run.saves) < 3:
        run.do_step(0.5)
    assert run.now - before < 20.0
    assert "a worker leaves in 60.0 s" in run.saves[-1][2]


def test_resumed_run_does_not_save_the_same_state_again() -> None:
    schedule = SaveSchedule(policy(every_seconds=5.0), 0.0)
    schedule.begin(40, 100.0)
    assert schedule.is_look_due(40, 1)
    assert not schedule.look(40, 200.0, Measured()).is_due
    assert schedule.look(41, 200.0, Measured()).is_due


def test_look_survives_the_wire() -> None:
    look = SaveSchedule(policy(every_seconds=5.0), 0.0).look(3, 9.0, Measured())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(look), type=type(look)) == look


@given(st.floats(1e-5, 5.0), st.integers(100, 1000))
def test_there_is_about_one_look_in_a_second(step_s: float, steps: int) -> None:
    run = Run(policy(every_seconds=1e6))
    for _ in range(steps):
        run.do_step(step_s)
    # While the speed is not known yet, the looks are closer together.
    passed_s = run.now - 100.0
    assert len(run.looks) <= 2.0 * passed_s / LOOK_INTERVAL_S + 12
    assert len(run.looks) >= min(steps, passed_s / (LOOK_INTERVAL_S + step_s)) / 2.0


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.001, 2.0), st.integers(0, 3), st.integers(0, 3)), max_size=12),
    st.floats(1.0, 20.0),
)
def test_ranks_look_together_in_every_world(worlds: list[tuple[int, float, int, int]], every_seconds: float) -> None:
    """Also where rank 0 is gone, or every rank is new: `do_step` checks that the ranks agree."""
    run = Run(policy(every_seconds=every_seconds), save_s=0.5)
    run.join(2)
    for steps, step_s, gone, joined in worlds:
        looks = len(run.looks)
        for _ in range(steps):
            run.do_step(step_s)
        assert len(run.looks) > looks
        run.change_world(gone, joined)


def test_new_root_continues_the_interval() -> None:
    run = Run(policy(every_seconds=10.0))
    run.join(1)
    for _ in range(150):
        run.do_step(0.1)
    (_, saved_at, _), *_ = run.saves
    run.change_world(gone=1, joined=1)
    for _ in range(80):
        run.do_step(0.1)
    assert run.saves[1][1] - saved_at == pytest.approx(10.0, abs=0.5)


@given(st.floats(0.01, 1.0), st.floats(2.0, 30.0))
def test_save_is_late_by_at_most_a_look_and_a_step(step_s: float, every_seconds: float) -> None:
    run = Run(policy(every_seconds=every_seconds))
    for _ in range(300):
        run.do_step(step_s)
    times = [100.0, *(at for _, at, _ in run.saves)]
    for earlier, later in pairwise(times):
        assert every_seconds <= later - earlier <= every_seconds + LOOK_INTERVAL_S + 2 * step_s + 1e-6
