"""The client library: `ForgedClient` for asyncio, `BlockingClient` for everybody else."""

from forged.client.blocking import BlockingClient, BlockingFacts
from forged.client.client import EARLIEST, ForgedClient
from forged.client.stream import FactStream

__all__ = ["EARLIEST", "BlockingClient", "BlockingFacts", "FactStream", "ForgedClient"]
