"""A daemon in a process of its own, started as an operator would."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forged.client import BlockingClient

ENDS_WITHIN_S = 30.0


class DaemonProcess:
    """`forged run` in a directory, by default on a Unix socket alone; killed at the end of the block."""

    def __init__(self, directory: Path, *flags: str, listen: str = "127.0.0.1:0", **settings: Any) -> None:
        self.directory = directory
        self.socket = directory / "forged.sock"
        self.log: list[dict[str, Any]] = []
        """What was read of its log so far."""
        self._settings = directory / "forged.toml"
        self._settings.write_text("".join(f"{key} = {value!r}\n" for key, value in settings.items()))
        self._flags = ["--config", str(self._settings), "--data-dir", str(directory), "--socket", str(self.socket)]
        self._flags += ["--listen", listen, *flags]

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "forged.cli.forged", "run", *self._flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.output = self.read_line()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def read_line(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, name: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal; returns the exit code, the rest of its output, and its error output outside the log."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.send_signal(name)
        kill_timer = threading.Timer(ENDS_WITHIN_S, self.process.kill)
        kill_timer.start()
        try:
            # Not `communicate`, which does not know of what the streams have read ahead in `wait_for`.
            written, output = self.process.stderr.read(), self.process.stdout.read()
            self.process.wait()
        finally:
            kill_timer.cancel()
        lines = written.splitlines()
        self.log += [json.loads(line) for line in lines if line.startswith("{")]
        return self.process.returncode, output, "\n".join(line for line in lines if not line.startswith("{"))

    def wait_for(self, event: str, **fields: Any) -> dict[str, Any]:
        """Read its log up to an event with these fields."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(json.loads(line))
            if {"event": event, **fields}.items() <= self.log[-1].items():
                return self.log[-1]
        raise AssertionError(f"the daemon has ended without saying {event!r}: {self.log}")

    def client(self, **options: Any) -> BlockingClient:
        return BlockingClient(f"unix://{self.socket}", **options)
