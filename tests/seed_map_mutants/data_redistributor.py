"""Mutants of the rows of data_redistributor.md."""

from __future__ import annotations

from collections.abc import Mapping

from tests.seed_map_mutants.mutation import Edit, Mutation

PLANNER = "forged/data/placement/planner.py"
PLAN = "forged/data/placement/plan.py"
VALIDATION = "forged/data/placement/validation.py"
MANAGER = "forged/data/transfer/manager.py"

MUTANTS: Mapping[str, Mutation | str] = {
    "class DataRedistributor": Edit(
        PLANNER, "owners = deal(shares.settled())", "owners = np.random.permutation(deal(shares.settled()))"
    ),
    "DataRedistributor.DataRedistributor(config)": Edit(PLANNER, "        config.validate()\n", ""),
    "DataRedistributor.CalculatePlan(oldState, newState, totalDatasetSize)": Edit(
        PLANNER, "            owners=owners,\n", "            owners=before.copy(),\n"
    ),
    "DataRedistributor.TransferDataShardsAsync(source, destination, shard)": Edit(
        MANAGER, "return report.moved[0] if report.moved else None", "return None"
    ),
    "DataRedistributor.ValidateRedistribution(state, plan)": Edit(
        PLANNER, "return self.examine_redistribution(topology, plan, draining=draining).is_valid", "return True"
    ),
    "DataRedistributor.CalculateFullReshufflePlan(oldState, newState, totalDatasetSize, plan)": Edit(
        PLANNER, "owners = deal(shares.settled())", "owners = np.sort(deal(shares.settled()))"
    ),
    "DataRedistributor.CalculateIncrementalPlan(oldState, newState, totalDatasetSize, plan)": Edit(
        PLANNER,
        "self._config.redistribution_type == RedistributionType.FULL_RESHUFFLE",
        "self._config.redistribution_type == RedistributionType.INCREMENTAL",
    ),
    "DataRedistributor.CalculateShardSize(totalSize, workerCount, index)": Edit(
        "forged/data/model.py", "start + size + (shard_id < larger)", "start + size + (shard_id == 0) * larger"
    ),
    "DataRedistributor.CalculateTransferPriority(shardIndex, totalShards)": Edit(
        PLAN, "return first - self.columns.shards", "return first + self.columns.shards"
    ),
    "class DataTransferManager": Edit(
        MANAGER,
        "for transfer in plan.for_worker(self.worker):",
        "for transfer in list(plan.for_worker(self.worker))[1:]:",
    ),
    "DataTransferManager.DataTransferManager(maxConcurrentTransfers = 4)": Edit(
        MANAGER, "max_concurrent_transfers: int = 4", "max_concurrent_transfers: int = 5"
    ),
    "DataTransferManager.ExecutePlanAsync(plan, cancellationToken = default)": Edit(
        MANAGER, "yield Wanted(transfer.shard, transfer.priority,", "yield Wanted(transfer.shard, -transfer.priority,"
    ),
    "DataTransferManager.TransferDataShardAsync(transfer, cancellationToken)": Edit(
        "forged/worker/data/shard_protocol.py",
        "offset = wanted.offset if is_resumed else 0",
        "offset = 0",
    ),
    "FullReshuffle: Recalculates all shard assignments, potentially moving all data": Edit(
        PLANNER, "return owners, np.flatnonzero(before != owners)", "return owners, np.arange(owners.size)"
    ),
    "Incremental: Only moves data that needs to change, faster but may have temporary imbalance": Edit(
        PLANNER, "targets = shares.settled(held > shares.least)", "targets = shares.settled()"
    ),
    "Shard Calculation: Uses modulo-based sharding to distribute data evenly across workers": Edit(
        "forged/data/columns.py",
        "dealt[:rounds].reshape(fewest, takers.size)[:] = takers",
        "dealt[:rounds].reshape(fewest, takers.size)[:] = takers[::-1]",
    ),
    "Transfer Prioritization: Higher priority given to shards that appear earlier in training sequence": Edit(
        PLAN, "first = (1 - self.columns.copies.astype(np.int64)) * self.total_shards", "first = self.total_shards"
    ),
    "Parallel Execution: Supports concurrent transfers with configurable limit for better throughput": Edit(
        MANAGER,
        "concurrency = transfers if use_parallel_data_transfer else 1",
        "concurrency = min(transfers, 4) + (transfers == 3)",
    ),
    "Validation: Ensures all workers have the correct number of shards after redistribution": Edit(
        VALIDATION, "np.flatnonzero((held < least) | (held > most)),", "np.flatnonzero(held < least),"
    ),
    "Full reshuffle correctly redistributes all shards across new topology": Edit(
        PLANNER, "owners = deal(shares.settled())", "owners = deal(shares.settled())[::-1].copy()"
    ),
    "Incremental redistribution only moves necessary shards": Edit(
        PLANNER, "owners.view(np.uint32) >= world", "owners.view(np.uint32) >= 0"
    ),
    "Transfer priorities are calculated correctly": Edit(
        PLAN, "return first - self.columns.shards", "return first - self.columns.shards // 2"
    ),
    "Parallel transfer execution respects concurrency limit": Edit(
        "forged/data/transfer/execution.py",
        "TransferSchedule(missing, context.concurrency,",
        "TransferSchedule(missing, context.concurrency + 1,",
    ),
    "Validation correctly identifies incomplete redistributions": Edit(
        VALIDATION, "np.flatnonzero(needed & (times == 0)),", "np.flatnonzero(needed & (times < 0)),"
    ),
    "All methods handle edge cases (empty topologies, single worker, etc.)": Edit(
        PLANNER, "if dataset.shards and not new.world_size:", "if not new.world_size:"
    ),
}
