"""The metrics about GPU memory."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from forged.memory.messages import PlanCompaction
from forged.telemetry import memory_metrics
from forged.telemetry.memory_metrics import SHOWN, MemoryCollector
from tests.kernel_fixture import on_virtual_time
from tests.memory.memory_fixture import GPU, JOB, KIB, MemoryDaemon, memory_daemon, wanted

LABELS = {"job": JOB, "device": GPU}


def registry_of(memory: MemoryDaemon) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MemoryCollector(memory.service.table))
    return registry


@on_virtual_time
async def test_a_device_is_shown_with_its_memory() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.take("held", 16 * KIB)
        await memory.take("cache", 8 * KIB, cached=True)
        registry = registry_of(memory)
        values = {name: registry.get_sample_value(name, LABELS) for name, _, _ in SHOWN}
        assert values == {
            "forged_memory_capacity_bytes": 64 * KIB,
            "forged_memory_used_bytes": 24 * KIB,
            "forged_memory_cached_bytes": 8 * KIB,
            "forged_memory_free_bytes": 40 * KIB,
            "forged_memory_largest_hole_bytes": 40 * KIB,
            "forged_memory_blocks": 2,
            "forged_memory_waiting": 0,
            "forged_memory_pressure": 0.25,
        }
        assert registry.get_sample_value("forged_memory_devices") == 1


@on_virtual_time
async def test_what_happens_to_blocks_is_counted() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.take("first", 24 * KIB, cached=True)
        await memory.take("second", 16 * KIB)
        await memory.take("third", 24 * KIB)
        fourth = await memory.take("fourth", 20 * KIB)
        assert fourth.evicted == ["w0:first"]
        assert fourth.handle is not None
        await memory.free(fourth.handle)
        (short,) = await memory.allocate(wanted("too large", 64 * KIB), all_or_none=True)
        assert short.shortage is not None
        plan = await memory.ask(PlanCompaction(JOB, GPU))
        for move in plan.moves:
            await memory.commit(plan.epoch, move.number)
        registry = registry_of(memory)
        counted = {
            name: registry.get_sample_value(f"forged_memory_{name}_total")
            for name in ("allocations", "evictions", "out_of_memory", "compaction_moves")
        }
        assert plan.moves
        assert counted == {
            "allocations": 4, "evictions": 1, "out_of_memory": 1, "compaction_moves": len(plan.moves),
        }  # fmt: skip


@on_virtual_time
async def test_blocks_that_are_taken_back_are_not_counted() -> None:
    async with memory_daemon() as memory:
        await memory.register()
        await memory.allocate(wanted("one", 48 * KIB), wanted("two", 48 * KIB), all_or_none=True)
        assert registry_of(memory).get_sample_value("forged_memory_allocations_total") == 0


@on_virtual_time
async def test_devices_with_the_highest_pressure_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_metrics, "DEVICES_MAX", 2)
    async with memory_daemon() as memory:
        for number in range(4):
            await memory.register(device=f"gpu{number}")
        for number in (1, 3):
            await memory.allocate(wanted("block", number * KIB), device=f"w0/gpu{number}")
        families = {family.name: family for family in MemoryCollector(memory.service.table).collect()}
        pressure = families["forged_memory_pressure"]
        assert [sample.labels["device"] for sample in pressure.samples] == ["w0/gpu3", "w0/gpu1"]
        assert families["forged_memory_devices"].samples[0].value == 4
