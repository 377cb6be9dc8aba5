"""Runs tests in a copy of the tree in which one file is broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.seed_map import ROOT
from tests.seed_map_mutants.mutation import Mutation

COPIED = ("forged", "tests")
"""What a test imports; the rest of the tree is linked."""
FORK_SERVER = "tests/seed_map_mutants/fork_server.py"
PASSED, FAILED = 0, 1
"""Exit codes of pytest; other ones mean that no test ran."""


class Outcome(StrEnum):
    """What the tests said of a mutant."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    INVALID = "invalid"
    """The tests could not run."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one mutant, with the output of its tests."""

    outcome: Outcome
    output: str


class TreeCopy:
    """A copy of the tree, in which one file at a time is broken."""

    def __init__(self, root: Path, tests: ForkServer) -> None:
        self._root = root
        self._tests = tests

    def judge(self, mutation: Mutation, tests: Sequence[str]) -> Verdict:
        """Run the tests with this mutation."""
        target = self._root / mutation.path
        source, times = target.read_text(), target.stat()
        target.write_text(mutation.applied(source))
        try:
            code, output = self._tests.run(tests)
        finally:
            target.write_text(source)
            os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
        return Verdict({PASSED: Outcome.SURVIVED, FAILED: Outcome.CAUGHT}.get(code, Outcome.INVALID), output)


class ForkServer:
    """`fork_server.py` in a tree."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, tests: Sequence[str]) -> tuple[int, str]:
        """The exit code of pytest for these tests, and its output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(tests) + "\n")
        self._process.stdin.flush()
        code, output = json.loads(self._process.stdout.readline())
        return code, output


@contextmanager
def tree_copy() -> Iterator[TreeCopy]:
    """A copy of the tree for the block."""
    with TemporaryDirectory(prefix="forged-mutants-") as directory, ExitStack() as stack:
        root = Path(directory)
        for path in ROOT.iterdir():
            if path.name in COPIED:
                # With the times of the files, so that compiled modules stay valid.
                shutil.copytree(path, root / path.name, symlinks=True)
            elif not path.name.startswith("."):
                (root / path.name).symlink_to(path)
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, FORK_SERVER],
                cwd=root,
                # A module that was compiled while broken must not outlive its mutation.
                env={**os.environ, "PYTHONPATH": directory, "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(process.terminate)
        yield TreeCopy(root, ForkServer(process))
