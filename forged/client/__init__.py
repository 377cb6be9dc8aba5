"""The client library: `ForgedClient` (asyncio), `BlockingClient` (no event loop), `ElasticWorker` (training)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forged.client.blocking import BlockingClient, BlockingFacts
from forged.client.client import EARLIEST, ForgedClient
from forged.client.stream import FactStream

if TYPE_CHECKING:
    from forged.worker.worker import ElasticWorker

__all__ = ["EARLIEST", "BlockingClient", "BlockingFacts", "ElasticWorker", "FactStream", "ForgedClient"]


def __getattr__(name: str) -> Any:
    # Imported on demand: clients do not need numpy.
    if name == "ElasticWorker":
        from forged.worker.worker import ElasticWorker

        return ElasticWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
