"""From one world into the next, with a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.client import ForgedClient
from forged.clock import SystemClock
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import (
    RescaleCompleted,
    RescaleSynchronising,
    WorkerFailed,
)
from forged.elastic.model import ClusterTopology, WorkerId
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.log import SILENT
from forged.worker.collectives.world import World
from forged.worker.errors import NEWS_DIFFER, JobEnded, WorkerEvicted, WorldIncomplete
from forged.worker.mesh import Mesh
from forged.worker.registration import HeartbeatSender, Registration
from forged.worker.rescaler import Rescaler, StateAgreement
from forged.worker.state_transfer import transfer
from forged.worker.state_transfer.transfer import StateExchange, StateFetch
from forged.worker.worker_state.job_view import Commit, JobView
from forged.worker.worker_state.progress import TrainingProgress
from forged.worker.worker_state.session_state import PeerReport, SessionState
from tests.client.daemon_runner import DaemonRunner
from tests.client.proxy import Proxy
from tests.kernel_fixture import on_virtual_time
from tests.worker.trainers import JOB, TrainerGroup, all_connected, group_at, past, shared_worker


class TestBackgroundRescale:
    """Jobs with background rescales."""

    async def test_joiner_of_a_background_rescale_has_the_state(self, runner: DaemonRunner) -> None:
        async with group_at(runner.endpoint, use_synchronous_rescaling=False) as group:
            group.start("a")
            await group.world_of("a", steps=5)
            group.start("b", "c")
            await group.world_of("a", "b", "c")
            assert group["b"].committed_steps[0].step >= 5
            await group.finish("a", "b", "c")

    async def test_evicted_worker_does_not_stop_the_job(self, runner: DaemonRunner, client: ForgedClient) -> None:
        async with group_at(runner.endpoint, use_synchronous_rescaling=False) as group:
            group.start("a")
            await group.world_of("a")
            group.start("b", "c")
            await group.world_of("a", "b", "c")
            await client.evict_worker(JOB, "b")
            assert isinstance((await group.over("b"))[0], WorkerEvicted)
            await group.world_of("a", "c")
            group.start("d")
            await group.world_of("a", "c", "d")
            await group.finish("a", "c", "d")
            told = await past(client, RescaleSynchronising, RescaleCompleted)
            assert not any(isinstance(fact, RescaleSynchronising) for fact in told[2:])
            behind = [fact.step for fact in told if isinstance(fact, RescaleCompleted)]
            assert behind == [0, *[None] * (len(behind) - 1)], "all workers report a step for the first world only"

    async def test_members_report_their_steps_when_the_last_known_state_holder_leaves(
        self, runner: DaemonRunner, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The daemon does not learn that all members have met.
        monkeypatch.setattr(HeartbeatSender, "beat_now", lambda heartbeat: None)
        settings = {"use_synchronous_rescaling": False, "worker_heartbeat_timeout_ms": 600_000}
        async with group_at(runner.endpoint, **settings) as group:
            group.start("a")
            await group.world_of("a", steps=5)
            group.start("b", "c")
            await group.world_of("a", "b", "c")
            begun = group["b"].committed_steps[0].step
            await client.evict_worker(JOB, "a")
            await group.world_of("b", "c")
            group.start("d")
            await group.world_of("b", "c", "d")
            await group.finish("b", "c", "d")
            told = await past(client, RescaleCompleted)
            behind = [fact.step for fact in told if isinstance(fact, RescaleCompleted) and fact.step is not None]
            assert behind[0] == 0
            assert len(behind) == 2
            assert behind[1] >= begun >= 5

    async def test_workers_that_join_at_once_learn_of_worlds_committed_before_their_answers(
        self, runner: DaemonRunner
    ) -> None:
        """Without a barrier, facts overtake the daemon's answers."""
        names = [f"w{number}" for number in range(8)]
        async with group_at(runner.endpoint, use_synchronous_rescaling=False) as group:
            group.start(*names)
            await group.world_of(*names)
            await group.finish(*names)

    async def test_world_committed_while_another_is_entered_is_entered_next(
        self, runner: DaemonRunner, client: ForgedClient
    ) -> None:
        async with group_at(runner.endpoint, use_synchronous_rescaling=False) as group:
            group.start("a", "b")
            await group.world_of("a", "b")
            agree = Rescaler._agree
            state = group["a"].worker._state
            view = state.view
            late: list[int] = []

            async def agree_late(rescaler: Rescaler, world: World, commit: Commit) -> StateAgreement:
                agreement = await agree(rescaler, world, commit)
                if rescaler is group["a"].member.rescaler and not late:
                    late.append(commit.topology.epoch)
                    with anyio.CancelScope(shield=True):
                        await client.rescale_job(JOB)
                        while view.committed is commit:
                            await state.wait_for_change()
                return agreement

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Rescaler, "_agree", agree_late)
                await client.rescale_job(JOB)
                await group.until(lambda: bool(late) and group["a"].worker.generation == late[0] + 1)
                await group.more_steps("a", "b")
            assert group["b"].worker.generation == late[0] + 1
            await group.finish("a", "b")

    async def test_worker_that_learns_of_the_world_from_an_answer_fetches_the_offered_state(
        self, runner: DaemonRunner
    ) -> None:
        """It does not know the attempt of that world."""
        async with group_at(runner.endpoint, use_synchronous_rescaling=False) as group:
            group.start("a", "b")
            await group.world_of("a", "b", steps=5)
            generation = group["a"].worker.generation
            cross = Rescaler._cross

            async def another_attempt(rescaler: Rescaler, commit: Commit) -> None:
                if rescaler is group["c"].member.rescaler:
                    rescaler._view.committed = commit = replace(commit, attempt=1)
                await cross(rescaler, commit)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Rescaler, "_cross", another_attempt)
                group.start("c")
                await group.world_of("a", "b", "c")
            assert group["c"].worker.generation == generation + 1
            await group.finish("a", "b", "c")


