"""`torchrun --rdzv-backend=forged`: real agents of torchrun, a real daemon, and a script of torch alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from forged.client import BlockingClient
from forged.elastic.phases import Phase
from tests.client.threaded_daemon import ThreadedDaemon
from tests.launch.launch_process import OutputProcess

SCRIPT = str(Path(__file__).parent / "torchrun_script.py")

pytestmark = pytest.mark.skipif(
    not entry_points(group="torchrun.handlers", name="forged"), reason="forged is not installed here"
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ThreadedDaemon]:
    daemon = ThreadedDaemon(tmp_path)
    yield daemon
    daemon.close()


def agent(daemon: ThreadedDaemon, stop: Path) -> OutputProcess:
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.05"]
    options += ["--rdzv-backend=forged", f"--rdzv-endpoint={daemon.runner.endpoint}", "--rdzv-id=llm"]
    return OutputProcess(sys.executable, "-m", "torch.distributed.run", *options, SCRIPT, str(stop))


def started(agent: OutputProcess, world_size: int) -> int:
    """Wait until the worker of an agent is in a world of this size; returns its process."""
    [found] = agent.wait_for(rf"world of {world_size}: rank \d, pid (\d+)")
    return int(found[1])


def test_agents_come_go_and_start_their_workers_again(daemon: ThreadedDaemon, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with agent(daemon, stop) as first, agent(daemon, stop) as second:
        started(first, 2)
        os.kill(started(second, 2), signal.SIGKILL)
        started(first, 2)
        started(second, 2)
        # Nobody tells the first agent but the pulse and the broken connection.
        second.process.kill()
        started(first, 1)
        with agent(daemon, stop) as third:
            started(third, 2)
            started(first, 2)
            third.end(signal.SIGTERM)
            started(first, 1)
        stop.touch()
        assert first.end() == 0
    with BlockingClient(daemon.runner.endpoint) as client:
        assert client.cluster("llm").phase is Phase.COMPLETED
    with agent(daemon, stop) as late:
        assert late.end() != 0
        assert any("the rendezvous llm is closed" in line for line in late.lines)
