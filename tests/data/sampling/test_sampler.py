from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.data.audit.epoch_audit import UsageLog
from forged.data.model import Dataset
from forged.data.sampling.sampler import STATED_LATER, ElasticSampler, RankBatches, SamplerState, SamplingMode
from forged.data.sampling.usage import runs_of
from forged.errors import RequestRefused
from forged.worker.state_transfer.encoding import Arriving, pack
from tests.data.topology_changes import UNTIMED

ROOT = Path(__file__).parents[3]
TORCH = [
    Path(sysconfig.get_path("purelib")),
    *ROOT.glob(".venv/peers/lib/python3.*/site-packages"),
]
"""Directories that may contain torch."""


def sharded(total: int, shards: int, global_batch: int, world_size: int = 2, **options: Any) -> ElasticSampler:
    dataset = Dataset(total, shards)
    sampler = ElasticSampler(total, global_batch, 7, mode="sharded", dataset=dataset, **options)
    sampler.reassign(np.arange(shards) % world_size, world_size)
    return sampler


def sampler_of(mode: str, total: int = 103, global_batch: int = 8, **options: Any) -> ElasticSampler:
    """A sampler for two ranks."""
    if mode == "shared":
        return ElasticSampler(total, global_batch, 7, **options)
    return sharded(total, min(total, 10), global_batch, **options)


def of_world(sampler: ElasticSampler, world_size: int) -> list[int]:
    return [sample for rank in range(world_size) for sample in sampler.batch(rank, world_size).tolist()]


def epoch_of(sampler: ElasticSampler, world_size: int = 2) -> list[list[int]]:
    """The steps of the current epoch, each committed."""
    epoch, steps = sampler.epoch, []
    while sampler.epoch == epoch:
        steps.append(of_world(sampler, world_size))
        sampler.advance()
    return steps


both_modes = pytest.mark.parametrize("mode", ["shared", "sharded"])


# One sequence for every world.


@UNTIMED
@given(st.integers(1, 80), st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=3))
def test_the_union_over_ranks_is_the_same_sequence_for_every_world_size(
    total: int, global_batch: int, sizes: list[int]
) -> None:
    alone = epoch_of(ElasticSampler(total, global_batch, 3), 1)
    for size in sizes:
        assert epoch_of(ElasticSampler(total, global_batch, 3), size) == alone


def test_ranks_take_equal_shares_within_one_sample() -> None:
    sampler = ElasticSampler(1000, 10, 1)
    sampler.advance()
    assert [sampler.positions(rank, 4) for rank in range(4)] == [
        [range(10, 12)],
        [range(12, 15)],
        [range(15, 17)],
        [range(17, 20)],
    ]
    assert sampler.positions(0, 20) == []
    assert sampler.batch(0, 20).tolist() == []


def test_dataset_of_a_trillion_samples_is_supported() -> None:
    sampler = ElasticSampler(10**12, 4096, 1)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "consumed": 10**12 - 5000})
    last = of_world(sampler, 3)
    sampler.advance()
    last += of_world(sampler, 3)
    assert len(set(last)) == 5000
    assert sampler.epoch == 3
    sampler.advance()
    assert sampler.state == SamplerState(4, 0)