class TestUnavailableState:
    """In a background rescale a joiner fetches the state in the new world."""

    @pytest.mark.parametrize(
        ("error", "blamed"),
        [
            (Unavailable("attempt_over", "attempt 3 is over, 4 is the newest"), ""),
            (Unavailable("unreachable", "no answer"), "a"),
        ],
        ids=["superseded", "unreached"],
    )
    async def test_unavailable_state_blames_the_source_unless_it_has_moved_on(
        self, error: Unavailable, blamed: str, runner: DaemonRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reported_peers: list[str] = []
        report_unreachable_peer, fetch = Registration.report_unreachable_peer, StateExchange.fetch

        async def note(line: Registration, generation: int, peer: str, why: str, step_voided: bool) -> None:
            if line.worker.id == "b":
                reported_peers.append(peer)
            await report_unreachable_peer(line, generation, peer, why, step_voided)

        async def fail_once(exchange: StateExchange, source: WorkerId, attempt: int) -> None:
            if not reported_peers:
                raise error
            await fetch(exchange, source, attempt)

        async with group_at(runner.endpoint, use_synchronous_rescaling=False) as group:
            group.start("a")
            await group.world_of("a", steps=5)
            monkeypatch.setattr(Registration, "report_unreachable_peer", note)
            monkeypatch.setattr(StateExchange, "fetch", fail_once)
            group.start("b")
            await group.world_of("a", "b")
            await group.finish("a", "b")
        assert reported_peers[0] == blamed


ME, HUB = WorkerId("me", "host", 1), WorkerId("hub", "host", 2)
WORLDS = (
    ClusterTopology((HUB, ME), 2),
    ClusterTopology((ME, HUB), 2),
    ClusterTopology((ME,), 2),
    ClusterTopology((HUB,), 2),
)
ACTIONS_MAX = 8
"""How many things a rescaler does at most before it waits for a change."""


class RescalerFixture:
    """Everything that a rescaler calls succeeds at once, or fails at once."""

    def __init__(self, failure: ForgedError | None) -> None:
        self.failure = failure
        self.worker = ME
        self.names = ("me",)
        self.rank, self.size, self.generation = 0, 1, 2
        self.ending = None

    async def stopped(self, *_: object) -> bool:
        return True

    async def leave(self) -> None: ...

    async def report_unreachable_peer(self, *_: object) -> None: ...

    def beat_now(self) -> None: ...

    def watch(self, on_over: object) -> None: ...

    async def enter(self, *_: object) -> RescalerFixture:
        self._fail()
        return self

    async def all_gather(self, value: bytes) -> list[bytes]:
        return [value]

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure

    take = fetch = ready = settle = report_unreachable_peer
    on_rescaling_event = synchronize_state = resume_training = report_unreachable_peer

    @contextmanager
    def offering(self, _attempt: int) -> Iterator[None]:
        yield


def state_of(view: JobView) -> SessionState:
    state = SessionState(ME, TrainingProgress(0.0, 0))
    state.view = state.current_world._view = view
    state.follow_settings(ElasticTrainingConfig(rescale_silence_ms=1000).to_settings())
    return state


@st.composite
def views(draw: st.DrawFn) -> JobView:
    """Any view of the job."""
    step, number = st.sampled_from([0, 1]), st.integers(1, 2)
    view = JobView("me", topology=draw(st.sampled_from(WORLDS)), attempt=draw(st.integers(0, 2)))
    view.rescaling, view.leaves, view.outdated = (
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    view.lost = draw(st.sampled_from(["", "hub"]))
    if draw(st.booleans()):
        view.synchronising = RescaleSynchronising(draw(number), draw(st.sampled_from([ME, HUB])), draw(step), 1)
    if draw(st.booleans()):
        behind = draw(st.one_of(st.none(), step))
        view.committed = Commit(draw(number), ClusterTopology(), draw(st.sampled_from(WORLDS)), behind, 0, 0.0, 0, "")
    return view


@given(
    views(),
    st.booleans(),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, Unavailable("unreachable", "no answer"), WorldIncomplete("no peer connects", "hub")]),
    st.booleans(),
)
def test_rescaler_always_ends_up_waiting_for_facts(
    view: JobView, takes: bool, settled: int, holds_state: bool, failure: ForgedError | None, has_peer_report: bool
) -> None:
    """A rescaler that never waits would starve the event loop, and with it what it waits for."""
    others: Any = RescalerFixture(failure)
    state = state_of(view)
    state.progress.holds_state = holds_state
    state.current_world.peer_report = PeerReport(2, "hub", "no answer") if has_peer_report else None
    clock = SystemClock()
    rescaler = Rescaler(state, others, others, others, None, others, others, clock, SILENT)
    rescaler._reported = settled
    done = 0

    @on_virtual_time
    async def go() -> None:
        nonlocal done
        with anyio.move_on_after(0.1):
            while True:
                await rescaler.advance(takes_state=takes)
                done += 1
                assert done < ACTIONS_MAX, "the rescaler never waits"

    go()


