"""The requests of the daemon as typed methods.

Each method is one request, or one per page of a list. Types about training data and checkpoints are imported only by
the methods that use them, so that clients start faster.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from forged.auth.messages import CreateToken, ListTokens, RevokeToken, TokenView
from forged.auth.model import Role
from forged.auth.tokens import SECRET_BYTES_MIN, encode_token
from forged.clock import Clock
from forged.config.messages import ConfigView, ReloadConfig, Reloaded, ShowConfig
from forged.elastic.messages import (
    AbortJob,
    ClusterView,
    ControlReply,
    DrainReply,
    DrainWorker,
    EvictWorker,
    ListClusters,
    ListWorkers,
    PauseJob,
    PlanRescale,
    ReopenJob,
    RescaleJob,
    RescalePlan,
    ResumeJob,
    ShowCluster,
    ShowWorker,
    WorkerView,
)
from forged.errors import Unavailable
from forged.jobs.model import AddNote, ChangeJob, CreateJob, Job, ListJobs, RemoveJob, SettingValue, ShowJob
from forged.kernel.messages import Fence, Record, Request
from forged.plugins.model import DisablePlugin, EnablePlugin, ListPlugins, PluginView, RunPluginCommand
from forged.status.model import HandlerView, ListHandlers, PingDaemon, ReadmitHandler, ReadStatus, Status, TellStory

if TYPE_CHECKING:
    from forged.catalog.messages import (
        AdoptedCheckpoint,
        Adoption,
        CheckpointView,
        Collection,
        RestorePoints,
        RetentionVerdict,
    )
    from forged.catalog.model import CheckpointMeta
    from forged.data.messages import AuditView, DataView, TransfersView, TransferTotals
    from forged.host.messages import SlotView
    from forged.metrics.messages import TrainingView, WorkerStacks

R = TypeVar("R")

WISH = "a client's wish"
"""The recorded reason if none is given."""


class DaemonMethods:
    """All requests as typed methods; a subclass sends them."""

    def __init__(self, clock: Clock, source: random.Random) -> None:
        self._clock = clock
        self._source = source

    async def request(self, request: Request[R], *, timeout_s: float | None = None, fence: Fence | None = None) -> R:
        """Send a request and return its reply."""
        raise NotImplementedError

    async def ping(self) -> float:
        """The round trip to the daemon's bus in seconds."""
        started = self._clock.monotonic()
        await self.request(PingDaemon())
        return self._clock.monotonic() - started

    async def status(self) -> Status:
        """The daemon's status."""
        return await self.request(ReadStatus())

    async def story(self, fact_id: int) -> list[Record]:
        """A fact with its causes and consequences."""
        return [Record.read(raw) for raw in await self.request(TellStory(fact_id))]

    async def handlers(self) -> list[HandlerView]:
        """All handlers on the daemon's bus, with their counters."""
        return await self.request(ListHandlers())

    async def readmit_handler(self, handler: str) -> None:
        """Re-enable a quarantined handler."""
        await self.request(ReadmitHandler(handler))

    async def plugins(self) -> list[PluginView]:
        """All plugins that the daemon has found."""
        return await self.request(ListPlugins())

    async def enable_plugin(self, plugin: str) -> None:
        """Enable a plugin, also after a quarantine."""
        await self.request(EnablePlugin(plugin))

    async def disable_plugin(self, plugin: str) -> None:
        """Disable a plugin until it is enabled or the daemon restarts."""
        await self.request(DisablePlugin(plugin))

    async def run_plugin_command(self, plugin: str, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Run a command of a plugin and return its result."""
        return await self.request(RunPluginCommand(plugin, command, dict(arguments or {})))

    async def config(self) -> ConfigView:
        """The daemon's settings."""
        return await self.request(ShowConfig())

    async def reload_config(self) -> Reloaded:
        """Reload the daemon's configuration file."""
        return await self.request(ReloadConfig())

    async def create_job(self, job: str, settings: Mapping[str, SettingValue] | None = None) -> Job:
        """Create a job, or return the existing one; refused if that one has other settings."""
        return await self.request(CreateJob(job, dict(settings or {})))

    async def change_job(self, job: str, settings: Mapping[str, SettingValue], version: int) -> Job:
        """Replace a job's settings if it is at this version."""
        return await self.request(ChangeJob(job, dict(settings), version))

    async def job(self, job: str) -> Job:
        """One job."""
        return await self.request(ShowJob(job))

    async def jobs(self) -> list[Job]:
        """All jobs that this client may see, by name."""
        jobs: list[Job] = []
        more = True
        while more:
            page = await self.request(ListJobs(jobs[-1].name if jobs else ""))
            jobs += page.jobs
            more = page.more
        return jobs

    async def remove_job(self, job: str, *, force: bool = False) -> None:
        """Remove a job. A missing job is no error; a job with workers is refused without `force`."""
        await self.request(RemoveJob(job, force))

    async def note(self, job: str, text: str) -> None:
        """Add a note to a job's history."""
        await self.request(AddNote(job, text))

    async def workers(self, job: str) -> list[WorkerView]:
        """All workers of a job, by id; refused before the first worker joins."""
        workers: list[WorkerView] = []
        more = True
        while more:
            page = await self.request(ListWorkers(job, workers[-1].id if workers else ""))
            workers += page.workers
            more = page.more
        return workers

    async def worker(self, job: str, worker_id: str) -> WorkerView:
        """One worker of a job."""
        return await self.request(ShowWorker(job, worker_id))

    async def cluster(self, job: str) -> ClusterView:
        """The state of a job's training, with the rescale in progress."""
        return await self.request(ShowCluster(job))

    async def clusters(self) -> list[ClusterView]:
        """The state of the training of all visible jobs that a worker has joined, by job name."""
        clusters: list[ClusterView] = []
        more = True
        while more:
            page = await self.request(ListClusters(clusters[-1].job if clusters else ""))
            clusters += page.clusters
            more = page.more
        return clusters

    async def drain_worker(self, job: str, worker_id: str, reason: str = WISH) -> DrainReply:
        """Drain a worker after its current step; the reply has remarks about possible consequences."""
        return await self.request(DrainWorker(job, worker_id, reason))

    async def evict_worker(self, job: str, worker_id: str, reason: str = WISH) -> None:
        """Evict a worker: treat it as failed."""
        await self.request(EvictWorker(job, worker_id, reason))

    async def read_training(self, job: str) -> TrainingView:
        """A job's training metrics: logged values, rates, times of each worker, goodput."""
        from forged.metrics.messages import ReadTraining

        return await self.request(ReadTraining(job))

    async def worker_stacks(self, job: str, worker_id: str) -> WorkerStacks:
        """The Python stacks of all threads of a worker's process."""
        from forged.metrics.messages import ReadStacks

        return await self.request(ReadStacks(job, worker_id))

    async def pause_job(self, job: str, reason: str = WISH) -> ControlReply:
        """Pause training after the current step."""
        return await self.request(PauseJob(job, reason))

    async def resume_job(self, job: str, reason: str = WISH) -> ControlReply:
        """Resume paused training."""
        return await self.request(ResumeJob(job, reason))

    async def abort_job(self, job: str, reason: str = WISH) -> ControlReply:
        """Abort training; all workers of the job end."""
        return await self.request(AbortJob(job, reason))

    async def reopen_job(self, job: str, reason: str = WISH) -> ControlReply:
        """Let an aborted job accept workers again; refused for a job that is not aborted."""
        return await self.request(ReopenJob(job, reason))

    async def rescale_job(self, job: str, reason: str = WISH) -> ControlReply:
        """Start a rescale now with the workers that have joined."""
        return await self.request(RescaleJob(job, reason))

    async def plan_rescale(self, job: str, workers: int) -> RescalePlan:
        """The effects of a rescale to `workers` workers; nothing is changed."""
        return await self.request(PlanRescale(job, workers))

    async def show_data(self, job: str) -> DataView:
        """A job's dataset and the shards of each worker."""
        from forged.data.messages import ShowData

        return await self.request(ShowData(job))

    async def shard_owners(self, job: str) -> list[str]:
        """The id of the owner of each shard of a job; empty for a shard without owner."""
        from forged.data.messages import ReadOwners

        page = await self.request(ReadOwners(job))
        generation, workers, places = page.generation, page.workers, _decoded_owners(page.owners)
        while page.more:
            page = await self.request(ReadOwners(job, len(places)))
            if page.generation != generation:
                raise Unavailable(
                    "generation_over", f"the shard owners of job {job} changed during the request", "try again"
                )
            places += _decoded_owners(page.owners)
        return [workers[place].id if place >= 0 else "" for place in places]

    async def transfers(self, job: str) -> TransfersView:
        """The progress of the current or latest shard transfers."""
        from forged.data.messages import ShowTransfers

        return await self.request(ShowTransfers(job))

    async def slots(self, job: str = "") -> list[SlotView]:
        """The slots of a job, or of all visible jobs."""
        from forged.host.messages import ListSlots

        page = await self.request(ListSlots(job))
        found = page.slots
        while page.more:
            page = await self.request(ListSlots(job, found[-1].slot_id))
            found += page.slots
        return found

    async def audit_data(self, job: str, epoch: int | None = None) -> AuditView:
        """The audit of an epoch, by default of the latest one: whether each sample was used exactly once."""
        from forged.data.messages import AuditData

        return await self.request(AuditData(job, epoch))

    async def plan_data(self, job: str, workers: Sequence[str], gone: Sequence[str] = ()) -> TransferTotals:
        """The transfers to a world of these workers, by rank, if the `gone` workers have failed; nothing is changed."""
        from forged.data.messages import PlanData

        return await self.request(PlanData(job, list(workers), tuple(gone)))

    async def checkpoints(self, job: str) -> list[CheckpointMeta]:
        """All checkpoints of a job, the newest first."""
        from forged.catalog.messages import ListCheckpoints

        page = await self.request(ListCheckpoints(job))
        found = page.checkpoints
        while page.more:
            page = await self.request(ListCheckpoints(job, found[-1].checkpoint_id))
            found += page.checkpoints
        return found

    async def checkpoint(self, job: str, checkpoint_id: str) -> CheckpointView:
        """One checkpoint, with what it depends on, and whether and why it is kept."""
        from forged.catalog.messages import ShowCheckpoint

        return await self.request(ShowCheckpoint(job, checkpoint_id))

    async def restore_points(
        self,
        job: str,
        *,
        folder: str = "",
        max_epoch: int | None = None,
        max_step: int | None = None,
        require_complete: bool = True,
        prefer_full: bool = False,
        limit: int = 100,
    ) -> RestorePoints:
        """What a job can be restored from, the best first, and what is not offered, with reasons."""
        from forged.catalog.messages import FindRestorePoints

        return await self.request(
            FindRestorePoints(job, folder, max_epoch, max_step, require_complete, prefer_full, limit)
        )

    async def pin_checkpoint(self, job: str, checkpoint_id: str) -> CheckpointMeta:
        """Keep a checkpoint regardless of any policy."""
        from forged.catalog.messages import PinCheckpoint

        return await self.request(PinCheckpoint(job, checkpoint_id))

    async def unpin_checkpoint(self, job: str, checkpoint_id: str) -> CheckpointMeta:
        """Leave a checkpoint to the retention policy again."""
        from forged.catalog.messages import UnpinCheckpoint

        return await self.request(UnpinCheckpoint(job, checkpoint_id))

    async def reinstate_checkpoint(self, job: str, checkpoint_id: str, reason: str = "") -> CheckpointMeta:
        """Offer an abandoned checkpoint again."""
        from forged.catalog.messages import ReinstateCheckpoint

        return await self.request(ReinstateCheckpoint(job, checkpoint_id, reason))

    async def retention(self, job: str) -> list[RetentionVerdict]:
        """What a collection would do now with each checkpoint of a job, the newest first; nothing is changed."""
        from forged.catalog.messages import ReadRetention

        page = await self.request(ReadRetention(job))
        found = page.verdicts
        while page.more:
            page = await self.request(ReadRetention(job, found[-1].checkpoint_id))
            found += page.verdicts
        return found

    async def collect_checkpoints(self, job: str) -> Collection:
        """Collect what the retention policy does not keep, now."""
        from forged.catalog.messages import CollectCheckpoints, Collection

        collected: list[RetentionVerdict] = []
        more = True
        while more:
            part = await self.request(CollectCheckpoints(job))
            collected += part.collected
            more = part.more
        return Collection(collected, sum(one.size_bytes for one in collected))

    async def delete_checkpoint(self, job: str, checkpoint_id: str) -> None:
        """Delete one checkpoint that no other one, nor a pin or a holder, needs."""
        from forged.catalog.messages import DeleteCheckpoint

        await self.request(DeleteCheckpoint(job, checkpoint_id))

    async def compact_checkpoint(self, job: str, checkpoint_id: str) -> None:
        """Make a full checkpoint of an incremental one, in the background."""
        from forged.catalog.messages import CompactCheckpoint

        await self.request(CompactCheckpoint(job, checkpoint_id))

    async def adopt_checkpoints(self, job: str, folder: str, checkpoints: Sequence[AdoptedCheckpoint]) -> Adoption:
        """Add existing checkpoints to the catalogue; parents before their children, at most 1000."""
        from forged.catalog.messages import AdoptCheckpoints

        return await self.request(AdoptCheckpoints(job, folder, list(checkpoints)))

    async def create_token(
        self, name: str, role: Role, *, jobs: Sequence[str] | None = None, ttl_s: float | None = None
    ) -> str:
        """Create a token and return its text, which cannot be retrieved later."""
        secret = self._source.randbytes(SECRET_BYTES_MIN)
        await self.request(CreateToken(name, role, secret, None if jobs is None else tuple(jobs), ttl_s))
        return encode_token(secret)[1]

    async def tokens(self) -> list[TokenView]:
        """All valid tokens and the latest expired and revoked ones, oldest first."""
        tokens: list[TokenView] = []
        more = True
        while more:
            page = await self.request(ListTokens(tokens[-1].token_id if tokens else ""))
            tokens += page.tokens
            more = page.more
        return sorted(tokens, key=lambda token: token.created_at)

    async def revoke_token(self, token_id: str) -> TokenView:
        """Revoke a token."""
        return await self.request(RevokeToken(token_id))


def _decoded_owners(owners: bytes) -> array[int]:
    """int32, little-endian."""
    places = array("i", owners)
    if sys.byteorder == "big":
        places.byteswap()
    return places