@both_modes
def test_each_epoch_has_every_sample_once_in_a_different_order(mode: str) -> None:
    sampler = sampler_of(mode)
    epochs = [[sample for step in epoch_of(sampler) for sample in step] for _ in range(3)]
    assert sampler.epoch == 3
    assert all(sorted(epoch) == list(range(103)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@both_modes
def test_batch_stays_the_same_until_advance(mode: str) -> None:
    sampler = sampler_of(mode)
    first = of_world(sampler, 2)
    assert of_world(sampler, 2) == first
    sampler.advance()
    assert not set(of_world(sampler, 2)) & set(first)


@both_modes
def test_batches_are_of_int64(mode: str) -> None:
    assert sampler_of(mode).batch(0, 2).dtype == np.int64
    assert sampler_of(mode, shuffle=False).batch(0, 2).dtype == np.int64


def test_different_seeds_give_different_orders() -> None:
    assert ElasticSampler(1000, 50, 1).batch(0, 1).tolist() != ElasticSampler(1000, 50, 2).batch(0, 1).tolist()


def test_sampler_without_shuffling_is_ascending() -> None:
    assert epoch_of(ElasticSampler(7, 3, shuffle=False), 2) == [[0, 1, 2], [3, 4, 5], [6]]


# The end of an epoch.


@both_modes
@pytest.mark.parametrize(
    ("total", "global_batch", "drop_last", "sizes"),
    [
        (20, 8, False, [8, 8, 4]),
        (20, 8, True, [8, 8]),
        (16, 8, False, [8, 8]),
        (16, 8, True, [8, 8]),
        (3, 8, False, [3]),
        (8, 8, True, [8]),
    ],
)
def test_the_last_batch_is_smaller_or_dropped(
    mode: str, total: int, global_batch: int, drop_last: bool, sizes: list[int]
) -> None:
    sampler = sampler_of(mode, total, global_batch, drop_last=drop_last)
    for epoch in range(2):
        assert sampler.epoch == epoch
        assert sampler.steps_left == len(sizes)
        assert [len(step) for step in epoch_of(sampler)] == sizes


@both_modes
def test_last_step_reports_the_dropped_samples(mode: str) -> None:
    sampler = sampler_of(mode, 20, 8, drop_last=True)
    assert not any(use.dropped for use in sampler.advance())
    last = sampler.advance()
    assert sum(use.end - use.start for use in last if use.dropped) == 4
    assert sum(use.end - use.start for use in last if not use.dropped) == 8
    assert {use.epoch for use in last} == {0}


@both_modes
def test_batch_grown_near_the_end_takes_the_remaining_samples(mode: str) -> None:
    sampler = sampler_of(mode, 20, 8, drop_last=True)
    sampler.global_batch = 4
    for _ in range(3):
        sampler.advance()
    sampler.global_batch = 10
    assert sampler.steps_left == 1
    assert len(of_world(sampler, 2)) == 8
    assert len(list(sampler.batches(0, 2))) == 1
    sampler.advance()
    assert sampler.state == SamplerState(1, 0)


@both_modes
def test_global_batch_may_change_between_steps(mode: str) -> None:
    sampler = sampler_of(mode)
    used = []
    for size in [8, 16, 3, 50, 26]:
        sampler.global_batch = size
        used.append(of_world(sampler, 2))
        sampler.advance()
    assert [len(step) for step in used] == [8, 16, 3, 50, 26]
    assert sorted(sample for step in used for sample in step) == list(range(103))
    assert sampler.epoch == 1


@both_modes
def test_step_larger_than_an_epoch_takes_one_epoch(mode: str) -> None:
    sampler = sampler_of(mode, 20, 8, drop_last=True)
    sampler.advance()
    sampler.take(30)
    assert sampler.global_batch == 20
    rest = of_world(sampler, 2)
    assert len(rest) == 12
    sampler.advance()
    assert sorted(of_world(sampler, 2)) == list(range(20))
    assert [(use.epoch, use.dropped) for use in sampler.advance()] == [(1, False)] * (1 if mode == "shared" else 10)
    sampler.take(8)
    assert sampler.global_batch == 8
    for taking, size in ((sampler_of(mode, 20, 8), 30), (sampler_of(mode, 0, 8, drop_last=True), 30)):
        taking.take(size)
        assert taking.global_batch == size


@both_modes
def test_epoch_without_samples_has_no_steps(mode: str) -> None:
    sampler = sampler_of(mode, 0, 8, drop_last=True)
    assert (sampler.steps_left, list(sampler.batches(0, 2)), of_world(sampler, 2)) == (0, [], [])
    assert sampler.advance() == []
    assert sampler.epoch == 1


# The audit.


@UNTIMED
@given(st.data())
def test_reported_steps_prove_each_epoch_under_any_history(data: st.DataObject) -> None:
    """Worlds and batches change, steps are lost and repeated, and a world restarts from an older state."""
    mode = data.draw(st.sampled_from(["shared", "sharded"]))
    total, drop_last = data.draw(st.integers(1, 60)), data.draw(st.booleans())
    shards = min(total, 10)
    sampler = sampler_of(mode, total, 1, drop_last=drop_last)
    log, step, saved = UsageLog(total), 0, (0, sampler.state_dict())
    used: list[tuple[int, list[int]]] = []
    for generation in range(1, 1 + data.draw(st.integers(1, 6))):
        if data.draw(st.integers(0, 3)) == 0:
            step, state = saved
            sampler = sampler_of(mode, total, 1, drop_last=drop_last)
            sampler.load_state_dict(state)
            log.rewind(generation, step)
            del used[step:]
        size = data.draw(st.integers(1, 5))
        sampler.global_batch = data.draw(st.integers(1, total))
        if mode == "sharded":
            owners = st.lists(st.integers(0, size - 1), min_size=shards, max_size=shards)
            sampler.reassign(data.draw(owners), size)
        for _ in range(data.draw(st.integers(0, 8))):
            used.append((sampler.epoch, of_world(sampler, size)))
            log.report(generation, runs_of([(step, sampler.advance())]))
            step += 1
        if data.draw(st.booleans()):
            saved = (step, sampler.state_dict())
    for epoch in range(sampler.epoch):
        audit = log.audit(epoch)
        samples = [sample for at, batch in used for sample in batch if at == epoch]
        assert audit.complete
        assert audit.used == len(samples) == len(set(samples)) == total - audit.dropped
    audit = log.audit(sampler.epoch)
    assert audit.used == sampler.state.consumed
    assert not audit.repeated
    left = [sample for one in audit.missing for sample in sampler.samples_at(sampler.epoch, one).tolist()]
    done = [sample for at, batch in used for sample in batch if at == sampler.epoch]
    assert sorted(left + done) == list(range(total))


def test_unreported_step_is_missing_in_the_audit() -> None:
    sampler, log = ElasticSampler(40, 10, 7), UsageLog(40)
    for step in range(4):
        uses = sampler.advance()
        if step != 2:
            log.report(1, runs_of([(step, uses)]))
    assert log.audit(0).missing == [range(20, 30)]
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 0, "consumed": 20})
    assert sampler.samples_at(0, range(20, 30)).tolist() == sampler.batch(0, 1).tolist()


