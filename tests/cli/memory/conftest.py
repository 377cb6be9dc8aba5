"""A real daemon with a worker's device, and `forgectl memory` run on it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from forged.cli.forgectl import main
from forged.client import BlockingClient
from forged.elastic.messages import JoinJob
from forged.elastic.model import WorkerId
from forged.memory.messages import Handle, Wanted
from forged.memory.model import AllocationRequest, GpuDevice
from tests.client.threaded_daemon import ThreadedDaemon

JOB = "run"
GPU = "w0/gpu0"
INCARNATION = b"1" * 16
KIB = 1 << 10
TOTAL = 64 * KIB


class MemoryCommands:
    """A daemon with an empty device of the worker `w0`."""

    def __init__(self, socket: str, client: BlockingClient, capsys: pytest.CaptureFixture[str]) -> None:
        self.socket = socket
        self._client = client
        self._capsys = capsys
        client.request(JoinJob(JOB, WorkerId("w0", "127.0.0.1", 1), INCARNATION, os.getpid()))
        client.register_device(JOB, "w0", INCARNATION, GpuDevice("gpu0", TOTAL, compute_capability=(8, 6)))

    def allocate(self, name: str, size: int, **more: Any) -> Handle:
        wanted = Wanted(name, AllocationRequest(f"tensor {name}", size), **more)
        (allocated,) = self._client.allocate_memory(JOB, "w0", INCARNATION, GPU, [wanted])
        assert allocated.handle is not None
        return allocated.handle

    def free(self, *handles: Handle) -> None:
        self._client.free_memory(JOB, "w0", INCARNATION, GPU, handles)

    def run(self, line: str) -> tuple[int, str, str]:
        """Run `forgectl memory`; returns exit code, output and errors."""
        code = main.main(["--socket", self.socket, "memory", *shlex.split(line)])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def lines(self, line: str) -> list[str]:
        """The output of a successful command."""
        code, out, err = self.run(line)
        assert (code, err) == (0, "")
        return out.splitlines()

    def json(self, line: str) -> Any:
        """The JSON output of a successful command."""
        return json.loads("\n".join(self.lines(f"{line} --json")))


@pytest.fixture
def commands(threaded_daemon: ThreadedDaemon, capsys: pytest.CaptureFixture[str]) -> Iterator[MemoryCommands]:
    with threaded_daemon.client() as client:
        yield MemoryCommands(threaded_daemon.socket, client, capsys)
