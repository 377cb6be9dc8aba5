"""Sends the training metrics of jobs to an MLflow server, by its REST API.

Invariants:
- One MLflow run for each job, found again by a file after a restart of the daemon: it outlives every worker.
- Points that the server does not take wait, at most `POINTS_WAITING_MAX` of a job; then the oldest are lost.
- A run ends with its job: `FINISHED` or `FAILED`. It runs again when the job is reopened.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec

from forged.elastic.messages import JobAborted, JobCompleted, JobReopened
from forged.metrics.messages import JobMetrics
from forged.plugins import Call, ConfigError, ForgedError, PluginContext, Problem, Record, Role, Unavailable

if TYPE_CHECKING:
    import aiohttp

API_VERSION = 1

API = "/api/2.0/mlflow"
POINTS_WAITING_MAX = 600
"""Ten minutes of one job."""
BATCH_METRICS_MAX = 900
"""The server takes at most 1000."""
ANSWER_CHARS_MAX = 300
SEND_EVERY_S = 2.0
ABSENT = "RESOURCE_DOES_NOT_EXIST"
EXISTS = "RESOURCE_ALREADY_EXISTS"
_NO_NAME = re.compile(r"[^A-Za-z0-9_\-. /]")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    experiment: str = "forged"
    token_file: str = ""
    jobs: list[str] = []
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=50)] = 10.0


def register(context: PluginContext) -> None:
    """Send the metrics of the jobs that the settings name."""
    settings = context.settings(Settings)
    parts = urlsplit(settings.url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        problem = Problem(f"plugins.{context.name}.url", parts.hostname or "", "http(s)://HOST[:PORT], without a user")
        raise ConfigError("mlflow_url", "this is no address of an MLflow server", "name its tracking URI", [problem])
    sink = MlflowSink(context, settings, Server(settings, _token(context.name, settings)))
    context.on_signal(JobMetrics, sink.take, name="metrics")
    context.every(SEND_EVERY_S, sink.send, name="send")
    context.on((JobCompleted, JobAborted, JobReopened), sink.follow_job, name="jobs")
    context.command("status", sink.status, help="show runs and what waits", needs=Role.VIEWER)
    context.on_stop(sink.close)


def _token(name: str, settings: Settings) -> str:
    if not settings.token_file:
        return ""
    try:
        return Path(settings.token_file).read_text().strip()
    except (OSError, ValueError) as error:
        problem = Problem(f"plugins.{name}.token_file", settings.token_file, f"a readable file: {error}")
        raise ConfigError("mlflow_token", "the token cannot be read", "name another file", [problem]) from error


class ServerRefused(ForgedError):
    """The server has answered with an error."""


class Server:
    """The REST API of one MLflow server."""

    def __init__(self, settings: Settings, token: str) -> None:
        self._url = settings.url.rstrip("/")
        self._timeout_s = settings.timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, **fields: str) -> dict[str, Any]:
        return await self._call("GET", path, params=fields)

    async def post(self, path: str, **fields: Any) -> dict[str, Any]:
        return await self._call("POST", path, data=msgspec.json.encode(fields))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(self, method: str, path: str, **what: Any) -> dict[str, Any]:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers | {"Content-Type": "application/json"})
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.request(method, f"{self._url}{API}/{path}", allow_redirects=False, **what) as response,
            ):
                body = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = f"{self._url}: {error or type(error).__name__}"
            raise Unavailable("mlflow_unreachable", reason, "check that the server runs") from error
        try:
            answer = msgspec.json.decode(body) if body else {}
        except msgspec.DecodeError:
            answer = {"message": body[:ANSWER_CHARS_MAX].decode(errors="replace")}
        if response.status != 200:
            said = answer if isinstance(answer, dict) else {}
            text = f"{path}: {response.status}: {said.get('message', '')}"[:ANSWER_CHARS_MAX]
            raise ServerRefused(str(said.get("error_code", "mlflow_refused")), text)
        return answer if isinstance(answer, dict) else {}


class MlflowSink:
    """The runs of all jobs, and the points that wait for the server."""

    def __init__(self, context: PluginContext, settings: Settings, server: Server) -> None:
        self._context = context
        self._settings = settings
        self._server = server
        self._file = context.directory() / "runs.json"
        self._runs: dict[str, str] = _read_runs(self._file)
        """By history and job."""
        self._points: dict[str, deque[JobMetrics]] = {}
        self._states: dict[str, tuple[str, float]] = {}
        """Jobs whose runs are to get another state: that, and since when."""
        self._experiment = ""
        self._sent = 0
        self._problem = ""

    def take(self, metrics: JobMetrics, call: Call) -> None:
        """Let a job's figures wait for the next delivery."""
        if not self._settings.jobs or metrics.job in self._settings.jobs:
            self._points.setdefault(metrics.job, deque(maxlen=POINTS_WAITING_MAX)).append(metrics)

    def follow_job(self, record: Record) -> None:
        """A job has ended or begins again."""
        states = {"JobCompleted": "FINISHED", "JobAborted": "FAILED", "JobReopened": "RUNNING"}
        self._states[record.job] = states[record.type], record.at

    async def send(self) -> None:
        """Send all that waits."""
        try:
            for job, points in list(self._points.items()):
                await self._send(job, points)
                if not points:
                    self._points.pop(job, None)
            for job, (state, at) in list(self._states.items()):
                await self._tell_state(job, state, at)
                self._states.pop(job, None)
        except (Unavailable, ServerRefused) as error:
            if str(error) != self._problem:
                self._context.log.warning("the MLflow server takes no metrics; they wait", reason=str(error))
            self._problem = str(error)
        else:
            self._problem = ""

    def status(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The runs by job, and what waits."""
        runs = {
            key.partition("/")[2]: run for key, run in self._runs.items() if key == self._key(key.partition("/")[2])
        }
        waiting = sum(map(len, self._points.values()))
        return {"runs": runs, "sent": self._sent, "waiting": waiting, "problem": self._problem}

    async def close(self) -> None:
        """Close the connection."""
        await self._server.close()

    def _key(self, job: str) -> str:
        return f"{self._context.history}/{job}"

    async def _send(self, job: str, points: deque[JobMetrics]) -> None:
        while points:
            run = await self._run(job)
            metrics: list[dict[str, Any]] = []
            count = 0
            for point in points:
                found = _metrics(point)
                if count and len(metrics) + len(found) > BATCH_METRICS_MAX:
                    break
                metrics += found
                count += 1
            try:
                await self._server.post("runs/log-batch", run_id=run, metrics=metrics)
            except ServerRefused as error:
                if error.code == ABSENT:
                    self._forget(job)
                raise
            for _ in range(min(count, len(points))):
                points.popleft()
            self._sent += count

    async def _tell_state(self, job: str, state: str, at: float) -> None:
        run = self._runs.get(self._key(job))
        if run is None:
            return
        ended = {} if state == "RUNNING" else {"end_time": int(at * 1000)}
        try:
            await self._server.post("runs/update", run_id=run, status=state, **ended)
        except ServerRefused as error:
            if error.code != ABSENT:
                raise
            self._forget(job)

    async def _run(self, job: str) -> str:
        """The id of a job's run, which is created if there is none."""
        known = self._runs.get(self._key(job))
        if known is not None:
            return known
        experiment = self._experiment = self._experiment or await self._find_experiment()
        tags = [{"key": "forged.job", "value": job}, {"key": "forged.history", "value": self._context.history}]
        answer = await self._server.post(
            "runs/create",
            experiment_id=experiment,
            run_name=job,
            start_time=int(self._context.clock.wall() * 1000),
            tags=tags,
        )
        run = str(answer["run"]["info"]["run_id"])
        self._runs[self._key(job)] = run
        self._store()
        return run

    async def _find_experiment(self) -> str:
        name = self._settings.experiment
        try:
            found = await self._server.get("experiments/get-by-name", experiment_name=name)
            return str(found["experiment"]["experiment_id"])
        except ServerRefused as error:
            if error.code != ABSENT:
                raise
        return str((await self._server.post("experiments/create", name=name))["experiment_id"])

    def _forget(self, job: str) -> None:
        self._runs.pop(self._key(job), None)
        self._experiment = ""
        self._store()

    def _store(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self._runs))
        new.replace(self._file)


def _read_runs(file: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except (FileNotFoundError, msgspec.DecodeError):
        # Without it each job gets another run.
        return {}


def _metrics(point: JobMetrics) -> list[dict[str, Any]]:
    values = dict(point.values)
    for name in ("steps_per_s", "samples_per_s", "goodput"):
        value = getattr(point, name)
        if value is not None:
            values[f"forged/{name}"] = value
    at = int(point.at * 1000)
    return [
        {"key": _NO_NAME.sub("_", name), "value": _value(value), "timestamp": at, "step": point.step}
        for name, value in values.items()
    ]


def _value(value: float) -> float | str:
    """JSON has no NaN and no infinity; the server takes their names."""
    if value - value == 0.0:
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
