"""The model registry with 1,000 and 100,000 versions: a daemon over its Unix socket, against MLflow's server.

Each daemon is a process with its store on the disk; MLflow's server is one too, with its default number of workers and
an SQLite file in the same file system. It has 1,000 versions, which its server takes as long to register as a daemon
takes for 100,000. Both are asked over connections that stay open, by one caller and by 64 at once: `register` adds the
next version of a model, `get` reads a version, `latest` the highest of a model, `find` the first 10 in a state (in
MLflow, which cannot search by stage, with a tag), `transition` moves a version from one state or stage to another one.

The time in the daemon is that from the decoded request to the encoded reply.

MLflow is left out if it is not on the PATH.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import aiohttp
import msgspec

from benchmarks.daemon_process import SERVE, daemon_process, serve
from benchmarks.harness import Figure, main
from forged.client import ForgedClient
from forged.kernel.messages import ANY_JOB, Request
from forged.registry.messages import (
    FindModels,
    ImportedVersion,
    ImportModels,
    RegisterModel,
    ShowModel,
    TransitionModel,
)
from forged.registry.model import DeploymentState, ModelMetadata, ModelVersion

if TYPE_CHECKING:
    from forged.daemon import Daemon

SIZES = (1_000, 100_000)
MLFLOW_VERSIONS = 1_000
VERSIONS_OF_A_MODEL = 100
CALLERS = (1, 64)
ROUNDS = 3
SECONDS = 1.0
QUESTIONS = 5_000
FOUND_MAX = 10
LIMIT_MS = 1.0
FLAT = 0.5
"""With a hundred times as many versions, a question may take twice as long: the records are not in the caches."""
WRITES = ("register", "transition")
READS = ("get", "latest", "find")
AIMS = dict.fromkeys(WRITES, 40.0) | dict.fromkeys(READS, 20.0)
STATES = (DeploymentState.VALIDATING, DeploymentState.REGISTERED)
STAGES = ("Staging", "None")
START_TIMEOUT_S = 120.0
ATTEMPTS = 5
RETRY_S = 0.5
HOW_TO_INSTALL = (
    "MLflow is not on the PATH and is left out: python -m venv ~/mlflow && ~/mlflow/bin/pip install mlflow, then run"
    ' this with PATH="$PATH:$HOME/mlflow/bin"'
)

Act = Callable[[int], Awaitable[object]]
"""One operation of a caller, which has a number."""


class TimeQuestions(Request[list[float]], frozen=True):
    """Answer random questions in the daemon; returns the milliseconds that each took, in ascending order."""

    decides: ClassVar[bool] = False
    job_field: ClassVar[str | None] = ANY_JOB

    name: str
    models: int
    questions: int


def model_id(number: int) -> str:
    return f"model-{number}"


def metadata(model: int, number: int, state: DeploymentState = DeploymentState.REGISTERED) -> ModelMetadata:
    name = model_id(model)
    return ModelMetadata(
        model_id=name,
        name=name,
        version=ModelVersion(number, 0, 0),
        framework="pytorch",
        input_shape=(1, 3, 224, 224),
        output_shape=(1, 1000),
        size_bytes=1 << 30,
        checksum=f"sha256:{model:032x}{number:032x}",
        state=state,
        tags={"team": "vision", "dataset": f"set-{model % 10}"},
    )


def imported(model: int, number: int) -> ImportedVersion:
    """A version; the second of each model is in staging."""
    return ImportedVersion(metadata(model, number, DeploymentState.STAGING if number == 1 else STATES[1]))


def question(name: str, models: int, chosen: random.Random) -> Request[Any]:
    """A question about a random model."""
    model = model_id(chosen.randrange(models))
    if name == "get":
        return ShowModel(model, f"{chosen.randrange(VERSIONS_OF_A_MODEL)}.0.0")
    if name == "latest":
        return ShowModel(model)
    return FindModels(state=DeploymentState.STAGING, limit=FOUND_MAX)


# The daemon.


def _extend(daemon: Daemon) -> None:
    async def answer(request: TimeQuestions, _: object) -> list[float]:
        chosen = random.Random(7)
        encode = msgspec.msgpack.Encoder().encode
        times = []
        for _number in range(request.questions):
            asked = question(request.name, request.models, chosen)
            began = perf_counter()
            encode(await daemon.bus.ask(asked))
            times.append((perf_counter() - began) * 1e3)
            await asyncio.sleep(0)
        return sorted(times)

    daemon.bus.serve(TimeQuestions, answer, owner="bench")


class Ours:
    """A registry of a daemon, and its operations."""

    def __init__(self, endpoint: str, versions: int) -> None:
        self._endpoint = endpoint
        self._versions = versions
        self._models = -(-versions // VERSIONS_OF_A_MODEL)
        self._registered = count(VERSIONS_OF_A_MODEL)
        self._transitions = count()
        self._random = random.Random(7)

    async def fill(self) -> None:
        """Register all versions, one in a hundred in staging."""
        async with ForgedClient(self._endpoint) as client:
            for model in range(self._models):
                found = [imported(model, number) for number in range(VERSIONS_OF_A_MODEL)]
                done = await client.request(ImportModels(found, "benchmark"), timeout_s=60.0)
                assert not done.refused, done.refused[0]

    def rate(self, name: str, callers: int, seconds: float) -> float:
        """Operations per second of so many callers of one client."""
        return asyncio.run(self._rate(name, callers, seconds))

    async def _rate(self, name: str, callers: int, seconds: float) -> float:
        async with ForgedClient(self._endpoint) as client:
            return await _operations_per_s(
                lambda caller: client.request(self._operation(name, caller)), callers, seconds
            )

    def _operation(self, name: str, caller: int) -> Request[Any]:
        if name == "register":
            return self._registration()
        return self._transition(caller) if name == "transition" else question(name, self._models, self._random)

    def _registration(self) -> RegisterModel:
        number = next(self._registered)
        return RegisterModel(metadata(number % self._models, number))

    def _transition(self, caller: int) -> TransitionModel:
        """Each caller moves other versions, to and fro."""
        turn, place = divmod(next(self._transitions), self._models * 50)
        model, number = divmod(place, 50)
        return TransitionModel(model_id(model), ModelVersion(50 + number, 0, 0), STATES[turn % 2])

    async def times_ms(self, name: str, questions: int) -> list[float]:
        """How long questions take in the daemon."""
        async with ForgedClient(self._endpoint) as client:
            return await client.request(TimeQuestions(name, self._models, questions), timeout_s=120.0)


async def _operations_per_s(act: Act, callers: int, seconds: float) -> float:
    done = 0
    await act(0)
    began = perf_counter()
    deadline = began + seconds

    async def work(caller: int) -> None:
        nonlocal done
        while perf_counter() < deadline:
            await act(caller)
            done += 1

    await asyncio.gather(*map(work, range(callers)))
    return done / (perf_counter() - began)


# MLflow.


@contextmanager
def _mlflow(directory: str) -> Iterator[str | None]:
    """MLflow's server for the block; its URL, or None if it is not installed."""
    binary = shutil.which("mlflow")
    if binary is None:
        print(HOW_TO_INSTALL, file=sys.stderr)
        yield None
        return
    port = _free_port()
    command = [
        *(binary, "server", "--host", "127.0.0.1", "--port", f"{port}"),
        *("--backend-store-uri", f"sqlite:///{directory}/mlflow.db"),
        *("--default-artifact-root", f"{directory}/artifacts"),
    ]
    # In a session of its own, because its workers are processes of their own.
    with subprocess.Popen(
        command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            _wait_for(process, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("MLflow's server did not start")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Mlflow:
    """A registry of MLflow's server, and its operations."""

    def __init__(self, url: str, versions: int) -> None:
        self._api = f"{url}/api/2.0/mlflow/"
        self._models = -(-versions // VERSIONS_OF_A_MODEL)
        self._registered = count()
        self._transitions = count()
        self._random = random.Random(7)

    async def fill(self) -> None:
        async with self._session() as session:
            for model in range(self._models):
                await self._call(session, "POST", "registered-models/create", name=model_id(model))
                # One after the other: the numbers of versions are given in the order of their creation.
                for number in range(VERSIONS_OF_A_MODEL):
                    await self._create(session, model, state="staging" if number == 1 else "none")

    def rate(self, name: str, callers: int, seconds: float) -> float:
        return asyncio.run(self._rate(name, callers, seconds))

    async def _rate(self, name: str, callers: int, seconds: float) -> float:
        async with self._session() as session:
            return await _operations_per_s(lambda _: self._act(session, name), callers, seconds)

    def _session(self) -> aiohttp.ClientSession:
        limits = aiohttp.ClientTimeout(total=120.0)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=max(CALLERS)), timeout=limits)

    async def _act(self, session: aiohttp.ClientSession, name: str) -> object:
        model, version = self._random.randrange(self._models), self._random.randrange(1, VERSIONS_OF_A_MODEL)
        if name == "register":
            return await self._create(session, next(self._registered) % self._models)
        if name == "transition":
            return await self._transition(session)
        if name == "get":
            return await self._call(session, "GET", "model-versions/get", name=model_id(model), version=f"{version}")
        if name == "latest":
            return await self._call(session, "POST", "registered-models/get-latest-versions", name=model_id(model))
        fields = {"filter": "tag.state = 'staging'", "max_results": f"{FOUND_MAX}"}
        return await self._call(session, "GET", "model-versions/search", **fields)

    async def _create(self, session: aiohttp.ClientSession, model: int, **tags: str) -> object:
        pairs = [{"key": key, "value": value} for key, value in ({"team": "vision"} | tags).items()]
        fields = {"name": model_id(model), "source": f"s3://models/{model}", "tags": pairs}
        return await self._call(session, "POST", "model-versions/create", **fields)

    async def _transition(self, session: aiohttp.ClientSession) -> object:
        turn, place = divmod(next(self._transitions), self._models * 50)
        model, number = divmod(place, 50)
        fields = {"name": model_id(model), "version": f"{50 + number}", "stage": STAGES[turn % 2]}
        archive = {"archive_existing_versions": False}
        return await self._call(session, "POST", "model-versions/transition-stage", **fields, **archive)

    async def _call(self, session: aiohttp.ClientSession, verb: str, method: str, **fields: Any) -> object:
        """Call the server; again after a failure, because it ends its workers when the machine makes them slow."""
        given: dict[str, Any] = {"params": fields} if verb == "GET" else {"json": fields}
        for _ in range(ATTEMPTS):
            try:
                async with session.request(verb, self._api + method, **given) as response:
                    said = await response.read()
            except aiohttp.ClientConnectionError as error:
                said = repr(error).encode()
                await asyncio.sleep(RETRY_S)
                continue
            if response.status == 200:
                return json.loads(said)
        raise RuntimeError(f"MLflow fails {ATTEMPTS} times to answer {method}: {said[:500]!r}")


# Figures.


def _measure(quick: bool) -> Sequence[Figure]:
    sizes = (VERSIONS_OF_A_MODEL, 2 * VERSIONS_OF_A_MODEL) if quick else SIZES
    rounds, seconds, questions = (1, 0.05, 50) if quick else (ROUNDS, SECONDS, QUESTIONS)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory, ExitStack() as stack:
        registries: dict[str, Ours | Mlflow] = {}
        for size in sizes:
            (Path(directory) / f"{size}").mkdir()
            registries[f"{size}"] = Ours(
                stack.enter_context(daemon_process("benchmarks.registry", f"{directory}/{size}")), size
            )
        url = stack.enter_context(_mlflow(directory))
        reference = VERSIONS_OF_A_MODEL if quick else MLFLOW_VERSIONS
        if url is not None:
            registries["mlflow"] = Mlflow(url, reference)
        for registry in registries.values():
            asyncio.run(registry.fill())
        rates = _rates(registries, rounds, seconds)
        times = _times({size: registries[f"{size}"] for size in sizes}, rounds, questions)
    return [*_rate_figures(rates, sizes, reference), *_time_figures(times, sizes)]


def _rates(registries: Mapping[str, Ours | Mlflow], rounds: int, seconds: float) -> dict[tuple[str, str, int], float]:
    """The median rate of each registry, operation and number of callers; the registries take turns."""
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    order = list(registries)
    for _ in range(rounds):
        for name in (*WRITES, *READS):
            for callers in CALLERS:
                for which in order:
                    found[which, name, callers].append(registries[which].rate(name, callers, seconds))
        order.reverse()
    return {key: statistics.median(values) for key, values in found.items()}


def _times(registries: Mapping[int, Any], rounds: int, questions: int) -> dict[tuple[int, str], tuple[float, float]]:
    """The median and the p99 of each question in the daemon, at each size: each of the best round."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(rounds):
        for name in READS:
            for size, registry in registries.items():
                times = asyncio.run(registry.times_ms(name, questions))
                found[size, name].append((times[len(times) // 2], times[len(times) * 99 // 100]))
    return {
        key: (statistics.median(median for median, _ in values), statistics.median(p99 for _, p99 in values))
        for key, values in found.items()
    }


def _rate_figures(
    rates: Mapping[tuple[str, str, int], float], sizes: Sequence[int], reference: int
) -> Iterator[Figure]:
    for size in sizes:
        for callers in CALLERS:
            for name in (*WRITES, *READS):
                label = f"{name}, {size:,} versions, {callers} at once, against MLflow with {reference:,}"
                ours, theirs = rates[f"{size}", name, callers], rates.get(("mlflow", name, callers))
                yield Figure(label, "1/s", ours, theirs, AIMS[name])


def _time_figures(times: Mapping[tuple[int, str], tuple[float, float]], sizes: Sequence[int]) -> Iterator[Figure]:
    few, many = min(sizes), max(sizes)
    for name in READS:
        for size in sizes:
            label = f"{name} in the daemon, {size:,} versions, p99, against the limit"
            yield Figure(label, "ms", times[size, name][1], LIMIT_MS, aim=1.0, higher_is_better=False)
        label = f"{name} in the daemon, {many:,} versions, median, against {few:,} versions"
        yield Figure(label, "ms", times[many, name][0], times[few, name][0], aim=FLAT, higher_is_better=False)


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(sys.argv[2], extend=_extend)
    else:
        main("registry", _measure)
