"""The client library without an event loop."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forged.auth.model import Role
from forged.client import BlockingClient, ForgedClient
from forged.client.blocking import ClientOptions
from forged.client.client import EARLIEST
from forged.client.methods import WISH
from forged.data import inspection
from forged.data.messages import OwnersPage
from forged.data.ownership import pages
from forged.data.ownership.ownership import ShardOwnership
from forged.elastic.messages import (
    JobAborted,
    JobPaused,
    JobReopened,
    JobResumed,
    JoinJob,
    RescaleStarted,
    WorkerDraining,
    WorkerFailed,
)
from forged.elastic.model import WorkerId, WorkerStatus
from forged.elastic.phases import Phase
from forged.errors import RequestRefused, Unavailable
from forged.jobs.model import JobCreated, NoteAdded
from forged.kernel.messages import Record
from forged.pagination import PAGE_ENTRIES_MAX
from forged.status.model import PingDaemon
from tests.client.example_messages import ExampleRequest, ExampleSignal
from tests.client.simulated_workers import (
    BATCH,
    LEARNING_RATE,
    SAMPLE_BYTES,
    SAMPLES,
    SHARDS,
    incarnation_of,
    train,
    train_with_data,
)
from tests.client.threaded_daemon import ThreadedDaemon


def wait_until(true: Callable[[], bool]) -> None:
    """Yield to the other threads until a condition holds."""
    while not true():
        threading.Event().wait(0.001)


class TestCalls:
    def test_default_endpoint_and_token_come_from_the_environment(
        self, threaded_daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORGED_SOCKET", threaded_daemon.socket)
        with BlockingClient() as client:
            assert client.status().socket == threaded_daemon.socket
            reader = client.create_token("reader", Role.VIEWER)
        monkeypatch.setenv("FORGED_TOKEN", reader)
        with BlockingClient() as client, pytest.raises(RequestRefused, match="reader has role viewer"):
            client.create_job("a")

    def test_blocking_methods_return_the_results_of_the_async_ones(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client:
            assert client.ping() >= 0
            assert client.status().socket == threaded_daemon.runner.config.socket
            job = client.create_job("a", {"lr": 0.1})
            assert client.job("a") == job
            assert client.change_job("a", {}, job.version).settings == {}
            client.note("a", "hello")
            assert [one.name for one in client.jobs()] == ["a"]
            client.remove_job("a")
            assert client.handlers()
            with pytest.raises(RequestRefused, match="not quarantined"):
                client.readmit_handler("nobody")
            notes = [item for item in client.past_facts(NoteAdded, since=EARLIEST) if isinstance(item, Record)]
            assert [record.fact for record in notes] == [NoteAdded("hello")]
            assert client.story(notes[0].id)[0].id == notes[0].id
            text = client.create_token("bot", Role.VIEWER, jobs=["a"])
            (token,) = client.tokens()
            assert token.token_id in text
            assert client.revoke_token(token.token_id).revoked_at is not None

    def test_every_method_and_option_of_the_async_client_exists(self) -> None:
        ours, theirs = (
            {name for name, _ in inspect.getmembers(cls, inspect.isroutine) if not name.startswith(("_", "on_"))}
            for cls in (BlockingClient, ForgedClient)
        )
        assert theirs <= ours
        options = inspect.signature(ForgedClient.__init__).parameters.keys() - {"self", "endpoints"}
        assert options == ClientOptions.__annotations__.keys()

    def test_refusal_is_raised_in_the_calling_thread(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client, pytest.raises(RequestRefused, match="no job"):
            client.note("nobody", "hello")

    def test_request_timeout_is_kept(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client, pytest.raises(Unavailable, match="may have been executed"):
            client.request(ExampleRequest("life"), timeout_s=0.02)

    def test_several_threads_may_use_one_client(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client, ThreadPoolExecutor(8) as threads:
            client.create_job("a")
            list(threads.map(lambda number: client.note("a", f"{number}"), range(200)))
            facts = [item.fact for item in client.past_facts() if isinstance(item, Record)]
        texts = sorted(int(fact.text) for fact in facts if isinstance(fact, NoteAdded))
        assert texts == list(range(200))

    def test_signal_reaches_the_daemon(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client:
            client.signal(ExampleSignal("psst"))
            wait_until(lambda: threaded_daemon.heard == [ExampleSignal("psst")])

    def test_serve_answers_with_a_plain_function(self, threaded_daemon: ThreadedDaemon) -> None:
        threads: list[str] = []

        def reply_to_example(request: ExampleRequest) -> str:
            threads.append(threading.current_thread().name)
            return f"{request.about} is short"

        with threaded_daemon.client() as client:
            client.serve(ExampleRequest, reply_to_example)
            assert threaded_daemon.call(threaded_daemon.ask) == "life is short"
        assert threads[0] not in ("forged-client", "MainThread")


class TestTraining:
    @pytest.fixture
    def client(self, threaded_daemon: ThreadedDaemon) -> Iterator[BlockingClient]:
        with threaded_daemon.client() as client:
            train(client, "run", "w0", "w1")
            yield client

    def test_workers_are_listed_and_shown(self, client: BlockingClient) -> None:
        workers = client.workers("run")
        assert [(one.id, one.rank, one.status) for one in workers] == [
            ("w0", 0, WorkerStatus.ACTIVE),
            ("w1", 1, WorkerStatus.ACTIVE),
        ]
        assert client.worker("run", "w1").address == workers[1].address

    def test_cluster_view_is_complete(self, client: BlockingClient) -> None:
        cluster = client.cluster("run")
        assert (cluster.phase, cluster.generation, cluster.world_size) == (Phase.RUNNING, 1, 2)
        assert (cluster.state.learning_rate, cluster.state.global_batch_size) == (LEARNING_RATE, BATCH)
        assert client.clusters() == [cluster]

    def test_a_plan_changes_nothing(self, client: BlockingClient) -> None:
        before = client.cluster("run")
        plan = client.plan_rescale("run", 3)
        assert (plan.world_size, plan.new_world_size, plan.ranks_changed) == (2, 3, 0)
        assert client.cluster("run") == before

    def test_reasons_are_recorded_in_the_facts(self, client: BlockingClient) -> None:
        client.pause_job("run", "lunch")
        client.resume_job("run", "coffee")
        client.drain_worker("run", "w0", "upgrade")
        client.rescale_job("run", "a test")
        client.evict_worker("run", "w1", "tired")
        client.abort_job("run")
        client.reopen_job("run", "spare hosts")
        wanted = (JobPaused, JobResumed, WorkerDraining, RescaleStarted, WorkerFailed, JobAborted, JobReopened)
        facts = [item.fact for item in client.past_facts(*wanted) if isinstance(item, Record)]
        reasons = {type(fact): fact.reason for fact in facts if isinstance(fact, wanted)}
        told = ["lunch", "coffee", "upgrade", "a test", "evicted: tired", WISH, "spare hosts"]
        assert [reasons[kind] for kind in wanted] == told

    def test_a_job_with_workers_is_removed_by_force_only(self, client: BlockingClient) -> None:
        with pytest.raises(RequestRefused, match="has 2 workers"):
            client.remove_job("run")
        client.remove_job("run", force=True)
        assert client.jobs() == []

    def test_workers_of_a_job_without_members_are_refused(self, client: BlockingClient) -> None:
        client.create_job("idle")
        for ask in (client.workers, client.cluster):
            with pytest.raises(RequestRefused, match="no worker has joined"):
                ask("idle")

    def test_worker_list_of_several_pages_is_complete(self, client: BlockingClient) -> None:
        client.create_job("large", {"min_workers": PAGE_ENTRIES_MAX + 2})
        names = [f"w{number:04}" for number in range(PAGE_ENTRIES_MAX + 1)]
        for name in names:
            client.request(JoinJob("large", WorkerId(name, "127.0.0.1", 1), incarnation_of(name)))
        assert [one.id for one in client.workers("large")] == names


class TestTrainingData:
    @pytest.fixture
    def client(self, threaded_daemon: ThreadedDaemon, tmp_path: Path) -> Iterator[BlockingClient]:
        """A client of a daemon with a worker that has trained for an epoch and a half."""
        train_with_data(threaded_daemon.runner.endpoint, "run", "w0", tmp_path / "shards", 15)
        with threaded_daemon.client() as client:
            yield client

    def test_all_data_requests_work(self, client: BlockingClient) -> None:
        data = client.show_data("run")
        assert (data.dataset.samples, data.dataset.shards, data.generation) == (SAMPLES, SHARDS, 1)
        assert [(one.worker_id, one.owned, one.samples) for one in data.workers] == [("w0", SHARDS, SAMPLES)]
        assert client.shard_owners("run") == ["w0"] * SHARDS
        transfers = client.transfers("run")
        assert (transfers.running, transfers.done, transfers.bytes) == (False, SHARDS, SAMPLES * SAMPLE_BYTES)
        assert [client.audit_data("run", epoch).used for epoch in range(3)] == [SAMPLES, SAMPLES // 2, 0]
        assert client.audit_data("run", 0).complete
        assert client.audit_data("run").epoch == 1
        plan = client.plan_data("run", ["w0", "another"])
        assert plan.transfers == SHARDS // 2

    def test_job_without_data_is_refused(self, client: BlockingClient) -> None:
        client.create_job("idle")
        for ask in (client.show_data, client.shard_owners, client.transfers, client.audit_data):
            with pytest.raises(RequestRefused, match="'idle'"):
                ask("idle")

    def test_owners_of_several_pages_are_complete(
        self, client: BlockingClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pages, "PAGE_SHARDS_MAX", 2)
        assert client.shard_owners("run") == ["w0"] * SHARDS

    def test_owners_that_change_between_pages_are_unavailable(
        self, client: BlockingClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers = iter([(1, True), (2, False)])

        def page(ownership: ShardOwnership, after: int) -> OwnersPage:
            generation, more = next(answers)
            return OwnersPage(generation, ownership.assignment.workers, bytes(4), more)

        monkeypatch.setattr(inspection, "owners_page", page)
        with pytest.raises(Unavailable, match="owners of job run changed"):
            client.shard_owners("run")


class TestOpeningAndClosing:
    def test_failed_opening_says_how_to_start_a_daemon_and_leaves_no_thread(self, tmp_path: Path) -> None:
        with (
            pytest.raises(Unavailable, match="start one with `forged run`"),
            BlockingClient(f"unix://{tmp_path}/none", connect_timeout_s=0.05),
        ):
            pass
        assert "forged-client" not in {thread.name for thread in threading.enumerate()}

    def test_use_outside_the_block_is_refused(self, threaded_daemon: ThreadedDaemon) -> None:
        client = threaded_daemon.client()
        for use in (client.ping, client.facts, lambda: client.aio):
            with pytest.raises(RequestRefused, match="not open"):
                use()
        with client:
            client.ping()
        for use in (client.ping, client.facts):
            with pytest.raises(Unavailable, match="was closed"):
                use()

    def test_second_opening_is_refused(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client, pytest.raises(RequestRefused, match="opened only once"):
            client.__enter__()

    def test_close_ends_calls_of_other_threads(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client, ThreadPoolExecutor(2) as threads:
            asking = threads.submit(client.request, ExampleRequest("life"))
            reading = threads.submit(next, client.facts())
            wait_until(lambda: bool(threaded_daemon.runner.daemon.bus.dispatcher.in_flight))
            client.close()
            for waiting in (asking, reading):
                with pytest.raises(Unavailable, match="was closed"):
                    waiting.result()
            client.close()

    def test_error_raised_in_the_block_is_unchanged(self, threaded_daemon: ThreadedDaemon) -> None:
        with pytest.raises(KeyError, match="mine"), threaded_daemon.client():
            raise KeyError("mine")

    def test_open_iterator_does_not_delay_closing(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client:
            read, unread = client.facts(since=EARLIEST), client.facts(since=EARLIEST)
            next(read)
        with pytest.raises(Unavailable, match="was closed"):
            next(unread)


class TestFacts:
    def test_facts_arrive_as_they_become_durable(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client, client.facts(JobCreated) as facts:
            client.create_job("a")
            record = next(facts)
        assert isinstance(record, Record)
        assert record.fact == JobCreated("a", {})

    def test_facts_end_with_until(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client:
            client.create_job("a")
            last = client.status().last_fact
            ids = [item.id for item in client.facts(since=EARLIEST, until=last) if isinstance(item, Record)]
        assert ids[-1] == last

    def test_close_ends_the_subscription(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client:
            facts = client.facts(since=EARLIEST)
            next(facts)
            facts.close()
            facts.close()
            client.ping()
            assert threaded_daemon.call(threaded_daemon.subscriptions) == 0
            assert next(facts, "over") == "over"

    def test_garbage_collection_ends_the_subscription(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client:
            for _ in client.facts(since=EARLIEST):
                break
            gc.collect()
            client.ping()
            assert threaded_daemon.call(threaded_daemon.subscriptions) == 0

    def test_closing_the_iterator_ends_the_wait_of_another_thread(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client, ThreadPoolExecutor(1) as threads:
            facts = client.facts()
            waiting = threads.submit(next, facts, "over")
            client.ping()
            facts.close()
            assert waiting.result() == "over"

    def test_facts_continue_over_a_restart_of_the_daemon(self, threaded_daemon: ThreadedDaemon) -> None:
        with threaded_daemon.client() as client, client.facts(JobCreated) as facts:
            client.create_job("a")
            threaded_daemon.call(threaded_daemon.runner.reopen)
            client.request(PingDaemon())
            client.create_job("b")
            jobs = [item.job for item in (next(facts), next(facts)) if isinstance(item, Record)]
        assert jobs == ["a", "b"]
