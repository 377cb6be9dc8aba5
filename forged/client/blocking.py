"""The client library for programs without an event loop.

A `BlockingClient` runs a `ForgedClient` on an event loop in a thread of its own.

Invariants:
- Several threads may use one client. Closing it ends the calls that wait in other threads.
- A signal handler may interrupt a waiting call anywhere, and may itself call the client.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import anyio

from forged.blocking.facade import BlockingFacade, blocking, iterating
from forged.blocking.loop_thread import LoopThread
from forged.client.client import CLOSED, EARLIEST, ForgedClient
from forged.client.stream import FactStream
from forged.clock import Clock
from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Fact, Fence, Gap, Record, Request, Signal
from forged.net.transport.connection import ConnectionLimits
from forged.net.transport.port import Network
from forged.retry import RetryPolicy

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

    It waits for the next fact without a limit, or ends with `until`. The subscription ends when the iterator is closed
    or garbage-collected.
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
        """End the subscription, also for a thread that waits for the next fact. Idempotent, and does not wait."""
        with contextlib.suppress(Unavailable):  # the loop has ended, and the stream with it
            self._loop.tell(self._stream.close)

    def __del__(self) -> None:
        self.close()


class BlockingClient(BlockingFacade[ForgedClient]):
    """`ForgedClient` without `await`; a context manager. Its arguments are those of `ForgedClient`."""

    def __init__(self, *endpoints: str, **options: Unpack[ClientOptions]) -> None:
        self._make = lambda: ForgedClient(*endpoints, **options)
        self._open = ExitStack()
        self._loop: LoopThread | None = None
        self._client: ForgedClient | None = None

    def __enter__(self) -> Self:
        if self._loop is not None:
            raise RequestRefused("client_reopened", "a client can be opened only once", "create another client")
        self._open.enter_context(self._opened())
        return self

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with LoopThread("forged-client", CLOSED) as loop:
            self._loop = loop
            # Made in the loop's thread: a client belongs to its loop.
            with loop.holding(loop.call(self._make)) as self._client:
                yield

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Say goodbye to the daemon and end the thread. Idempotent."""
        self._open.close()

    @property
    def aio(self) -> ForgedClient:
        """The asynchronous client behind this one."""
        if self._client is None:
            raise _not_open()
        return self._client

    def request(self, request: Request[R], *, timeout_s: float | None = None, fence: Fence | None = None) -> R:
        """Send a request and return its reply. It takes effect once, even if the connection breaks."""
        return self._run(lambda client: client.request(request, timeout_s=timeout_s, fence=fence))

    def signal(self, signal: Signal) -> None:
        """Send a signal, which may get lost."""
        self.loop.call(self.aio.signal, signal)

    def serve(self, request: type[Request[R]], handler: Callable[[Any], R]) -> None:
        """Answer requests of this type from the daemon; the handler runs in a thread of its own."""

        async def answer(received: Any) -> R:
            return await anyio.to_thread.run_sync(handler, received, abandon_on_cancel=True)

        self.loop.call(self.aio.serve, request, answer)

    def facts(
        self,
        *types: type[Fact] | str,
        since: int | None = None,
        jobs: Iterable[str] = (),
        until: int | None = None,
    ) -> BlockingFacts:
        """Facts as they become durable. The subscription is confirmed when this returns."""

        async def subscribe(client: ForgedClient) -> BlockingFacts:
            stream = client.facts(*types, since=since, jobs=jobs, until=until)
            return BlockingFacts(await stream.__aenter__(), self.loop)

        return self._run(subscribe)

    def past_facts(
        self, *types: type[Fact] | str, since: int = EARLIEST, jobs: Iterable[str] = ()
    ) -> list[Record | Gap]:
        """All facts up to now."""

        async def collect(client: ForgedClient) -> list[Record | Gap]:
            return [item async for item in client.past_facts(*types, since=since, jobs=jobs)]

        return self._run(collect)

    def descriptors(self) -> list[int]:
        """The file descriptors of its connection, which forked children must close."""
        return self.aio.descriptors()

    ping = blocking(ForgedClient.ping)
    status = blocking(ForgedClient.status)
    story = blocking(ForgedClient.story)

    handlers = blocking(ForgedClient.handlers)
    readmit_handler = blocking(ForgedClient.readmit_handler)
    plugins = blocking(ForgedClient.plugins)
    enable_plugin = blocking(ForgedClient.enable_plugin)
    disable_plugin = blocking(ForgedClient.disable_plugin)
    run_plugin_command = blocking(ForgedClient.run_plugin_command)
    config = blocking(ForgedClient.config)
    reload_config = blocking(ForgedClient.reload_config)

    create_job = blocking(ForgedClient.create_job)
    change_job = blocking(ForgedClient.change_job)
    job = blocking(ForgedClient.job)
    jobs = blocking(ForgedClient.jobs)
    remove_job = blocking(ForgedClient.remove_job)
    note = blocking(ForgedClient.note)

    workers = blocking(ForgedClient.workers)
    worker = blocking(ForgedClient.worker)
    cluster = blocking(ForgedClient.cluster)
    clusters = blocking(ForgedClient.clusters)
    worker_stacks = blocking(ForgedClient.worker_stacks)
    read_training = blocking(ForgedClient.read_training)
    drain_worker = blocking(ForgedClient.drain_worker)
    evict_worker = blocking(ForgedClient.evict_worker)
    pause_job = blocking(ForgedClient.pause_job)
    resume_job = blocking(ForgedClient.resume_job)
    abort_job = blocking(ForgedClient.abort_job)
    reopen_job = blocking(ForgedClient.reopen_job)
    rescale_job = blocking(ForgedClient.rescale_job)
    plan_rescale = blocking(ForgedClient.plan_rescale)

    show_data = blocking(ForgedClient.show_data)
    shard_owners = blocking(ForgedClient.shard_owners)
    transfers = blocking(ForgedClient.transfers)
    slots = blocking(ForgedClient.slots)
    audit_data = blocking(ForgedClient.audit_data)
    plan_data = blocking(ForgedClient.plan_data)

    checkpoints = blocking(ForgedClient.checkpoints)
    checkpoint = blocking(ForgedClient.checkpoint)
    restore_points = blocking(ForgedClient.restore_points)
    pin_checkpoint = blocking(ForgedClient.pin_checkpoint)
    unpin_checkpoint = blocking(ForgedClient.unpin_checkpoint)
    reinstate_checkpoint = blocking(ForgedClient.reinstate_checkpoint)
    retention = blocking(ForgedClient.retention)
    collect_checkpoints = blocking(ForgedClient.collect_checkpoints)
    delete_checkpoint = blocking(ForgedClient.delete_checkpoint)
    compact_checkpoint = blocking(ForgedClient.compact_checkpoint)
    adopt_checkpoints = blocking(ForgedClient.adopt_checkpoints)

    register_model = blocking(ForgedClient.register_model)
    import_models = blocking(ForgedClient.import_models)
    validate_model = blocking(ForgedClient.validate_model)
    report_canary = blocking(ForgedClient.report_canary)
    model_validations = blocking(ForgedClient.model_validations)
    promote_model = blocking(ForgedClient.promote_model)
    transition_model = blocking(ForgedClient.transition_model)
    roll_back_model = blocking(ForgedClient.roll_back_model)
    move_alias = blocking(ForgedClient.move_alias)
    tag_model = blocking(ForgedClient.tag_model)
    set_model_policy = blocking(ForgedClient.set_model_policy)
    delete_model = blocking(ForgedClient.delete_model)
    model = blocking(ForgedClient.model)
    models = iterating(ForgedClient.models)
    model_versions = iterating(ForgedClient.model_versions)
    find_models = iterating(ForgedClient.find_models)
    model_journal = iterating(ForgedClient.model_journal)
    served_model = blocking(ForgedClient.served_model)
    best_model = blocking(ForgedClient.best_model)
    compare_models = blocking(ForgedClient.compare_models)
    verify_model = blocking(ForgedClient.verify_model)
    pull_model = blocking(ForgedClient.pull_model)

    register_device = blocking(ForgedClient.register_device)
    plan_offsets = blocking(ForgedClient.plan_offsets)
    allocate_memory = blocking(ForgedClient.allocate_memory)
    free_memory = blocking(ForgedClient.free_memory)
    change_blocks = blocking(ForgedClient.change_blocks)
    assert_blocks = blocking(ForgedClient.assert_blocks)
    plan_compaction = blocking(ForgedClient.plan_compaction)
    commit_move = blocking(ForgedClient.commit_move)
    memory_devices = iterating(ForgedClient.memory_devices)
    memory_blocks = iterating(ForgedClient.memory_blocks)
    find_fit = blocking(ForgedClient.find_fit)

    create_token = blocking(ForgedClient.create_token)
    tokens = blocking(ForgedClient.tokens)
    revoke_token = blocking(ForgedClient.revoke_token)

    fetch_file = blocking(ForgedClient.fetch_file)
    fetch_bytes = blocking(ForgedClient.fetch_bytes)
    fetch_descriptors = blocking(ForgedClient.fetch_descriptors)
    deliver_file = blocking(ForgedClient.deliver_file)
    deliver_bytes = blocking(ForgedClient.deliver_bytes)
    backup = blocking(ForgedClient.backup)

    def _run(self, call: Callable[[ForgedClient], Awaitable[R]]) -> R:
        return self.loop.run(call, self.aio)

    @property
    def loop(self) -> LoopThread:
        """The loop that the asynchronous client runs on."""
        if self._loop is None:
            raise _not_open()
        return self._loop


def _not_open() -> RequestRefused:
    return RequestRefused(
        "client_not_open", "the client is not open", "use it inside `with BlockingClient(...) as client`"
    )
