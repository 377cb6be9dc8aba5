"""The Prometheus metrics of GPU memory.

Invariants:
- A scrape takes time for each device, not for each block.
- At most `DEVICES_MAX` devices have labels: those with the highest pressure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forged.memory.book.device import Device
from forged.memory.book.device_table import DeviceTable

DEVICES_MAX = 100
SHOWN: Sequence[tuple[str, str, Callable[[Device], float]]] = (
    ("forged_memory_capacity_bytes", "Bytes of the device", lambda device: device.core.total),
    ("forged_memory_used_bytes", "Bytes of all blocks, cached ones too", lambda device: device.used_bytes),
    ("forged_memory_cached_bytes", "Bytes of blocks that may be evicted", lambda device: device.core.cached_bytes),
    ("forged_memory_free_bytes", "Bytes of no block", lambda device: device.core.free_bytes),
    ("forged_memory_largest_hole_bytes", "The largest free stretch", lambda device: device.core.holes.largest_size()),
    ("forged_memory_blocks", "Blocks of the device", lambda device: len(device.core)),
    ("forged_memory_waiting", "Requests that wait for memory of the device", lambda device: len(device.queue)),
    ("forged_memory_pressure", "The share of bytes that cannot be evicted", lambda device: device.pressure),
)
"""Of each device that is shown: the name of the metric, its meaning and its value."""


class MemoryCollector(Collector):
    """Collects the metrics about the devices of all jobs."""

    def __init__(self, table: DeviceTable) -> None:
        self._table = table

    def collect(self) -> Iterable[Metric]:
        counts = self._table.counts
        for name, text, value in (
            ("forged_memory_allocations", "Blocks that were allocated", counts.allocations),
            ("forged_memory_evictions", "Cached blocks that gave way", counts.evictions),
            ("forged_memory_out_of_memory", "Requests that did not fit", counts.out_of_memory),
            ("forged_memory_compaction_moves", "Moves of compactions that were committed", counts.moves),
        ):
            yield CounterMetricFamily(name, text, value=value)
        devices = list(self._table.devices())
        yield GaugeMetricFamily("forged_memory_devices", "Registered devices", value=len(devices))
        shown = nlargest(DEVICES_MAX, devices, key=lambda device: device.pressure)
        for name, text, measure in SHOWN:
            family = GaugeMetricFamily(name, text, labels=["job", "device"])
            for device in shown:
                family.add_metric([device.owner.job, device.name], measure(device))
            yield family
