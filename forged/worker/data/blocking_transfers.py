"""Moving shards to a worker from a script without an event loop.

Law: there is no second implementation: the worker's own transfers do it, on the worker's loop, and the script waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from forged.data.model import DataShard
from forged.data.placement.plan import DataRedistributionPlan
from forged.data.transfer.manager import DataTransferManager
from forged.data.transfer.outcome import MovedShard, TransferReport
from forged.data.transfer.schedule import Source
from forged.elastic.model import WorkerId


class BlockingTransfers:
    """The transfers of one worker; `run` does something on its loop."""

    def __init__(self, find: Callable[[], DataTransferManager], run: Callable[..., Any]) -> None:
        self._find = find
        self._run = run

    def execute_plan(self, plan: DataRedistributionPlan) -> TransferReport:
        """Move to this worker what the plan gives it."""
        report: TransferReport = self._run(self._find().execute_plan, plan)
        return report

    def transfer_data_shards(
        self, source: Source, destination: WorkerId, shard: DataShard, *, replicas: Sequence[WorkerId] = ()
    ) -> MovedShard | None:
        """Move one shard to this worker; None if it was here already."""
        move = partial(self._find().transfer_data_shards, replicas=replicas)
        moved: MovedShard | None = self._run(move, source, destination, shard)
        return moved