@on_virtual_time
async def test_fact_received_while_leaving_a_world_prevents_entering_the_next() -> None:
    state = state_of(JobView("me"))

    class Nobody:
        """A mesh to which no peer connects."""

        worker = ME

        async def enter(self, *arguments: Any) -> None:
            await anyio.sleep_forever()

    nobody: Any = Nobody()
    rescaler = Rescaler(state, nobody, nobody, nobody, None, nobody, nobody, SystemClock(), SILENT)
    state.view.committed = Commit(1, ClusterTopology(), ClusterTopology((HUB, ME), 2), 0, 0, 0.0, 0, "")

    async def leave() -> None:
        state.fail(JobEnded("job_aborted", "the job was aborted"))

    state.current_world.leave = leave  # type: ignore[method-assign]
    with anyio.fail_after(1):
        await rescaler.advance()


class TestBrokenConnections:
    async def test_connection_that_returns_changes_nothing_for_the_other_workers(
        self, runner: DaemonRunner, tmp_path: Path
    ) -> None:
        proxy = Proxy(tmp_path / "p", runner.config.socket)
        async with group_at(proxy.endpoint) as group, ForgedClient(runner.endpoint) as client:
            group.start("a", "b")
            await group.world_of("a", "b")
            generation = group["a"].worker.generation
            for _ in range(5):
                proxy.cut()
                await group.more_steps("a", "b")
            await all_connected(client, "a", "b")
            assert group["a"].worker.generation == generation
            group.start("c")
            await group.world_of("a", "b", "c")
            await group.finish("a", "b", "c")
        await proxy.close()

    async def test_broken_link_between_two_workers_leads_to_a_new_world_of_the_same_members(
        self, group: TrainerGroup
    ) -> None:
        group.start("a", "b", "c")
        await group.world_of("a", "b", "c")
        for _ in range(3):
            mesh = group["b"].member._mesh
            assert mesh is not None
            async with group.rescaled("a", "b", "c"):
                for link in list(mesh._links):
                    link.abort()
            await group.more_steps("a", "b", "c")
        await group.finish("a", "b", "c")


