"""What a training script has configured for its worker; the same in every session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from forged.clock import Clock
from forged.data.sampling.sampler import ElasticSampler
from forged.data.training import TrainingData
from forged.jobs.model import SettingValue
from forged.log import Log
from forged.net.transport.port import Network
from forged.worker.process.worker_process import WorkerProcess
from forged.worker.transport.bulk_channel import BulkTransport
from forged.worker.transport.peer_tls import PeerTls


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """A worker's configuration."""

    job: str
    settings: dict[str, SettingValue] | None
    """The job settings that the script asks for; None accepts the settings that the job has."""
    attributes: Mapping[str, str]
    local_world_size: int
    token: str | None
    data: TrainingData | None
    sampler: ElasticSampler | None
    process: WorkerProcess
    network: Network | None
    peer_tls: PeerTls | None
    carrier: BulkTransport | None
    clock: Clock
    random: Random
    log: Log
