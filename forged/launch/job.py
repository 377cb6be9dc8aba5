"""The job of a launch, as its daemon tells it."""

from __future__ import annotations

import os
from collections.abc import Collection
from enum import StrEnum

import anyio

from forged.client import ForgedClient
from forged.elastic.messages import ClusterView, ShowCluster
from forged.elastic.model import WorkerStatus
from forged.elastic.phases import OVER, Phase
from forged.errors import ForgedError

REPLY_TIMEOUT_S = 2.0
"""The launcher goes on without an answer: training needs none."""
REOPENED_WITHIN_S = 60.0
REOPENED_INTERVAL_S = 0.5
REASON = "forged launch starts it again"


class JobRestart(StrEnum):
    """What a launch does with a job that is over."""

    NEVER = "never"
    IF_ABORTED = "if-aborted"
    ALWAYS = "always"


class LaunchedJob:
    """The job, by a client of its daemon."""

    def __init__(self, client: ForgedClient, name: str) -> None:
        self.name = name
        self._client = client
        self._may_rescale = True

    async def view(self) -> ClusterView | None:
        """Its training; None if no worker has joined yet, or without an answer."""
        try:
            return await self._client.request(ShowCluster(self.name), timeout_s=REPLY_TIMEOUT_S)
        except ForgedError:
            return None

    async def is_over(self) -> bool:
        """Whether it takes no more workers; false without an answer."""
        view = await self.view()
        return view is not None and view.phase in OVER

    async def restart(self, policy: JobRestart, *, is_first_host: bool) -> ClusterView | None:
        """Let a job that is over take workers again, as the policy says; returns the view of one that stays over.

        One host does it; the others wait for it.
        """
        view = await self.view()
        if view is None or view.phase not in OVER or not _applies(policy, view.phase):
            return view if view is not None and view.phase in OVER else None
        if not is_first_host:
            with anyio.move_on_after(REOPENED_WITHIN_S):
                while await self.is_over():
                    await anyio.sleep(REOPENED_INTERVAL_S)
                return None
            return view
        if policy is JobRestart.IF_ABORTED:
            await self._client.reopen_job(self.name, REASON)
        else:
            await self._begin_anew()
        return None

    async def _begin_anew(self) -> None:
        """Remove the job and create it with the same settings. Files of checkpoints stay."""
        job = await self._client.job(self.name)
        await self._client.remove_job(self.name, force=True)
        # Workers name the first settings, and get the changed ones.
        first = job.settings if job.created_with is None else job.created_with
        created = await self._client.create_job(self.name, first)
        if job.settings != first:
            await self._client.change_job(self.name, job.settings, created.version)

    async def start_world(self, groups: Collection[int], expected: int, view: ClusterView) -> None:
        """Take joiners in at once when all workers of this launch are there, whose process groups are named, and no
        further one is to be waited for."""
        is_complete = view.phase is not Phase.FORMING or view.joining >= expected
        if not (self._may_rescale and view.joining and view.rescale is None and not view.paused and is_complete):
            return
        try:
            workers = await self._client.workers(self.name)
            here = [worker for worker in workers if _group_of(worker.pid) in groups]
            if len(here) == len(groups) and any(worker.status is WorkerStatus.JOINING for worker in here):
                await self._client.rescale_job(self.name, "all workers of the launch have joined")
        except ForgedError as error:
            # With the token of a worker, the world starts after the stability window.
            self._may_rescale = error.code != "forbidden"


def _applies(policy: JobRestart, phase: Phase) -> bool:
    return policy is JobRestart.ALWAYS or (policy is JobRestart.IF_ABORTED and phase is Phase.ABORTED)


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
