"""Runs of sharded models: each world makes the model anew, and loads it from the newest checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forged.torch as ft
from forged import checkpoint
from tests.client.threaded_daemon import ThreadedDaemon
from tests.torch import sharded_script
from tests.torch.test_run import close_to
from tests.torch.torch_cluster import TorchCluster
from tests.torch.train_script import Script, batch_of, loss_of, model_of, optimizer_of, values_of

TOTAL = 12
LONG = 200
"""Steps that leave a joining group the time to come in."""
SCRIPT = Script("", "", "")


def wanted(total: int = TOTAL) -> dict[str, Any]:
    """The values after all steps of one process without forged."""
    model = model_of(SCRIPT)
    opt = optimizer_of(model)
    for step in range(total):
        loss_of(model, *batch_of(step)).backward()
        opt.step()
        opt.zero_grad()
    return values_of(model)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TorchCluster]:
    daemon = ThreadedDaemon(tmp_path)
    cluster = TorchCluster(daemon.runner.endpoint)
    yield cluster
    cluster.close()
    daemon.close()


def test_fewer_workers_go_on_from_the_checkpoint_when_one_dies(cluster: TorchCluster, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    for name in "abc":
        fails = "kill" if name == "b" else ""
        cluster.start(name, sharded_script.main, size=3, total=TOTAL, fails=fails, at=8, checkpoints=folder)
    cluster.release()
    for name in "ac":
        assert cluster.workers[name].wait_for("end")["end"] == TOTAL
    assert [(world["size"], world["resumed"]) for world in cluster.workers["a"].all_of("world")] == [(3, 0), (2, 5)]
    model = model_of(SCRIPT)
    opt = optimizer_of(model)
    found = checkpoint.Checkpoints(folder).resume({"state": ft.State(model=model, opt=opt)})
    assert found == TOTAL
    assert close_to(values_of(model), wanted())


def test_group_that_dies_is_replaced_with_the_state_of_the_other_group(cluster: TorchCluster) -> None:
    """Two groups of two, of which one loses a process, and then another group; without a checkpoint."""
    for name in ("a0", "a1", "b0", "b1"):
        fails = "kill" if name == "b1" else ""
        cluster.start(name, sharded_script.main, size=4, total=LONG, fails=fails, at=5, group_size=2, holds_again=8)
    cluster.release(min_workers=2)
    a0, a1, b0 = (cluster.workers[name] for name in ("a0", "a1", "b0"))
    for worker in (a0, a1):
        worker.wait_for("held", lambda report: report["held"] == 8)
    # Its launcher ends what is left of a group.
    b0.process.kill()
    late = [
        cluster.start(f"c{rank}", sharded_script.main, size=4, total=LONG, group_size=2, holds=False)
        for rank in range(2)
    ]
    while cluster.client.cluster(cluster.job).joining < 2:
        assert all(worker.process.is_alive() for worker in late), [worker.drained() for worker in late]
    for worker in (a0, a1):
        worker.tell("go")
    values = [worker.wait_for("end") for worker in (a0, a1, *late)]
    assert [one["end"] for one in values] == [LONG] * 4
    for parts in (values[:2], values[2:]):
        whole = {name: parts[0]["values"][name] + parts[1]["values"][name] for name in parts[0]["values"]}
        assert close_to(whole, wanted(LONG))
    assert [report["size"] for report in a0.all_of("world")] == [4, 2, 4]
    (resumed,) = [report["resumed"] for report in late[0].all_of("world")]
    assert 8 < resumed < LONG
