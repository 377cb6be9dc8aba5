"""Simulated workers: one client sends the requests of several workers, without training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import forged
from forged.client import BlockingClient
from forged.data import DataShard, ElasticSampler, FunctionOrigin, TrainingData
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.messages import (
    INCARNATION_BYTES,
    JoinJob,
    ReportReady,
    ReportStopped,
    RescaleCompleted,
    RescaleStarted,
    RescaleSynchronising,
)
from forged.elastic.model import WorkerId
from forged.jobs.model import SettingValue
from forged.kernel.messages import Record

LEARNING_RATE, BATCH = 0.1, 64
SAMPLES, SHARDS, SAMPLE_BYTES = 100, 5, 8
STEPS_PER_EPOCH = 10


def incarnation_of(name: str) -> bytes:
    return name.encode().ljust(INCARNATION_BYTES, b".")


def train(client: BlockingClient, job: str, *names: str) -> None:
    """Let these workers join a job and form its first world."""
    settings: dict[str, SettingValue] = {"min_workers": len(names), "stability_window_ms": 0}
    with client.facts(RescaleStarted, RescaleSynchronising, RescaleCompleted, jobs=[job]) as facts:
        for port, name in enumerate(names, 1):
            worker = WorkerId(name, "127.0.0.1", port)
            client.request(JoinJob(job, worker, incarnation_of(name), settings=settings))
        _agree(client, job, names, (item.fact for item in facts if isinstance(item, Record)))


def _agree(client: BlockingClient, job: str, names: tuple[str, ...], facts: Iterator[object]) -> None:
    for fact in facts:
        if isinstance(fact, RescaleStarted):
            for name in names:
                stop = ReportStopped(job, name, incarnation_of(name), fact.attempt, 0, 0, LEARNING_RATE, BATCH, False)
                client.request(stop)
        elif isinstance(fact, RescaleSynchronising):
            for name in set(names) - {fact.source.id}:
                client.request(ReportReady(job, name, incarnation_of(name), fact.attempt))
        else:
            return


def train_with_data(endpoint: str, job: str, name: str, directory: Path, steps: int) -> None:
    """Train with data in a real worker of this process, alone."""

    def write(shard: DataShard, file: BinaryIO) -> None:
        file.write(bytes(SAMPLE_BYTES * shard.size))

    data = TrainingData(SAMPLES, SHARDS, directory, origin=FunctionOrigin(write))
    sampler = ElasticSampler(SAMPLES, SAMPLES // STEPS_PER_EPOCH)
    config = ElasticTrainingConfig(stability_window_ms=0)
    with forged.join(endpoint, job=job, worker_id=name, state={}, config=config, data=data, sampler=sampler) as worker:
        for step in worker.steps(steps):
            with step:
                assert len(worker.batch()) == SAMPLES // STEPS_PER_EPOCH
