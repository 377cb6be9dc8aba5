"""Runs tests, each request in a fork of a process that has imported the libraries and nothing of this project.

A request is a line with a JSON list of node ids. The answer is a line with the exit code of pytest and its output. This
file is run as a script in the tree whose tests it runs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

LIBRARIES = (
    "_hypothesis_pytestplugin",
    "anyio._backends._asyncio",
    "anyio.pytest_plugin",
    "hypothesis.strategies",
    "msgspec",
    "numpy",
    "obstore",
    "pytest_asyncio.plugin",
    "structlog",
    "xdist.plugin",
    "xxhash",
)
# The plugins are imported before pytest could rewrite their assertions.
OPTIONS = ("-x", "-p", "no:cacheprovider", "-W", "ignore:Module already imported")


def serve() -> None:
    """Answer requests until the input ends."""
    sys.path[0] = str(Path.cwd())
    for library in LIBRARIES:
        with suppress(ImportError):
            import_module(library)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


def run(tests: Sequence[str]) -> tuple[int, str]:
    """The exit code of pytest for these tests, and its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = os.fork()
        if process == 0:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            code = pytest.main([*OPTIONS, *tests])
            sys.stdout.flush()
            os._exit(int(code))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        output.seek(0)
        return code, output.read()


if __name__ == "__main__":
    serve()
