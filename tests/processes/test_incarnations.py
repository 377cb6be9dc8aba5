"""An incarnation, by which the daemon knows a worker, is nowhere that another worker or a viewer may look."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sqlite3
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import msgspec

from forged.auth.model import Role
from forged.cli.service.serve import DATABASE
from forged.client import EARLIEST, ForgedClient
from forged.elastic.coordinator.records import WorldRecord
from forged.elastic.messages import RescaleCompleted, WorkerFailed
from forged.kernel.messages import Record
from forged.launch.daemon_process import command, environment
from tests.processes.worker_script import JOB, STOP_FILE

TIMEOUT_S = 60.0
NAMES = ("a", "b", "c")
OPTIONS: dict[str, Any] = {
    "points": [],
    "shards": "",
    "has_origin": True,
    "origin_hangs": False,
    "replication": 1,
    "rate_bytes_per_s": None,
    "weight": 1.0,
    "mode": "shared",
    "config": {"stability_window_ms": 300, "failure_window_ms": 20, "failure_tolerance_percentage": 100},
}
WORKER = (
    "import logging; logging.basicConfig(level=logging.DEBUG);"
    "from tests.processes.data_worker_script import main; main()"
)
VIEWS = (
    ("status",),
    ("handlers",),
    ("plugins",),
    ("jobs",),
    ("jobs", "show", JOB),
    ("jobs", "watch", JOB, "--once"),
    ("workers",),
    ("workers", "show", "a", "--job", JOB),
    ("plan", "--job", JOB, "--workers", "3"),
    ("data",),
    ("data", "show", "--job", JOB),
    ("data", "audit", "--job", JOB),
    ("transfers", "--job", JOB),
    ("events",),
    ("tokens",),
    ("config",),
)


def forms_of(secret: bytes) -> Iterator[bytes]:
    """The secret as it is, and as logs and JSON write bytes."""
    yield secret
    yield secret.hex().encode()
    yield secret.hex().upper().encode()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        # A shorter text, because the end depends on what follows the secret.
        yield encode(secret)[:20]
    yield repr(secret)[2:-1].encode()
    yield json.dumps(secret.decode("latin-1"))[1:-1].encode()
    yield ", ".join(map(str, secret)).encode()


def found_in(text: bytes, secrets: set[bytes]) -> list[bytes]:
    return [form for secret in secrets for form in forms_of(secret) if form in text]


class Processes:
    """A daemon, workers and their pulses, as operators start them."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory = directory
        self.socket = directory / "forged.sock"
        self.pids: dict[str, int] = {}
        self.logs: dict[str, Path] = {}
        self._stack = stack
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def start_daemon(self) -> None:
        words = ("--data-dir", str(self.directory), "--socket", str(self.socket), "--listen", "tcp://127.0.0.1:0")
        command_line = command(
            "forged.cli.forged", "run", *words, "--http", "127.0.0.1:0", "--log-level", "debug", "--log-format", "json"
        )
        process = await self._start("daemon", command_line, {})
        assert process.stdout is not None
        assert b"is ready" in await process.stdout.readline(), self.logs["daemon"].read_text()

    async def start_worker(self, name: str, endpoint: str, token: str) -> None:
        options = OPTIONS | {"shards": str(self.directory / f"shards of {name}")}
        words = (sys.executable, "-c", WORKER, endpoint, name, str(self.directory), json.dumps(options))
        await self._start(name, words, {"FORGED_TOKEN": token})

    async def _start(self, name: str, words: Any, variables: dict[str, str]) -> asyncio.subprocess.Process:
        log = self.logs[name] = self.directory / f"{name}.log"
        error = self._stack.enter_context(log.open("wb"))
        process = self._running[name] = await asyncio.create_subprocess_exec(
            *words,
            stdin=DEVNULL,
            stdout=PIPE if name == "daemon" else error,
            stderr=error,
            env=environment() | variables,
        )
        self._stack.push_async_callback(_end, process)
        self.pids[name] = process.pid
        return process

    def pulse_of(self, name: str) -> int:
        threads = Path(f"/proc/{self.pids[name]}/task").glob("*/children")
        (pulse,) = {int(child) for thread in threads for child in thread.read_text().split()}
        return pulse

    def kill(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGKILL)

    async def ended(self, name: str) -> int:
        return await self._running[name].wait()

    async def incarnations(self) -> set[bytes]:
        """Those of the committed world, from a copy of the daemon's store."""
        copy = self.directory / "copy.sqlite3"
        await self.forgectl("backup", str(copy))
        with closing(sqlite3.connect(copy)) as database:
            key = f"elastic/{JOB}/world"
            (value,) = database.execute("SELECT value FROM kv WHERE key = ?", (key,)).fetchone()
        return set(msgspec.msgpack.decode(value, type=WorldRecord).incarnations)

    def stored(self) -> bytes:
        """All that the daemon's store has written."""
        return b"".join(path.read_bytes() for path in self.directory.glob(f"{DATABASE}*"))

    async def forgectl(self, *words: str) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *command("forged.cli.forgectl.main", "--socket", str(self.socket), *words, "--json"),
            stdout=PIPE,
            stderr=PIPE,
            env=environment(),
        )
        output, errors = await process.communicate()
        # An audit of an epoch that is not over, or has a repeated step, ends with 1.
        assert output or process.returncode == 0, (words, errors)
        return output + errors


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.communicate()


