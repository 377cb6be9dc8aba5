"""The global random generators of a process belong to its script: forged draws from its own."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forged.checkpoint
from forged.checkpoint import (
    BlockingCheckpoint,
    CheckpointException,
    CheckpointOptions,
    DistributedCheckpoint,
    FaultToleranceHandler,
    LoadOptions,
    RetryPolicy,
    SaveOptions,
    StorageOptions,
    create_checkpoint,
)
from forged.checkpoint.storage.locations import root_at
from forged.data.transfer.manager import DataTransferManager
from tests.client.threaded_daemon import ThreadedDaemon
from tests.worker.test_blocking import at, learn
from tests.worker.trainers import JOB, chain_after

SOURCES = Path(forged.checkpoint.__file__).parents[1]
SAVED_AND_RESTORED = {"getstate", "setstate", "get_state", "set_state"}
"""Checkpoints contain the states of the global generators."""
GLOBAL = {
    "random": {
        name for name in dir(random) if isinstance(getattr(getattr(random, name), "__self__", None), random.Random)
    },
    "numpy.random": {name for name in np.random.__all__ if name.islower()} - {"default_rng"},
}
"""The functions that draw from the global generators."""
TRAINS = """
import random, sys
import numpy as np
import forged

random.seed(5), np.random.seed(6)
state = {"w": np.zeros(3)}
with forged.join(sys.argv[1], job="run", state=state) as worker:
    for step in worker.steps(5):
        with step:
            state["w"] += worker.all_reduce(np.ones(3))
print(random.random(), np.random.random())
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ThreadedDaemon]:
    daemon = ThreadedDaemon(tmp_path)
    yield daemon
    daemon.close()


@contextmanager
def untouched() -> Iterator[None]:
    """The global generators continue as if the block had not run."""
    before, numpy_before = random.getstate(), repr(np.random.get_state())
    yield
    assert random.getstate() == before, "the generator of `random` has advanced"
    assert repr(np.random.get_state()) == numpy_before, "the generator of numpy has advanced"


def global_calls(path: Path) -> Iterator[str]:
    """The places in a module that name a function of a global generator."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in {*GLOBAL, "numpy"}:
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    drawing = {f"{module}.{name}" for module, names in GLOBAL.items() for name in names - SAVED_AND_RESTORED}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, dot, rest = ast.unparse(node).partition(".")
            if f"{modules.get(first, '')}{dot}{rest}" in drawing:
                yield f"{path.name}:{node.lineno} {ast.unparse(node)}"


def test_every_function_of_the_global_generators_is_known() -> None:
    assert {"random", "choice", "shuffle", "seed", "getrandbits", "uniform"} <= GLOBAL["random"]
    assert {"rand", "random", "shuffle", "seed", "permutation", "bytes"} <= GLOBAL["numpy.random"]


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrandom.random()",
        "import random as r\ndef f(draw=r.uniform): ...",
        "from random import choice\nchoice([1])",
        "import numpy as np\nnp.random.seed(1)",
        "from numpy import random\nrandom.rand()",
    ],
)
def test_use_of_a_global_generator_is_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(source)
    assert list(global_calls(tmp_path / "module.py"))


@pytest.mark.parametrize(
    "source",
    [
        "import random\nrandom.Random(1).random()",
        "import numpy as np\nnp.random.default_rng(1).random()",
        "import random\nrandom.getstate()",
        "def f(random):\n    return random.random()",
    ],
)
def test_use_of_an_own_generator_is_allowed(source: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(source)
    assert not list(global_calls(tmp_path / "module.py"))


def test_no_module_draws_from_a_global_generator() -> None:
    assert [found for path in sorted(SOURCES.rglob("*.py")) for found in global_calls(path)] == []


@pytest.mark.parametrize("layout", ["multi_shard", "consolidated"])
def test_checkpoint_calls_leave_the_global_generators(layout: str, tmp_path: Path) -> None:
    state: Any = {"w": np.arange(5.0)}
    with untouched():
        forged.checkpoint.save(tmp_path / "a", state, format=layout)
        forged.checkpoint.load(tmp_path / "a", state)
        forged.checkpoint.load(tmp_path / "a", {"w": np.zeros(5)}, only="w")
        forged.checkpoint.verify(tmp_path / "a")
        forged.checkpoint.view(tmp_path / "a")
        with BlockingCheckpoint(DistributedCheckpoint(None, root_at(tmp_path))) as checkpoints:
            prefix = checkpoints.save(state)
            checkpoints.save_async(state, options=SaveOptions("b")).result()
            checkpoints.load(state, options=LoadOptions(prefix, load_rng_state=False))
            assert len(checkpoints.list_checkpoints()) == 3
            checkpoints.delete_checkpoint("a")


def test_retries_with_jitter_leave_the_global_generators(tmp_path: Path) -> None:
    def fail() -> None:
        raise CheckpointException("no luck", retryable=True)

    policy = RetryPolicy(3, delay_s=0.001, jitter=1.0)
    storage = StorageOptions(connection_settings={"base_path": str(tmp_path)})
    with untouched():
        with pytest.raises(CheckpointException):
            FaultToleranceHandler(root_at(tmp_path), policy).execute_with_retry(fail)
        BlockingCheckpoint(create_checkpoint(None, CheckpointOptions(storage, policy))).save({"w": np.ones(2)})


def test_pauses_without_jitter_draw_nothing() -> None:
    def draw() -> float:
        raise AssertionError("there is nothing to draw for")

    assert list(RetryPolicy(3, delay_s=2.0).delays(draw)) == [2.0, 2.0]


def test_transfer_manager_draws_from_a_generator_of_its_own() -> None:
    with untouched():
        assert 0.0 <= DataTransferManager()._make_context.keywords["random"]() < 1.0


def test_client_and_worker_leave_the_global_generators(daemon: ThreadedDaemon) -> None:
    with untouched():
        with daemon.client() as client:
            client.create_job("bert", {"nodes": 8})
            client.status()
        with at(daemon.runner.endpoint) as worker:
            for step in worker.steps(5):
                learn(worker, step)
        assert worker.state["chain"][0] == chain_after(5)


def test_training_with_forged_draws_the_same_random_numbers(daemon: ThreadedDaemon) -> None:
    with daemon.client() as client:
        client.create_job(JOB, {"stability_window_ms": 0})
    command = [sys.executable, "-c", TRAINS, daemon.runner.endpoint]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    alone = "\n".join(re.findall(r"^(?:import random|import numpy|random\.seed|print).*", TRAINS, re.MULTILINE))
    undisturbed = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=True)
    assert done.stdout == undisturbed.stdout
