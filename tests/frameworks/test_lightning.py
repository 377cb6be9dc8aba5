"""Lightning's Trainer in real processes: what it computes when workers die and join."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks import lightning_script
from tests.frameworks.lightning_script import undisturbed
from tests.frameworks.test_trainer import TOTAL, ended
from tests.frameworks.trainer_script import Script
from tests.torch.test_run import close_to
from tests.torch.torch_cluster import TorchCluster, TorchWorker


def test_kill_and_join_lose_no_step_and_double_none(cluster: TorchCluster, tmp_path: Path) -> None:
    def start(name: str, holds: tuple[int, ...], dies_at: int = -1) -> TorchWorker:
        script = Script(cluster.endpoint, cluster.job, name, size=3, holds=holds, dies_at=dies_at)
        worker = cluster.workers[name] = TorchWorker(script, lightning_script.main)
        return worker

    start("a", (2, 7))
    start("b", (2,), 5)
    start("c", (2,))
    cluster.release()
    cluster.workers["a"].wait_for("held", lambda report: report["held"] == 7)
    joiner = start("d", ())
    while not cluster.client.cluster(cluster.job).joining:
        assert not joiner.all_of("error"), joiner.reports
    cluster.workers["a"].go()
    end, plain = ended(cluster, "acd"), undisturbed(TOTAL)
    assert close_to(end["values"], plain["values"])
    assert end["rate"] == pytest.approx(plain["rate"])
    for name in "ac":
        told = cluster.workers[name].all_of("step")
        assert [(report["step"], report["epoch"]) for report in told] == [(step, step // 4) for step in range(TOTAL)]
    joined = [(report["step"], report["epoch"]) for report in joiner.all_of("step")]
    assert joined == [(step, step // 4) for step in range(joined[0][0], TOTAL)]


def test_rank_0_alone_writes_and_its_checkpoint_is_resumed(cluster: TorchCluster, tmp_path: Path) -> None:
    for name in "ab":
        script = Script(cluster.endpoint, cluster.job, name, folder=str(tmp_path))
        cluster.workers[name] = TorchWorker(script, lightning_script.main)
    cluster.release()
    end = ended(cluster, "ab")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=4.ckpt", "step=8.ckpt"]
    again = TorchCluster(cluster.endpoint)
    try:
        script = Script(again.endpoint, again.job, "c", size=1, holds=(), folder=str(tmp_path), resumes=True)
        worker = again.workers["c"] = TorchWorker(script, lightning_script.main)
        assert close_to(worker.wait_for("end")["values"], end["values"])
        assert [report["step"] for report in worker.all_of("step")] == [8, 9]
    finally:
        again.close()
