"""The client library: `ForgedClient` (asyncio), `BlockingClient` (no event loop), `ElasticWorker` (training),
`DeviceMemory` and
`BlockingDeviceMemory` (GPU memory)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forged.client.blocking import BlockingClient, BlockingFacts
from forged.client.client import EARLIEST, ForgedClient
from forged.client.stream import FactStream

if TYPE_CHECKING:
    from forged.client.blocking_device_memory import BlockingDeviceMemory
    from forged.client.device_memory import DeviceMemory
    from forged.worker.worker import ElasticWorker

__all__ = [
    "EARLIEST",
    "BlockingClient",
    "BlockingDeviceMemory",
    "BlockingFacts",
    "DeviceMemory",
    "ElasticWorker",
    "FactStream",
    "ForgedClient",
]


def __getattr__(name: str) -> Any:
    # Imported on demand: other clients start faster, and do not need numpy.
    if name == "BlockingDeviceMemory":
        from forged.client.blocking_device_memory import BlockingDeviceMemory

        return BlockingDeviceMemory
    if name == "DeviceMemory":
        from forged.client.device_memory import DeviceMemory

        return DeviceMemory
    if name == "ElasticWorker":
        from forged.worker.worker import ElasticWorker

        return ElasticWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
