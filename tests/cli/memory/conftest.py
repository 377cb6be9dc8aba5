"""A real daemon with a worker's device, and `forgectl memory` run on it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from forged.client import BlockingClient
from forged.elastic.messages import JoinJob
from forged.elastic.model import WorkerId
from forged.memory.messages import Handle, Wanted
from forged.memory.model import AllocationRequest, GpuDevice
from tests.cli.daemon_commands import DaemonCommands
from tests.client.threaded_daemon import ThreadedDaemon

JOB = "run"
GPU = "w0/gpu0"
INCARNATION = b"1" * 16
KIB = 1 << 10
TOTAL = 64 * KIB


class MemoryCommands(DaemonCommands):
    """A daemon with an empty device of the worker `w0`, and `forgectl memory` run on it."""

    group = "memory"

    def __init__(self, daemon: ThreadedDaemon, client: BlockingClient, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(daemon, client, capsys)
        client.request(JoinJob(JOB, WorkerId("w0", "127.0.0.1", 1), INCARNATION, os.getpid()))
        client.register_device(JOB, "w0", INCARNATION, GpuDevice("gpu0", TOTAL, compute_capability=(8, 6)))

    def allocate(self, name: str, size: int, **more: Any) -> Handle:
        wanted = Wanted(name, AllocationRequest(f"tensor {name}", size), **more)
        (allocated,) = self.client.allocate_memory(JOB, "w0", INCARNATION, GPU, [wanted])
        assert allocated.handle is not None
        return allocated.handle

    def free(self, *handles: Handle) -> None:
        self.client.free_memory(JOB, "w0", INCARNATION, GPU, handles)


@pytest.fixture
def commands(
    threaded_daemon: ThreadedDaemon, client: BlockingClient, capsys: pytest.CaptureFixture[str]
) -> MemoryCommands:
    return MemoryCommands(threaded_daemon, client, capsys)