class TestDivergingViews:
    @pytest.mark.parametrize("code", sorted(NEWS_DIFFER))
    async def test_refusal_by_a_peer_leads_to_a_new_world_and_is_not_raised(
        self, code: str, group: TrainerGroup, client: ForgedClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        enter = Mesh.enter
        refused: list[int] = []

        async def refuse_once(mesh: Mesh, generation: int, *arguments: Any, **options: Any) -> Any:
            if not refused and mesh is group["b"].member._mesh:
                refused.append(generation)
                raise RequestRefused(code, "it has other news")
            return await enter(mesh, generation, *arguments, **options)

        group.start("a")
        await group.world_of("a")
        monkeypatch.setattr(Mesh, "enter", refuse_once)
        group.start("b")
        await group.world_of("a", "b")
        assert group["b"].worker.generation > refused[0]
        assert await past(client, WorkerFailed) == []
        await group.finish("a", "b")

    @pytest.mark.parametrize("code", sorted(NEWS_DIFFER))
    async def test_source_that_refuses_is_retried(
        self, code: str, group: TrainerGroup, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transfer, "PAUSE_S", 0.0)
        fetch = StateFetch.fetch
        refused: list[int] = []

        async def refuse_twice(self: StateFetch, source: WorkerId, attempt: int, into: Any) -> None:
            if len(refused) < 2:
                refused.append(attempt)
                raise RequestRefused(code, "it has other news")
            await fetch(self, source, attempt, into)

        monkeypatch.setattr(StateFetch, "fetch", refuse_twice)
        group.start("a")
        await group.world_of("a")
        group.start("b")
        await group.world_of("a", "b")
        assert len(refused) == 2
        await group.finish("a", "b")

    async def test_state_error_is_raised_in_the_script(self, group: TrainerGroup) -> None:
        class Small:
            """A state that does not fit."""

            def state_dict(self) -> dict[str, Any]:
                return {"chain": 0}

            def load_state_dict(self, state: Any) -> None:
                raise ValueError("it does not fit")

        group.start("a")
        await group.world_of("a")
        late = shared_worker("late", group.config, job=JOB, state=Small())
        async with late:
            await late.connect(*group.endpoints)
            with pytest.raises(RequestRefused, match="does not fit") as raised:
                await late.begin_step()
        assert raised.value.code == "state_not_loaded"
        assert isinstance(raised.value.__cause__, ValueError)
        await group.world_of("a")
        await group.finish("a")