@both_modes
def test_positions_match_the_reported_usage(mode: str) -> None:
    sampler = sampler_of(mode)
    ranges = [one for rank in range(2) for one in sampler.positions(rank, 2)]
    uses = sampler.advance()
    assert sorted(at for one in ranges for at in one) == sorted(at for use in uses for at in range(use.start, use.end))


# States.


@both_modes
def test_transferred_state_continues_at_the_same_position(mode: str) -> None:
    sampler = sampler_of(mode)
    for _ in range(20):
        sampler.advance()
    packed = pack(sampler)
    arriving = Arriving(packed.head)
    for part, given_part in zip(arriving.parts, packed.parts, strict=True):
        part[:] = given_part
    other = sampler_of(mode)
    arriving.adopt(other)
    assert other.state == sampler.state == SamplerState(1, 7 * 8)
    assert epoch_of(other) == epoch_of(sampler)


def test_a_state_in_shared_mode_is_plain_values() -> None:
    state = ElasticSampler(10, 2, 7).state_dict()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state)) == state


@both_modes
@pytest.mark.parametrize(
    ("name", "value"),
    [("total", 104), ("seed", 8), ("shuffle", False), ("drop_last", True), ("mode", "other"), ("shards", 9)],
)
def test_the_state_of_another_sampler_is_refused_and_changes_nothing(mode: str, name: str, value: Any) -> None:
    sampler = sampler_of(mode)
    sampler.advance()
    own = sampler.settings[name]
    with pytest.raises(RequestRefused) as caught:
        sampler.load_state_dict({**sampler.state_dict(), name: value})
    assert caught.value.code == "sampler_differs"
    assert caught.value.message == (
        f"the state is that of a sampler with {name} = {value}, and this one has {name} = {own}"
    )
    assert caught.value.fix == f"create this sampler with {name} = {value}"
    assert sampler.state == SamplerState(0, 8)


