"""The client library for programs without an event loop.

Law: there is no second implementation. A blocking client runs a `ForgedClient` on a loop in a thread of its own and
waits for it; it may be used from several threads, and closing it ends what the others wait for. Signals may interrupt
it there.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypedDict, TypeVar, Unpack

import anyio

from forged.auth.messages import TokenView
from forged.auth.model import Role
from forged.client.client import CLOSED, EARLIEST, ForgedClient
from forged.client.loop_thread import LoopThread
from forged.client.methods import WISH
from forged.client.stream import FactStream
from forged.clock import Clock
from forged.config.messages import ConfigView, Reloaded
from forged.elastic.messages import ClusterView, Draining, RescalePlan, Steered, WorkerView
from forged.errors import RequestRefused, Unavailable
from forged.jobs.model import Job, SettingValue
from forged.kernel.messages import Fact, Fence, Gap, Record, Request, Signal, Ticket
from forged.net.transport.connection import ConnectionLimits
from forged.net.transport.port import Network
from forged.plugins.model import PluginView
from forged.retry import RetryPolicy
from forged.status.model import HandlerView, Status

if TYPE_CHECKING:
    from forged.data.messages import AuditView, DataView, TransfersView, TransferTotals

P = ParamSpec("P")
R = TypeVar("R")


class ClientOptions(TypedDict, total=False):
    """The options of `ForgedClient`."""

    token: str | None
    timeout_s: float
    connect_timeout_s: float
    reconnect: RetryPolicy
    network: Network | None
    clock: Clock | None
    source: random.Random | None
    limits: ConnectionLimits | None


class BlockingFacts:
    """An iterator over records and gaps, and a context manager; made by `BlockingClient.facts`.

    It waits for the next fact for ever, or ends with `until`. Closing it, or dropping it, ends the subscription.
    """

    def __init__(self, stream: FactStream, loop: LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record | Gap:
        item: Record | Gap | None = self._loop.run(anext, self._stream, None)
        if item is None:
            raise StopIteration
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Want no more. Idempotent, and does not wait: also for whoever waits for the next fact in another thread."""
        with contextlib.suppress(Unavailable):  # the loop has ended, and the stream with it
            self._loop.tell(self._stream.close)

    def __del__(self) -> None:
        self.close()


