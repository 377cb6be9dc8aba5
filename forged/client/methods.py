"""What the daemon does, as methods.

Law: each method is one request and its reply, without a decision of its own; a list is as many as it has pages. Who
asks nothing about training data waits for none of its imports.
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
    from forged.data.messages import AuditView, DataView, TransfersView, TransferTotals

R = TypeVar("R")

WISH = "a client's wish"
"""The reason that is put on record where none is given."""


class DaemonMethods:
    """Everything that can be asked of a daemon, typed; who inherits it knows how to ask."""

    def __init__(self, clock: Clock, source: random.Random) -> None:
        self._clock = clock
        self._source = source

    async def request(self, request: Request[R], *, timeout_s: float | None = None, fence: Fence | None = None) -> R:
        """Have a request done, and return its reply."""
        raise NotImplementedError

    async def ping(self) -> float:
        """How many seconds it takes to the daemon's bus and back."""
        started = self._clock.monotonic()
        await self.request(PingDaemon())
        return self._clock.monotonic() - started

    async def status(self) -> Status:
        """How the daemon is."""
        return await self.request(ReadStatus())

    async def story(self, fact_id: int) -> list[Record]:
        """A fact between its causes and its consequences."""
        return [Record.read(raw) for raw in await self.request(TellStory(fact_id))]

    async def handlers(self) -> list[HandlerView]:
        """Every handler on the daemon's bus, in numbers."""
        return await self.request(ListHandlers())

    async def readmit_handler(self, handler: str) -> None:
        """Give a quarantined handler facts again."""
        await self.request(ReadmitHandler(handler))

    async def plugins(self) -> list[PluginView]:
        """Every plugin that the daemon has found."""
        return await self.request(ListPlugins())

    async def enable_plugin(self, plugin: str) -> None:
        """Let a plugin take part again."""
        await self.request(EnablePlugin(plugin))

    async def disable_plugin(self, plugin: str) -> None:
        """Leave a plugin out until it is enabled, or the daemon starts anew."""
        await self.request(DisablePlugin(plugin))

    async def run_plugin_command(self, plugin: str, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Have a plugin do what one of its commands says."""
        return await self.request(RunPluginCommand(plugin, command, dict(arguments or {})))

    async def config(self) -> ConfigView:
        """The daemon's settings."""
        return await self.request(ShowConfig())

    async def reload_config(self) -> Reloaded:
        """Have the daemon read its settings anew."""
        return await self.request(ReloadConfig())

    async def create_job(self, job: str, settings: Mapping[str, SettingValue] | None = None) -> Job:
        """Create a job, or get the one that exists; refused when that one has other settings."""
        return await self.request(CreateJob(job, dict(settings or {})))

    async def change_job(self, job: str, settings: Mapping[str, SettingValue], version: int) -> Job:
        """Replace a job's settings if it is still at this version."""
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
        """Remove a job; one that does not exist is no error, one that has workers is refused without `force`."""
        await self.request(RemoveJob(job, force))

    async def note(self, job: str, text: str) -> None:
        """Put a remark on a job's record."""
        await self.request(AddNote(job, text))

    async def workers(self, job: str) -> list[WorkerView]:
        """All workers of a job, by id; refused while none has ever joined it."""
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
        """Where a job's training is, and the rescale that is under way."""
        return await self.request(ShowCluster(job))

    async def clusters(self) -> list[ClusterView]:
        """Where the training of all jobs is that this client may see and a worker has joined, by the job's name."""
        clusters: list[ClusterView] = []
        more = True
        while more:
            page = await self.request(ListClusters(clusters[-1].job if clusters else ""))
            clusters += page.clusters
            more = page.more
        return clusters

    async def drain_worker(self, job: str, worker_id: str, reason: str = WISH) -> DrainReply:
        """Have a worker finish its step and go; returns what may come of it that was not wanted."""
        return await self.request(DrainWorker(job, worker_id, reason))

    async def evict_worker(self, job: str, worker_id: str, reason: str = WISH) -> None:
        """Count a worker as dead."""
        await self.request(EvictWorker(job, worker_id, reason))

    async def pause_job(self, job: str, reason: str = WISH) -> ControlReply:
        """Let a job's training rest behind its step."""
        return await self.request(PauseJob(job, reason))

    async def resume_job(self, job: str, reason: str = WISH) -> ControlReply:
        """Let a job's training go on."""
        return await self.request(ResumeJob(job, reason))

    async def abort_job(self, job: str, reason: str = WISH) -> ControlReply:
        """Give a job's training up; its workers end."""
        return await self.request(AbortJob(job, reason))

    async def rescale_job(self, job: str, reason: str = WISH) -> ControlReply:
        """Start a rescale now, with whoever is there."""
        return await self.request(RescaleJob(job, reason))

    async def plan_rescale(self, job: str, workers: int) -> RescalePlan:
        """What a rescale to so many workers would do; nothing is done."""
        return await self.request(PlanRescale(job, workers))

    async def show_data(self, job: str) -> DataView:
        """A job's dataset, and what each worker holds of it."""
        from forged.data.messages import ShowData

        return await self.request(ShowData(job))

    async def shard_owners(self, job: str) -> list[str]:
        """The id of the worker that owns each shard of a job; empty where nobody does."""
        from forged.data.messages import ReadOwners

        page = await self.request(ReadOwners(job))
        generation, workers, places = page.generation, page.workers, _places(page.owners)
        while page.more:
            page = await self.request(ReadOwners(job, len(places)))
            if page.generation != generation:
                raise Unavailable("generation_over", f"the shards of job {job} have just got other owners", "ask again")
            places += _places(page.owners)
        return [workers[place].id if place >= 0 else "" for place in places]

    async def transfers(self, job: str) -> TransfersView:
        """How far the training data is that travels now, or that travelled last."""
        from forged.data.messages import ShowTransfers

        return await self.request(ShowTransfers(job))

    async def audit_data(self, job: str, epoch: int | None = None) -> AuditView:
        """Whether each sample of an epoch was used once; of the latest that was begun, if none is named."""
        from forged.data.messages import AuditData

        return await self.request(AuditData(job, epoch))

    async def plan_data(self, job: str, workers: Sequence[str], gone: Sequence[str] = ()) -> TransferTotals:
        """What would have to travel if these were the workers, by rank, and nothing could be had from the `gone`;
        nothing is done."""
        from forged.data.messages import PlanData

        return await self.request(PlanData(job, list(workers), tuple(gone)))

    async def create_token(
        self, name: str, role: Role, *, jobs: Sequence[str] | None = None, ttl_s: float | None = None
    ) -> str:
        """Create a token and return its text, which nobody can tell again."""
        secret = self._source.randbytes(SECRET_BYTES_MIN)
        await self.request(CreateToken(name, role, secret, None if jobs is None else tuple(jobs), ttl_s))
        return encode_token(secret)[1]

    async def tokens(self) -> list[TokenView]:
        """All tokens, oldest first; of those that are accepted no more, the last ones."""
        tokens: list[TokenView] = []
        more = True
        while more:
            page = await self.request(ListTokens(tokens[-1].token_id if tokens else ""))
            tokens += page.tokens
            more = page.more
        return sorted(tokens, key=lambda token: token.created_at)

    async def revoke_token(self, token_id: str) -> TokenView:
        """Accept a token no more."""
        return await self.request(RevokeToken(token_id))


def _places(owners: bytes) -> array[int]:
    """int32, little-endian."""
    places = array("i", owners)
    if sys.byteorder == "big":
        places.byteswap()
    return places
