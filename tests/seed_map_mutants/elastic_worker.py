"""Mutants of the rows of elastic_worker_core.md."""

from __future__ import annotations

from collections.abc import Mapping

from tests.seed_map_mutants.mutation import Constant, Edit, Mutation

WORKER = "forged/worker/worker.py"
SESSION = "forged/worker/session.py"
REGISTRATION = "forged/worker/registration.py"
RESCALER = "forged/worker/rescaler.py"
PROGRESS = "forged/worker/worker_state/progress.py"
SESSION_STATE = "forged/worker/worker_state/session_state.py"
PLAN = "forged/data/placement/plan.py"
SHARD = "forged/data/model.py"

STATE_MANAGEMENT = (
    "State Management: Worker maintains its local state (topology, training state) that gets updated during rescaling"
)

MUTANTS: Mapping[str, Mutation | str] = {
    "class ElasticWorker": Edit(
        "forged/worker/steps/step_loop.py",
        "total is not None and progress.step >= total",
        "total is not None and progress.step + 1 >= total",
    ),
    "ElasticWorker.RescalingRequested": Edit(
        WORKER, "self._events.rescaling_requested.fire(event)", "self._events.rescaling_requested"
    ),
    "ElasticWorker.StateSynchronized": Edit(
        WORKER, "self._events.state_synchronized.fire(state)", "self._events.state_synchronized"
    ),
    "ElasticWorker.WorkerId": Edit(
        WORKER, "return self._state.worker\n", 'return WorkerId(self._state.worker.id, "", 0)\n'
    ),
    "ElasticWorker.CurrentTopology": Edit(WORKER, "return topology if topology.workers else None", "return None"),
    "ElasticWorker.CurrentState": Edit(
        WORKER, "self._progress.training_state(self.world_size,", "self._progress.training_state(1,"
    ),
    "ElasticWorker.IsRescaling": Edit(
        WORKER,
        "return view.rescaling or view.committed is not None or self._status is WorkerStatus.RESCALING",
        "return self._status is WorkerStatus.FAILED",
    ),
    "ElasticWorker.ElasticWorker(workerId, config)": Edit(
        WORKER,
        "if isinstance(worker_id, str) else worker_id\n",
        'if isinstance(worker_id, str) else WorkerId(worker_id.id, "", 0)\n',
    ),
    "ElasticWorker.ConnectToCluster(coordinatorAddress)": Edit(WORKER, '"worker_connected"', '"worker_unconnected"'),
    "ElasticWorker.DisconnectAsync()": Edit(
        WORKER,
        "connection is not None and not self.process.is_forked:",
        "connection is not None and self.process.is_forked:",
    ),
    "ElasticWorker.OnRescalingEventAsync(evt)": Edit(
        WORKER, "        await self.update_topology(event.new_topology)\n", ""
    ),
    "ElasticWorker.UpdateTopologyAsync(newTopology)": Edit(
        WORKER, "current_world.take_rank(topology)", "current_world.come_to(topology)"
    ),
    "ElasticWorker.SynchronizeStateAsync(state)": Edit(WORKER, "        self._progress.apply(state)\n", ""),
    "ElasticWorker.ResumeTrainingAsync()": Edit(
        SESSION_STATE, "            self.status = WorkerStatus.ACTIVE\n", "            pass\n"
    ),
    "ElasticWorker.RedistributeDataAsync(plan)": Edit(
        WORKER, "await self.transfers.execute_plan(plan)", "await self.transfers.execute([])"
    ),
    "ElasticWorker.UpdateTrainingState(epoch, step, learningRate)": Edit(
        WORKER, "if goes_back or (step != self.step and", "if goes_back or (step < self.step and"
    ),
    "ElasticWorker.ShouldHandleShard(shardIndex, totalShards)": Edit(
        WORKER, "shard_index % self.world_size == self.rank", "shard_index == self.rank"
    ),
    "ElasticWorker.GetMetadata()": Edit(WORKER, "attributes=dict(attributes or {})", "attributes=attributes or {}"),
    "ElasticWorker.StartHeartbeat()": Edit(
        "forged/elastic/config.py", "HEARTBEATS_PER_TIMEOUT = 3", "HEARTBEATS_PER_TIMEOUT = 2"
    ),
    "ElasticWorker.StopHeartbeat()": Edit(
        SESSION,
        "self._tasks.start_soon(self._heartbeat.run)",
        '__import__("asyncio").ensure_future(self._heartbeat.run())',
    ),
    "ElasticWorker.SendHeartbeat()": Edit(
        REGISTRATION,
        "            self.beat_now()\n            with anyio",
        "            self.beat_now()\n            self.beat_now()\n            with anyio",
    ),
    "ElasticWorker.Dispose()": Edit(
        WORKER, '"""Leave. Idempotent."""\n        await self.disconnect()', '"""Leave. Idempotent."""\n'
    ),
    "class DataRedistributionPlan": Edit(PLAN, "            given.owners,\n", "            given.owners_before,\n"),
    "DataRedistributionPlan.Transfers = new()": Edit(
        PLAN, "View(np.arange(self.columns.shards.size)", "View(np.arange(self.columns.shards.size - 1)"
    ),
    "DataRedistributionPlan.WorkerAssignments = new()": Edit(
        PLAN,
        "self.workers[: self.world_size], self.owners[np.newaxis]",
        "self.workers[: self.world_size], self.owners[np.newaxis, 1:]",
    ),
    "DataRedistributionPlan.TotalShards": Edit(PLAN, "return self.dataset.shards\n", "return self.dataset.samples\n"),
    "record DataTransfer": Edit(
        SHARD, "source_kind: SourceKind = SourceKind.OWNER", "source_kind: SourceKind = SourceKind.ORIGIN"
    ),
    "DataTransfer.SourceWorker = null!": Edit(
        PLAN, "source_worker=None if source == NOBODY else self.workers[source]", "source_worker=self.workers[source]"
    ),
    "DataTransfer.DestinationWorker = null!": Constant(SHARD, "DataTransfer.destination_worker", "self.source_worker"),
    "DataTransfer.Shard = null!": Constant(SHARD, "DataTransfer.shard", "None"),
    "DataTransfer.Priority": Constant(SHARD, "DataTransfer.priority", "0"),
    "DataTransfer.EstimatedCompletionTime": Edit(
        PLAN, "np.maximum(taken, given / self.lanes)", "np.minimum(taken, given / self.lanes)"
    ),
    "Used, not declared.ElasticCoordinator": Edit(
        "forged/elastic/service.py",
        "serve(ResumeJob, lambda request, call: self._control(request, JobCoordinator.resume)",
        "serve(ResumeJob, lambda request, call: self._control(request, JobCoordinator.pause)",
    ),
    STATE_MANAGEMENT: Edit(RESCALER, "        await self._exchange.take(settled)\n", ""),
    "Heartbeat: Periodic timer sends heartbeats to coordinator to maintain liveness": Edit(
        "forged/elastic/config.py",
        "return self.worker_heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT",
        "return self.worker_heartbeat_timeout_s",
    ),
    "Event-Driven: Uses C# events to notify external code of rescaling requests and state synchronization": Edit(
        "forged/worker/events.py", "self._discard(subscriber(value))", "self._discard(None)"
    ),
    "Graceful Shutdown: Supports clean disconnection and cleanup": Edit(
        SESSION,
        "    async with (\n        _connected(client, spec.log),\n",
        "    socket.socket().detach()\n    async with (\n        _connected(client, spec.log),\n",
    ),
    "Synchronous/Asynchronous: Supports both modes based on configuration": Edit(
        "forged/elastic/coordinator/rescaling.py",
        "and not (must_stop or with_data):",
        "and not (job.config.min_workers or with_data):",
    ),
    "Worker can connect to coordinator and register successfully": Edit(
        SESSION,
        "self._is_registered, self._may_be_known = True, False",
        "self._is_registered, self._may_be_known = False, True",
    ),
    "Heartbeat mechanism updates timestamp correctly": Edit(
        REGISTRATION, "        current_world.heartbeat_at = self._clock.wall()\n", ""
    ),
    "Rescaling events trigger appropriate notifications": Edit(
        RESCALER, "self._clock.wall(), commit.reason)", 'self._clock.wall(), "")'
    ),
    "State synchronization updates local state correctly": Edit(
        PROGRESS, "global_batch_size or self.global_batch_size)", "self.global_batch_size)"
    ),
    "Graceful disconnection works properly": Edit(
        SESSION, 'await session.leave("it was disconnected")', 'await session.leave("it was lost")'
    ),
    "All public events are fired with appropriate data": Edit(
        RESCALER, "            topology.world_size,\n", "            commit.before.world_size,\n"
    ),
    "Thread safety is maintained during rescaling operations": Edit(
        SESSION_STATE,
        "        self.topology = topology\n",
        '        self.topology = ClusterTopology((*topology.workers, WorkerId("other", "", 1)), topology.epoch)\n'
        '        __import__("time").sleep(0.01)\n'
        "        self.topology = topology\n",
    ),
}
