"""Commands of `forgectl`, run on a real daemon."""

from __future__ import annotations

import json
import shlex
from typing import Any, ClassVar

import pytest

from forged.cli.forgectl import main
from forged.cli.process import EXIT_REFUSED
from forged.client import BlockingClient
from tests.client.threaded_daemon import ThreadedDaemon


class DaemonCommands:
    """A daemon, its client, and a group of the commands of `forgectl` run on it."""

    group: ClassVar[str]

    def __init__(self, daemon: ThreadedDaemon, client: BlockingClient, capsys: pytest.CaptureFixture[str]) -> None:
        self.daemon = daemon
        self.client = client
        self._capsys = capsys

    def run(self, line: str) -> tuple[int, str, str]:
        """Run a command of the group; returns exit code, output and errors."""
        code = main.main(["--socket", self.daemon.socket, self.group, *shlex.split(line)])
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

    def refused(self, line: str) -> str:
        """The error of a command that the daemon refuses."""
        code, out, err = self.run(line)
        assert (code, out) == (EXIT_REFUSED, "")
        return err.removesuffix("\n")
