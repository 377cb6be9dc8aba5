"""Runs of sharded models: each world makes the model anew, and loads it from the newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import forged.torch as ft
from forged import checkpoint
from tests.client.threaded_daemon import ThreadedDaemon
from tests.torch import sharded_script
from tests.torch.test_run import close_to
from tests.torch.torch_cluster import TorchCluster
from tests.torch.train_script import Script, batch_of, loss_of, model_of, optimizer_of, values_of

TOTAL = 12


def test_fewer_workers_go_on_from_the_checkpoint_when_one_dies(tmp_path: Path) -> None:
    daemon = ThreadedDaemon(tmp_path)
    cluster = TorchCluster(daemon.runner.endpoint)
    try:
        folder = str(tmp_path / "checkpoints")
        for name in "abc":
            fails = "kill" if name == "b" else ""
            cluster.start(name, sharded_script.main, size=3, total=TOTAL, fails=fails, at=8, checkpoints=folder)
        cluster.release()
        for name in "ac":
            assert cluster.workers[name].wait_for("end")["end"] == TOTAL
        assert [(world["size"], world["resumed"]) for world in cluster.workers["a"].all_of("world")] == [(3, 0), (2, 5)]
    finally:
        cluster.close()
        daemon.close()
    script = Script("", "", "")
    model, wanted = model_of(script), model_of(script)
    opt, wanted_opt = optimizer_of(model), optimizer_of(wanted)
    found = checkpoint.Checkpoints(folder).resume({"state": ft.State(model=model, opt=opt)})
    for step in range(TOTAL):
        loss_of(wanted, *batch_of(step)).backward()
        wanted_opt.step()
        wanted_opt.zero_grad()
    assert found == TOTAL
    assert close_to(values_of(model), values_of(wanted))
