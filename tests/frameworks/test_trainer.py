"""Hugging Face's Trainer in real processes: what it computes when workers die and join."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import forged.torch as ft
from forged.errors import RequestRefused
from tests.frameworks import trainer_script
from tests.frameworks.trainer_script import Script, undisturbed
from tests.torch.test_run import close_to
from tests.torch.torch_cluster import TorchCluster, TorchWorker

TOTAL = 10


def start(cluster: TorchCluster, name: str, folder: Path, **options: Any) -> TorchWorker:
    script = Script(cluster.endpoint, cluster.job, name, folder=str(folder), **options)
    worker = cluster.workers[name] = TorchWorker(script, trainer_script.main)
    return worker


def ended(cluster: TorchCluster, names: str) -> dict[str, Any]:
    """The end of the first of these workers, which all have the same values."""
    ends = [cluster.workers[name].wait_for("end") for name in names]
    assert all(end["values"] == ends[0]["values"] and end["end"] == TOTAL for end in ends)
    assert [cluster.workers[name].end() for name in names] == [0] * len(names)
    return ends[0]


def losses(history: list[dict[str, Any]]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in history if "loss" in row}


@pytest.mark.parametrize("is_causal", [False, True], ids=["classifier", "causal"])
def test_kill_and_join_lose_no_step_and_double_none(is_causal: bool, cluster: TorchCluster, tmp_path: Path) -> None:
    for name in "abc":
        start(
            cluster,
            name,
            tmp_path,
            size=3,
            is_causal=is_causal,
            holds=(2, 7) if name == "a" else (2,),
            dies_at=5 if name == "b" else -1,
        )
    cluster.release()
    cluster.workers["a"].wait_for("held", lambda report: report["held"] == 7)
    joiner = start(cluster, "d", tmp_path, size=3, is_causal=is_causal, holds=())
    while not cluster.client.cluster(cluster.job).joining:
        assert not joiner.all_of("error"), joiner.reports
    cluster.workers["a"].go()
    end = ended(cluster, "acd")
    plain = undisturbed(Script("", "", "", folder=str(tmp_path), is_causal=is_causal))
    assert close_to(end["values"], plain["values"])
    assert end["rate"] == pytest.approx(plain["rate"])
    for name in "ad":
        history = cluster.workers[name].all_of("end")[0]["history"]
        assert losses(history) == pytest.approx(losses(plain["history"]), rel=1e-3)
    for name in "ac":
        assert [report["step"] for report in cluster.workers[name].all_of("step")] == list(range(TOTAL))
    joined = [report["step"] for report in cluster.workers["d"].all_of("step")]
    assert joined == list(range(joined[0], TOTAL))
    assert 7 <= joined[0] < TOTAL
    logged = [report["logged"] for worker in cluster.workers.values() for report in worker.all_of("logged")]
    # Once for each two steps, and the figures of the whole training.
    assert sorted(logged) == [2, 4, 6, 8, 10, 10]
    # 40 samples are four steps an epoch.
    assert [report["epoch_end"] for report in cluster.workers["a"].all_of("epoch_end")] == [1.0, 2.0, 2.5]
    assert [report["epoch_end"] for report in cluster.workers["d"].all_of("epoch_end")] == [2.5]


def test_rank_0_alone_writes_and_its_checkpoint_is_resumed(cluster: TorchCluster, tmp_path: Path) -> None:
    arguments = {
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "load_best_model_at_end": True,
    }
    for name in "ab":
        start(cluster, name, tmp_path, arguments=arguments, has_ranks=name == "b")
    cluster.release()
    end = ended(cluster, "ab")
    saves = [report for worker in cluster.workers.values() for report in worker.all_of("saved")]
    assert sorted((report["saved"], report["writes"]) for report in saves) == [
        (4, False),
        (4, True),
        (8, False),
        (8, True),
        (10, False),
        (10, True),
    ]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-4",
        "checkpoint-8",
    ]
    assert [row["eval_loss"] for row in end["history"] if "eval_loss" in row]

    # A job of its own resumes where the trainer's own checkpoint was written.
    shutil.rmtree(tmp_path / "checkpoint-10")
    again = TorchCluster(cluster.endpoint)
    try:
        worker = start(again, "c", tmp_path, size=1, resumes=True, holds=(), arguments=arguments)
        assert close_to(worker.wait_for("end")["values"], end["values"])
        assert [report["step"] for report in worker.all_of("step")] == [8, 9]
    finally:
        again.close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps must be 1, got 4"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size must be False, got True"),
        ({"train_sampling_strategy": "group_by_length"}, "must be 'random' or 'sequential', got 'group_by_length'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(arguments: dict[str, Any], text: str, tmp_path: Path) -> None:
    script = Script("", "", "", folder=str(tmp_path), arguments=arguments)
    with pytest.raises(RequestRefused, match=text):
        ft.Trainer(
            model=trainer_script.model_of(script),
            args=trainer_script.arguments_of(script, ft.TrainingArguments),
            train_dataset=trainer_script.samples_of(script),
            global_batch=8,
            join={"job": "job"},
        )