@both_modes
@pytest.mark.parametrize(("name", "value"), [("epoch", -1), ("epoch", 1.5), ("epoch", None), ("epoch", 2**63)])
def test_invalid_state_is_refused_and_changes_nothing(mode: str, name: str, value: Any) -> None:
    sampler = sampler_of(mode)
    sampler.advance()
    with pytest.raises(RequestRefused, match=name) as caught:
        sampler.load_state_dict({**sampler.state_dict(), name: value})
    assert caught.value.code == "sampler_invalid"
    assert sampler.state == SamplerState(0, 8)


@both_modes
def test_incomplete_state_is_refused(mode: str) -> None:
    sampler = sampler_of(mode)
    for name in sampler.state_dict().keys() - STATED_LATER:
        state = sampler.state_dict()
        del state[name]
        with pytest.raises(RequestRefused, match=name):
            sampler.load_state_dict(state)


def test_the_state_of_the_other_mode_is_refused() -> None:
    with pytest.raises(RequestRefused, match="with mode = sharded, and this one has mode = shared"):
        sampler_of("shared").load_state_dict(sampler_of("sharded").state_dict())
    with pytest.raises(RequestRefused, match="with mode = shared, and this one has mode = sharded"):
        sampler_of("sharded").load_state_dict(sampler_of("shared").state_dict())


@both_modes
def test_old_state_without_all_settings_is_loaded(mode: str) -> None:
    sampler, other = sampler_of(mode), sampler_of(mode)
    sampler.advance()
    other.load_state_dict({name: value for name, value in sampler.state_dict().items() if name not in STATED_LATER})
    assert other.state == sampler.state


@both_modes
def test_old_state_of_the_other_mode_is_refused(mode: str) -> None:
    old = {name: value for name, value in sampler_of(mode).state_dict().items() if name not in STATED_LATER}
    with pytest.raises(RequestRefused, match="part of a state of a sampler in this mode"):
        sampler_of("shared" if mode == "sharded" else "sharded").load_state_dict(old)


def test_numpy_numbers_are_accepted() -> None:
    numbers: Any = np.array([100, 8, 7, 10])
    total, batch, seed, shards = numbers
    sampler = ElasticSampler(total, batch, seed, mode="sharded", dataset=Dataset(total, shards))
    assert msgspec.json.decode(msgspec.json.encode([sampler.settings, sampler.global_batch])) == [
        {"total": 100, "seed": 7, "shuffle": True, "drop_last": False, "mode": "sharded", "shards": 10},
        8,
    ]


@pytest.mark.parametrize("consumed", [-1, 104, 1.0, None])
def test_invalid_consumed_count_is_refused(consumed: Any) -> None:
    sampler = sampler_of("shared")
    with pytest.raises(RequestRefused, match="consumed"):
        sampler.load_state_dict({**sampler.state_dict(), "consumed": consumed})


# Iteration.


@both_modes
@pytest.mark.parametrize("drop_last", [False, True])
def test_iteration_yields_the_rest_of_the_epoch_and_advances_nothing(mode: str, drop_last: bool) -> None:
    sampler = sampler_of(mode, drop_last=drop_last)
    for _ in range(3):
        sampler.advance()
    ahead = [[batch.tolist() for batch in sampler.batches(rank, 2)] for rank in range(2)]
    assert sampler.state == SamplerState(0, 24)
    assert len(ahead[0]) == len(ahead[1]) == sampler.steps_left
    assert [[*first, *second] for first, second in zip(*ahead, strict=True)] == epoch_of(sampler)


@both_modes
def test_training_while_iterating_ends_with_the_epoch(mode: str) -> None:
    sampler = sampler_of(mode)
    steps = 0
    for batch in sampler.batches(0, 2):
        assert batch.tolist() == sampler.batch(0, 2).tolist()
        sampler.advance()
        steps += 1
    assert (steps, sampler.state) == (13, SamplerState(1, 0))


@both_modes
def test_batch_sampler_yields_lists_and_has_a_length(mode: str) -> None:
    """What a `DataLoader` asks of its `batch_sampler`: an iterator of lists of plain numbers, and their number."""
    batches = sampler_of(mode).for_rank(1, 2)
    assert isinstance(batches, RankBatches)
    found = list(batches)
    assert len(batches) == len(found) == 13
    assert all(type(batch) is list and type(sample) is int for batch in found for sample in batch)
    assert list(batches) == found