class BlockingClient:
    """`ForgedClient` without `await`; a context manager. Its arguments are those of `ForgedClient`."""

    def __init__(self, *endpoints: str, **options: Unpack[ClientOptions]) -> None:
        self._make = lambda: ForgedClient(*endpoints, **options)
        self._open = ExitStack()
        self._loop: LoopThread | None = None
        self._client: ForgedClient | None = None

    def __enter__(self) -> Self:
        if self._loop is not None:
            raise RequestRefused("client_reopened", "a client is opened once", "make another")
        self._open.enter_context(self._opened())
        return self

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with LoopThread("forged-client", CLOSED) as loop:
            self._loop = loop
            # Made on the loop's thread: a client belongs to its loop.
            with loop.holding(loop.call(self._make)) as self._client:
                yield

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Say goodbye and end the thread. Idempotent."""
        self._open.close()

    @property
    def aio(self) -> ForgedClient:
        """The client that does the work."""
        if self._client is None:
            raise _not_open()
        return self._client

    def request(self, request: Request[R], *, timeout_s: float | None = None, fence: Fence | None = None) -> R:
        """Have a request done once and return its reply."""

        async def ask() -> R:
            return await self.aio.request(request, timeout_s=timeout_s, fence=fence)

        return self._run(ask)

    def signal(self, signal: Signal) -> None:
        """Tell the daemon something that need not arrive."""
        self._there().call(self.aio.signal, signal)

    def serve(self, request: type[Request[R]], handler: Callable[[Any], R]) -> None:
        """Answer requests of this type that come from the daemon; the handler runs in a thread of its own."""

        async def answer(asked: Any) -> R:
            return await anyio.to_thread.run_sync(handler, asked, abandon_on_cancel=True)

        self._there().call(self.aio.serve, request, answer)

    def facts(
        self,
        *types: type[Fact] | str,
        since: int | None = None,
        jobs: Iterable[str] = (),
        until: int | None = None,
    ) -> BlockingFacts:
        """Facts as they become durable. The subscription stands when this returns."""

        async def subscribe() -> BlockingFacts:
            stream = self.aio.facts(*types, since=since, jobs=jobs, until=until)
            return BlockingFacts(await stream.__aenter__(), self._there())

        return self._run(subscribe)

    def descriptors(self) -> list[int]:
        """The file descriptors of its connection, which forked children must not keep."""
        return self.aio.descriptors()

    def ping(self) -> float:
        """How many seconds it takes to the daemon's bus and back."""
        return self._run(self.aio.ping)

    def status(self) -> Status:
        """How the daemon is."""
        return self._run(self.aio.status)

    def story(self, fact_id: int) -> list[Record]:
        """A fact between its causes and its consequences."""
        return self._run(self.aio.story, fact_id)

    def past_facts(
        self, *types: type[Fact] | str, since: int = EARLIEST, jobs: Iterable[str] = ()
    ) -> list[Record | Gap]:
        """The facts until now."""

        async def collect() -> list[Record | Gap]:
            return [item async for item in self.aio.past_facts(*types, since=since, jobs=jobs)]

        return self._run(collect)

    def handlers(self) -> list[HandlerView]:
        """Every handler on the daemon's bus, in numbers."""
        return self._run(self.aio.handlers)

    def readmit_handler(self, handler: str) -> None:
        """Give a quarantined handler facts again."""
        self._run(self.aio.readmit_handler, handler)

    def plugins(self) -> list[PluginView]:
        """Every plugin that the daemon has found."""
        return self._run(self.aio.plugins)

    def enable_plugin(self, plugin: str) -> None:
        """Let a plugin take part again."""
        self._run(self.aio.enable_plugin, plugin)

    def disable_plugin(self, plugin: str) -> None:
        """Leave a plugin out until it is enabled, or the daemon starts anew."""
        self._run(self.aio.disable_plugin, plugin)

    def run_plugin_command(self, plugin: str, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Have a plugin do what one of its commands says."""
        return self._run(self.aio.run_plugin_command, plugin, command, arguments)

    def config(self) -> ConfigView:
        """The daemon's settings."""
        return self._run(self.aio.config)

    def reload_config(self) -> Reloaded:
        """Have the daemon read its settings anew."""
        return self._run(self.aio.reload_config)

    def create_job(self, job: str, settings: Mapping[str, SettingValue] | None = None) -> Job:
        """Create a job, or get the one that exists."""
        return self._run(self.aio.create_job, job, settings)

    def change_job(self, job: str, settings: Mapping[str, SettingValue], version: int) -> Job:
        """Replace a job's settings if it is still at this version."""
        return self._run(self.aio.change_job, job, settings, version)

    def job(self, job: str) -> Job:
        """One job."""
        return self._run(self.aio.job, job)

    def jobs(self) -> list[Job]:
        """All jobs that this client may see."""
        return self._run(self.aio.jobs)

    def remove_job(self, job: str, *, force: bool = False) -> None:
        """Remove a job; one that has workers only by force."""
        self._run(self.aio.remove_job, job, force=force)

    def note(self, job: str, text: str) -> None:
        """Put a remark on a job's record."""
        self._run(self.aio.note, job, text)

    def workers(self, job: str) -> list[WorkerView]:
        """All workers of a job."""
        return self._run(self.aio.workers, job)

    def worker(self, job: str, worker_id: str) -> WorkerView:
        """One worker of a job."""
        return self._run(self.aio.worker, job, worker_id)

    def cluster(self, job: str) -> ClusterView:
        """Where a job's training is."""
        return self._run(self.aio.cluster, job)

    def clusters(self) -> list[ClusterView]:
        """Where the training of all jobs is."""
        return self._run(self.aio.clusters)

    def drain_worker(self, job: str, worker_id: str, reason: str = WISH) -> Draining:
        """Have a worker finish its step and go."""
        return self._run(self.aio.drain_worker, job, worker_id, reason)

    def evict_worker(self, job: str, worker_id: str, reason: str = WISH) -> None:
        """Count a worker as dead."""
        self._run(self.aio.evict_worker, job, worker_id, reason)

    def pause_job(self, job: str, reason: str = WISH) -> Steered:
        """Let a job's training rest behind its step."""
        return self._run(self.aio.pause_job, job, reason)

    def resume_job(self, job: str, reason: str = WISH) -> Steered:
        """Let a job's training go on."""
        return self._run(self.aio.resume_job, job, reason)

    def abort_job(self, job: str, reason: str = WISH) -> Steered:
        """Give a job's training up."""
        return self._run(self.aio.abort_job, job, reason)

    def rescale_job(self, job: str, reason: str = WISH) -> Steered:
        """Start a rescale now."""
        return self._run(self.aio.rescale_job, job, reason)

    def plan_rescale(self, job: str, workers: int) -> RescalePlan:
        """What a rescale to so many workers would do."""
        return self._run(self.aio.plan_rescale, job, workers)

    def show_data(self, job: str) -> DataView:
        """A job's dataset, and what each worker holds of it."""
        return self._run(self.aio.show_data, job)

    def shard_owners(self, job: str) -> list[str]:
        """The id of the worker that owns each shard of a job."""
        return self._run(self.aio.shard_owners, job)

    def transfers(self, job: str) -> TransfersView:
        """How far the training data is that travels."""
        return self._run(self.aio.transfers, job)

    def audit_data(self, job: str, epoch: int | None = None) -> AuditView:
        """Whether each sample of an epoch was used once."""
        return self._run(self.aio.audit_data, job, epoch)

    def plan_data(self, job: str, workers: Sequence[str], gone: Sequence[str] = ()) -> TransferTotals:
        """What would have to travel if these were the workers, and nothing could be had from the `gone`."""
        return self._run(self.aio.plan_data, job, workers, gone)

    def create_token(
        self, name: str, role: Role, *, jobs: Sequence[str] | None = None, ttl_s: float | None = None
    ) -> str:
        """Create a token and return its text, which nobody can tell again."""

        async def create() -> str:
            return await self.aio.create_token(name, role, jobs=jobs, ttl_s=ttl_s)

        return self._run(create)

    def tokens(self) -> list[TokenView]:
        """All tokens."""
        return self._run(self.aio.tokens)

    def revoke_token(self, token_id: str) -> TokenView:
        """Accept a token no more."""
        return self._run(self.aio.revoke_token, token_id)

    # Bulk.

    def fetch_file(self, ticket: Ticket, fd: int, *, offset: int = 0) -> None:
        """Receive what a ticket is for into an open file, from `offset` on."""
        self._run(partial(self.aio.fetch_file, ticket, fd, offset=offset))

    def fetch_bytes(self, ticket: Ticket) -> bytearray:
        """Receive what a ticket is for into memory."""
        return self._run(self.aio.fetch_bytes, ticket)

    def fetch_descriptors(self, ticket: Ticket) -> list[int]:
        """Receive file descriptors, over a Unix socket; they are the caller's to close."""
        return self._run(self.aio.fetch_descriptors, ticket)

    def deliver_file(self, ticket: Ticket, fd: int, *, offset: int = 0) -> None:
        """Send the bytes of an open file that a ticket asks for, from `offset` on."""
        self._run(partial(self.aio.deliver_file, ticket, fd, offset=offset))

    def deliver_bytes(self, ticket: Ticket, view: memoryview) -> None:
        """Send the bytes that a ticket asks for from memory."""
        self._run(self.aio.deliver_bytes, ticket, view)

    def backup(self, path: str | PathLike[str]) -> int:
        """Fetch a consistent copy of the daemon's state; returns its size."""
        return self._run(self.aio.backup, path)

    def _run(self, call: Callable[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        return self._there().run(call, *args, **kwargs)

    def _there(self) -> LoopThread:
        if self._loop is None:
            raise _not_open()
        return self._loop


def _not_open() -> RequestRefused:
    return RequestRefused(
        "client_not_open", "the client is not open", "use it inside `with BlockingClient(...) as client`"
    )
