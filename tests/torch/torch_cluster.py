"""A daemon and torch workers in real processes, forked from a server that has imported torch already."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from forged.client import BlockingClient
from tests.client.daemon_runner import SOON
from tests.torch import loading_script, train_script
from tests.torch.train_script import Script

PATIENCE_S = 60.0
_NUMBERS = itertools.count()


def context() -> Any:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(
        [
            train_script.__name__,
            loading_script.__name__,
            "tests.torch.sharded_script",
            "forged.torch.run",
            "forged.torch.tensors",
            "torch._dynamo",
        ]
    )
    return found


class TorchWorker:
    """A worker process and what it has reported."""

    def __init__(self, script: Any, main: Callable[..., None]) -> None:
        self.script = script
        self.reports: list[dict[str, Any]] = []
        ours, theirs = multiprocessing.Pipe()
        self._pipe: Connection = ours
        self.process: BaseProcess = context().Process(target=main, args=(script, theirs))
        self.process.start()
        theirs.close()

    def wait_for(self, key: str, where: Callable[[dict[str, Any]], bool] = lambda report: True) -> dict[str, Any]:
        """The first report with this key for which a condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        position = 0
        while True:
            for report in self.reports[position:]:
                if key in report and where(report):
                    return report
            position = len(self.reports)
            assert self._pipe.poll(max(0.0, deadline - time.monotonic())), (key, self.script, self.reports)
            try:
                self.reports.append(self._pipe.recv())
            except EOFError:
                raise AssertionError((f"ended without {key}", self.script, self.reports)) from None

    @property
    def rank(self) -> int:
        """Its rank in the last world that it has reported."""
        rank: int = self.all_of("world")[-1]["rank"]
        return rank

    def tell(self, word: str) -> None:
        """Send it a word."""
        self._pipe.send(word)

    def go(self) -> None:
        """Let it go on from where it holds."""
        self.wait_for("held")
        self.tell("go")

    def end(self) -> int:
        """Wait for its end; returns the exit code."""
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None, (self.script, self.drained())
        return self.process.exitcode

    def drained(self) -> list[dict[str, Any]]:
        """All that it has reported so far."""
        try:
            while self._pipe.poll():
                self.reports.append(self._pipe.recv())
        except EOFError:
            pass
        return self.reports

    def all_of(self, key: str) -> list[dict[str, Any]]:
        return [report for report in self.drained() if key in report]


class TorchCluster:
    """The workers of one job."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.job = f"job-{next(_NUMBERS)}"
        self.workers: dict[str, TorchWorker] = {}
        self.client = BlockingClient(endpoint, reconnect=SOON).__enter__()

    def start(self, name: str, main: Callable[..., None] = train_script.main, **options: Any) -> TorchWorker:
        script = Script(self.endpoint, self.job, name, **options)
        worker = self.workers[name] = TorchWorker(script, main)
        return worker

    def start_all(self, names: str, victim: str = "", **options: Any) -> None:
        """Start these workers; only the victim fails."""
        sound = {key: value for key, value in options.items() if key not in {"fails", "phase", "at", "times"}}
        for name in names:
            self.start(name, size=len(names), **(options if name == victim or not victim else sound))

    def release(self, *, but: str = "", **settings: Any) -> None:
        """Let all go on once they train together; from now on fewer workers are enough."""
        for worker in self.workers.values():
            worker.wait_for("held")
        job = self.client.job(self.job)
        self.client.change_job(self.job, job.settings | {"min_workers": 1} | settings, job.version)
        self.release_all(but)

    def release_all(self, but: str = "") -> None:
        """Let all go on that hold, except one that has been killed."""
        for name, worker in self.workers.items():
            if worker.script.holds and name != but:
                worker.go()

    def close(self) -> None:
        for worker in self.workers.values():
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()
        self.client.__exit__(None, None, None)