@both_modes
def test_setting_the_current_epoch_does_not_restart_it(mode: str) -> None:
    sampler = sampler_of(mode)
    batches = sampler.for_rank(0, 2)
    sampler.advance()
    batches.set_epoch(0)
    assert sampler.state == SamplerState(0, 8)
    batches.set_epoch(5)
    assert sampler.state == SamplerState(5, 0)
    assert list(batches) != list(sampler_of(mode).for_rank(0, 2))
    batches.set_epoch(0)
    assert list(batches) == list(sampler_of(mode).for_rank(0, 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_pytorch_loads_each_sample_once_over_a_rescale(workers: int) -> None:
    """In a process of its own, as torch is in another environment, if it is there at all."""
    where = next((path for path in TORCH if (path / "torch").is_dir()), None)
    if where is None:
        pytest.skip("torch is not installed; `make bench-torch` installs it")
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.loader_process", str(workers)],
        env={**os.environ, "PYTHONPATH": str(where)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert [sorted(found[mode]) for mode in ("shared", "sharded")] == [list(range(103))] * 2
    assert found["shared"] == ElasticSampler(103, 103, 7).batch(0, 1).tolist()


def test_rank_with_nothing_to_draw_has_an_empty_batch() -> None:
    """All ranks have equally many steps, so a PyTorch script must handle empty batches."""
    batches = [list(ElasticSampler(9, 8, 7).for_rank(rank, 4)) for rank in range(4)]
    assert [[len(batch) for batch in of_rank] for of_rank in batches] == [[2, 0], [2, 0], [2, 0], [2, 1]]


# Refusals.


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("total", {"total": -1}),
        ("total", {"total": 1.5}),
        ("total", {"total": 2**63}),
        ("global_batch", {"global_batch": 0}),
        ("global_batch", {"global_batch": None}),
        ("global_batch", {"global_batch": 11, "drop_last": True}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": "7"}),
        ("mode", {"mode": "split"}),
        ("mode", {"mode": None}),
        ("dataset", {"mode": "sharded"}),
        ("dataset", {"mode": "sharded", "dataset": Dataset(11, 2)}),
        ("dataset", {"dataset": Dataset(10, 2)}),
    ],
)
def test_invalid_sampler_argument_is_refused_by_name(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match=name) as caught:
        ElasticSampler(**{"total": 10, "global_batch": 4, "seed": 7, **change})
    assert caught.value.code == "sampler_invalid"


@both_modes
@pytest.mark.parametrize(
    ("rank", "world_size", "name"), [(-1, 2, "rank"), (2, 2, "rank"), (0, 0, "world_size"), (0.0, 2, "rank")]
)
def test_invalid_rank_or_world_size_is_refused(mode: str, rank: Any, world_size: int, name: str) -> None:
    sampler = sampler_of(mode)
    for ask in (sampler.positions, sampler.batch, sampler.batches, sampler.for_rank):
        with pytest.raises(RequestRefused, match=name):
            ask(rank, world_size)


@both_modes
def test_refused_global_batch_changes_nothing(mode: str) -> None:
    sampler = sampler_of(mode, drop_last=True)
    with pytest.raises(RequestRefused, match="must be at most 103"):
        sampler.global_batch = 104
    assert sampler.global_batch == 8


def test_shards_are_assigned_in_sharded_mode_only() -> None:
    with pytest.raises(RequestRefused, match="needs mode sharded"):
        ElasticSampler(10, 2, 7).reassign([0], 1)


@both_modes
@pytest.mark.parametrize("positions", [range(-1, 3), range(100, 104), range(5, 3), range(0, 10, 2)])
def test_invalid_positions_are_refused(mode: str, positions: range) -> None:
    with pytest.raises(RequestRefused, match="positions"):
        sampler_of(mode).samples_at(0, positions)


def test_sampling_modes_have_their_wire_names() -> None:
    assert [str(mode) for mode in SamplingMode] == ["shared", "sharded"]