async def until_fact(client: ForgedClient, kind: type[Any], since: int, **wanted: Any) -> int:
    """The id of the first fact of this kind after `since` with these fields."""
    async with asyncio.timeout(TIMEOUT_S), client.facts(kind, since=since, jobs=[JOB]) as facts:
        async for item in facts:
            if isinstance(item, Record) and all(getattr(item.fact, name) == value for name, value in wanted.items()):
                return item.id
    raise AssertionError("the stream of facts has ended")


async def until_world(client: ForgedClient, size: int) -> None:
    """Wait until a world of so many workers is committed."""
    since = await until_fact(client, RescaleCompleted, EARLIEST)
    while (await client.cluster(JOB)).world_size != size:
        since = await until_fact(client, RescaleCompleted, since)


def metrics(listener: str | None, token: str) -> bytes:
    request = urllib.request.Request(f"{listener}/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        text: bytes = reply.read()
        return text


def of_process(pid: int) -> bytes:
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


async def test_incarnation_is_in_no_command_line_environment_log_fact_view_or_metric(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        processes = Processes(tmp_path, stack)
        await processes.start_daemon()
        async with ForgedClient(f"unix://{processes.socket}") as operator:
            status = await operator.status()
            token = await operator.create_token("workers", Role.WORKER, jobs=[JOB])
            viewer = await operator.create_token("metrics", Role.VIEWER)
            for name in NAMES:
                await processes.start_worker(name, status.listen[0], token)
            await until_world(operator, len(NAMES))
            secrets = await processes.incarnations()
            assert len(secrets) == len(NAMES)
            seen = {name: of_process(pid) for name, pid in processes.pids.items()}
            seen |= {f"pulse of {name}": of_process(processes.pulse_of(name)) for name in NAMES}
            processes.kill("c")
            failed = await until_fact(operator, WorkerFailed, EARLIEST, worker_id="c")
            await until_world(operator, len(NAMES) - 1)
            for words in (*VIEWS, ("story", f"{failed}")):
                seen[f"forgectl {' '.join(words)}"] = await processes.forgectl(*words)
            seen["/metrics"] = await asyncio.to_thread(metrics, status.http, viewer)
            (tmp_path / STOP_FILE).touch()
            async with asyncio.timeout(TIMEOUT_S):
                assert [await processes.ended(name) for name in ("a", "b")] == [0, 0], processes.logs["a"].read_text()
            seen["all facts"] = await processes.forgectl("events")
        seen |= {f"log of {name}": log.read_bytes() for name, log in processes.logs.items()}
    assert [name for name, text in seen.items() if not text] == []
    assert {name: forms for name, text in seen.items() if (forms := found_in(text, secrets))} == {}
    # The search finds what is there: the store has the secrets as they are.
    assert found_in(processes.stored(), secrets)
