"""The MLflow sink, against a server that keeps to the part of the REST API that is used."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

from forged.elastic.messages import JobAborted, JobReopened
from forged.kernel.messages import Call, Record
from forged.metrics.messages import JobMetrics
from forged.plugins import PluginContext
from plugins import mlflow
from plugins.mlflow import BATCH_METRICS_MAX, POINTS_WAITING_MAX
from tests.dropins.dropin_fixture import LoadedPlugin, refusal, running_plugin
from tests.faulty_store import FaultyStore

JOB = "run"


class FakeServer:
    """Runs with their metrics and states."""

    def __init__(self) -> None:
        self.url = ""
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.is_down = False
        self.batches: list[int] = []
        self.tokens: set[str] = set()

    async def answer(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("Authorization", ""))
        if self.is_down:
            return web.Response(status=503, text="down")
        call = request.path.removeprefix("/api/2.0/mlflow/")
        fields: Any = dict(request.query) if request.method == "GET" else await request.json()
        answer = getattr(self, call.replace("/", "_").replace("-", "_"))(fields)
        if answer is None:
            return web.json_response({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such thing"}, status=404)
        return web.json_response(answer)

    def experiments_get_by_name(self, fields: Any) -> Any:
        found = self.experiments.get(fields["experiment_name"])
        return None if found is None else {"experiment": {"experiment_id": found}}

    def experiments_create(self, fields: Any) -> Any:
        self.experiments[fields["name"]] = "7"
        return {"experiment_id": "7"}

    def runs_create(self, fields: Any) -> Any:
        run = f"r{len(self.runs)}"
        tags = {tag["key"]: tag["value"] for tag in fields["tags"]}
        self.runs[run] = {"name": fields["run_name"], "tags": tags, "metrics": [], "status": "RUNNING"}
        return {"run": {"info": {"run_id": run}}}

    def runs_log_batch(self, fields: Any) -> Any:
        if fields["run_id"] not in self.runs:
            return None
        self.batches.append(len(fields["metrics"]))
        found = self.runs[fields["run_id"]]["metrics"]
        found += [(metric["key"], metric["step"], metric["value"]) for metric in fields["metrics"]]
        return {}

    def runs_update(self, fields: Any) -> Any:
        self.runs[fields["run_id"]]["status"] = fields["status"]
        return {}


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake, app = FakeServer(), web.Application()
    app.router.add_route("*", "/{path:.*}", fake.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = str(site.name).rsplit(":", 1)[0] + f":{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()


class Sink:
    """The plugin, with what it has registered."""

    def __init__(self, plugin: LoadedPlugin, context: PluginContext) -> None:
        self.plugin = plugin
        self._registration = context.registration

    def take(self, *told: JobMetrics) -> None:
        [listening] = self._registration.listening
        for one in told:
            listening.handler(one, Call(None, "a test"))  # type: ignore[arg-type]

    async def send(self) -> None:
        [recurring] = self._registration.recurring
        done = recurring.action()
        assert done is not None
        await done

    def tell(self, fact: Any) -> None:
        [observing] = self._registration.observing
        observing.handler(Record.of(fact, fact_id=7, at=5.0, job=JOB))

    async def status(self) -> Any:
        return await self.plugin.run("status")


@asynccontextmanager
async def sink_at(server: FakeServer, place: Path, store: Any = None, **settings: Any) -> AsyncIterator[Sink]:
    given = {"url": server.url} | settings
    contexts: list[PluginContext] = []
    module: Any = ModuleType("mlflow")
    module.API_VERSION = mlflow.API_VERSION

    def register(context: PluginContext) -> None:
        contexts.append(context)
        mlflow.register(context)

    module.register = register
    async with running_plugin("mlflow", module, given, place, store=store) as plugin:
        yield Sink(plugin, contexts[0])


def figures(step: int, **values: float) -> JobMetrics:
    return JobMetrics(JOB, 1_000.0 + step, step, values, None, None, None)


async def test_points_of_a_job_are_in_one_run(server: FakeServer, tmp_path: Path) -> None:
    async with sink_at(server, tmp_path) as sink:
        sink.take(figures(1, loss=0.5), figures(2, loss=math.nan, **{"a:b": math.inf}))
        await sink.send()
        sink.take(figures(3, loss=-math.inf))
        await sink.send()
        assert (await sink.status())["runs"] == {JOB: "r0"}
    assert server.experiments == {"forged": "7"}
    [run] = server.runs.values()
    assert (run["name"], run["tags"]["forged.job"]) == (JOB, JOB)
    assert run["metrics"] == [("loss", 1, 0.5), ("loss", 2, "NaN"), ("a_b", 2, "Infinity"), ("loss", 3, "-Infinity")]


async def test_run_is_the_same_after_a_restart_of_the_daemon(server: FakeServer, tmp_path: Path) -> None:
    store = FaultyStore()
    for step in (1, 2):
        async with sink_at(server, tmp_path, store) as sink:
            sink.take(figures(step, loss=0.5))
            await sink.send()
    [run] = server.runs.values()
    assert [step for _, step, _ in run["metrics"]] == [1, 2]


async def test_points_wait_while_the_server_is_away_and_the_oldest_are_lost(server: FakeServer, tmp_path: Path) -> None:
    async with sink_at(server, tmp_path) as sink:
        server.is_down = True
        sink.take(*(figures(step, loss=1.0, accuracy=0.5) for step in range(POINTS_WAITING_MAX + 100)))
        await sink.send()
        status = await sink.status()
        assert (status["waiting"], "503" in status["problem"]) == (POINTS_WAITING_MAX, True)
        server.is_down = False
        await sink.send()
        assert (await sink.status())["problem"] == ""
    [run] = server.runs.values()
    assert [step for key, step, _ in run["metrics"] if key == "loss"] == list(range(100, POINTS_WAITING_MAX + 100))
    assert max(server.batches) <= BATCH_METRICS_MAX


async def test_run_ends_with_its_job_and_runs_again_when_that_is_reopened(server: FakeServer, tmp_path: Path) -> None:
    async with sink_at(server, tmp_path) as sink:
        sink.take(figures(1, loss=0.5))
        sink.tell(JobAborted("enough", 1))
        await sink.send()
        assert server.runs["r0"]["status"] == "FAILED"
        sink.tell(JobReopened("again", 1))
        await sink.send()
        assert server.runs["r0"]["status"] == "RUNNING"


async def test_run_that_was_deleted_is_replaced(server: FakeServer, tmp_path: Path) -> None:
    async with sink_at(server, tmp_path) as sink:
        sink.take(figures(1, loss=0.5))
        await sink.send()
        server.runs = {"another": {}}
        sink.take(figures(2, loss=0.5))
        await sink.send()
        await sink.send()
    assert server.runs["r1"]["metrics"] == [("loss", 2, 0.5)]


async def test_token_is_sent_and_other_jobs_are_not(server: FakeServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    async with sink_at(server, tmp_path, token_file=str(token), jobs=["other"]) as sink:
        sink.take(figures(1, loss=0.5))
        await sink.send()
        assert server.runs == {}
        sink.take(JobMetrics("other", 1.0, 1, {"loss": 1.0}, None, None, None))
        await sink.send()
    assert server.tokens == {"Bearer secret"}


@pytest.mark.parametrize("url", ["localhost", "ftp://host", "http://user:secret@host"])
def test_url_of_another_kind_is_refused_without_its_password(url: str, tmp_path: Path) -> None:
    reason = refusal("mlflow", mlflow, {"url": url}, tmp_path)
    assert "http(s)://" in reason
    assert "secret" not in reason
