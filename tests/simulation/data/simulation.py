"""Training data in simulated jobs: what there is of it, where it lies, and what happens to it on its way.

Law: what lies on a host outlives the processes, and not the host. Every draw comes from a source of its own, so that
worlds without data are what they are without this. What a bad way does to bytes it does to those of shards alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, BinaryIO, TypeVar

import anyio
import msgspec
from anyio import CapacityLimiter

from forged.data.model import Dataset, DataShard
from forged.data.sampling.sampler import ElasticSampler, SamplingMode
from forged.data.store.errors import StoreFailed
from forged.data.store.memory import MemoryShardStore
from forged.data.training import TrainingData
from forged.elastic.config import ElasticTrainingConfig
from forged.elastic.model import LostDataPolicy, RedistributionType
from forged.net.protocol.messages import Message
from forged.worker.transport.bulk_channel import LoopBulkTransport, LoopChannel
from forged.worker.transport.dialogue_wire import Conversation, DialogueWire, cut_off
from forged.worker.transport.peer_messages import PeerMessage
from tests.data.damage import damage
from tests.simulation.elastic.truth import SimulatedWorker

T = TypeVar("T")

WORLDS_WITH_DATA = 0.4
SAMPLES = (20, 120)
SHARDS_MAX = 12
BATCH = (3, 24)
BYTES_PER_SAMPLE = (8, 200, 2000)
FULL_S = (0.5, 8.0)
"""For how long there is no room for shards somewhere."""
DELAY_S = 0.5
SHARD_TAKES_S = (0.0, 0.1, 1.0, 4.0)
"""How long a shard is on its way from worker to worker, at least."""
WITHOUT_A_STOP = 0.5
"""So many jobs with data move it in the background."""
STEADY_TIMEOUT_MS = 20_000
ORIGIN_HANGS = (0.0, 0.0, 0.1, 0.4)
ORIGIN_TIMEOUT_S = (0.5, 3.0, 60.0)
WEIGHED_JOBS = 0.3
WEIGHTS = (1.0, 1.0, 0.3, 3.0, 1e-300, 1e300)
"""How much of the data a process should hold, where they are not all alike."""

MUST_HAPPEN = (
    "shards travel",
    "data moves while training goes on",
    "steps are committed while data moves",
    "a worker dies while data moves and training goes on",
    "what moves while training goes on is given up",
    "a shard is dropped",
    "a shard is lost",
    "a job waits for shards, and they come",
    "a job is given up because shards are lost",
    "a worker comes back to its shards",
    "shares differ by weight",
    "a way is cut while a shard comes",
    "a shard is changed on its way",
    "a bad copy is reported",
    "a disk spoils a shard",
    "a shard that a disk has spoilt is found",
    "a shard that a disk has spoilt is dropped",
    "the origin fails",
    "the origin hangs",
    "a shard comes of an origin that has hung",
    "the origin gives a shard to no worker",
    "there is no room for a shard",
    "an epoch is finished",
    "an epoch is proven",
)
"""What happens somewhere in the first few hundred worlds with data."""


def has_data(seed: int) -> bool:
    """Whether the jobs of an elastic world train with data."""
    return Random(f"data {seed}").random() < WORLDS_WITH_DATA


class Disk(MemoryShardStore):
    """Where the processes of one slot keep their shards on one host."""

    def __init__(self, watch: Callable[[Disk, int], None], met: Callable[[str], None]) -> None:
        super().__init__()
        self.is_full = False
        self.is_gone = False
        """With its host."""
        self.user: SimulatedWorker | None = None
        """The process that was here last."""
        self.rotten: dict[int, bytes] = {}
        """What lies in the place of shards that the disk has spoilt."""
        self.found: set[int] = set()
        """The bad copies that were reported."""
        self.can_be_mended = False
        """Whether what is spoilt there can be had again."""
        self._watch = watch
        self._met = met

    def drop(self, shard: int) -> None:
        """Hold a shard no more, under the eyes of the oracle."""
        if self.holds(shard):
            self._watch(self, shard)
        super().drop(shard)

    def corrupt(self, shard: int) -> None:
        """Spoil a byte of a shard, which looks as before."""
        if self.is_corrupt(shard):
            return
        changed = bytearray(self.read(shard))
        changed[len(changed) // 2] ^= 1
        damage(self, shard, bytes(changed))
        self.rotten[shard] = bytes(changed)
        self.found.discard(shard)

    def is_corrupt(self, shard: int) -> bool:
        """Whether the copy is damaged and was not replaced since."""
        return self.holds(shard) and self.read(shard) == self.rotten.get(shard)

    def has_room_for(self, count: int) -> bool:
        """Whether there is room now."""
        if self.is_full:
            self._met("there is no room for a shard")
        return not self.is_full and super().has_room_for(count)


@dataclass
class LinkQuality:
    """The quality of the links that carry shards; probabilities are per piece, or per shard from the origin."""

    cut: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0
    origin_fails: float = 0.0
    origin_failed: bool = False
    """Whether it has, ever."""
    origin_hangs: float = 0.0
    origin_timeout_s: float = 60.0

    @classmethod
    def drawn(cls, source: Random, hanging: Random) -> LinkQuality:
        """Those of one world."""
        return cls(
            cut=source.choice((0.0, 0.2, 0.4)),
            corrupt=source.choice((0.0, 0.1, 0.4)),
            delay=source.choice((0.0, 0.0, 0.3)),
            origin_fails=source.choice((0.0, 0.0, 0.0, 0.3, 0.3, 0.9)),
            origin_hangs=hanging.choice(ORIGIN_HANGS),
            origin_timeout_s=hanging.choice(ORIGIN_TIMEOUT_S),
        )

    def repair(self) -> None:
        """From now on everything arrives."""
        self.cut = self.corrupt = self.delay = self.origin_fails = self.origin_hangs = 0.0


@dataclass(eq=False)
class JobData:
    """The data of one job, and how its workers sample it. Without `has_shards` they all read everything."""

    job: str
    source: Random
    samples: int
    shards: int
    bytes_per_sample: int
    has_shards: bool
    has_origin: bool
    replication: int
    mode: SamplingMode
    batch: int
    drop_last: bool
    is_dealt: bool
    """Whether each slot has but a part of it at first, where there is no origin; else all have all of it."""
    shard_takes_s: float
    link_quality: LinkQuality
    met: Callable[[str], None]
    disks: dict[tuple[int, str], Disk] = field(default_factory=dict)
    """By slot and host."""
    hanging: Random = field(init=False)
    hung: set[int] = field(default_factory=set)
    """The shards over which the origin has."""
    weighing: Random = field(init=False)
    is_weighed: bool = field(init=False)
    """Whether its processes should not all hold the same."""
    dropped: Callable[[Disk, int], None] = lambda disk, shard: None

    def __post_init__(self) -> None:
        self.hanging = Random(f"hanging of {self.job}, {self.samples} in {self.shards} by {self.batch}")
        self.weighing = Random(f"weights of {self.job}, {self.samples} in {self.shards} by {self.batch}")
        self.is_weighed = self.weighing.random() < WEIGHED_JOBS

    @classmethod
    def drawn(
        cls,
        job: str,
        source: Random,
        config: ElasticTrainingConfig,
        slots: int,
        link_quality: LinkQuality,
        met: Callable[[str], None],
    ) -> JobData:
        """That of a job of so many slots."""
        has_shards = source.random() < 0.9
        samples = source.randint(*SAMPLES)
        return cls(
            job=job,
            source=source,
            samples=samples,
            shards=source.randint(1, SHARDS_MAX),
            bytes_per_sample=source.choice(BYTES_PER_SAMPLE),
            has_shards=has_shards,
            has_origin=source.random() < 0.6,
            replication=source.choice((0, 0, 1, 1, 2)),
            mode=SamplingMode.SHARDED if has_shards and source.random() < 0.6 else SamplingMode.SHARED,
            batch=min(source.randint(*BATCH), samples),
            drop_last=source.random() < 0.3,
            is_dealt=slots <= config.max_workers and source.random() < 0.3,
            shard_takes_s=source.choice(SHARD_TAKES_S),
            link_quality=link_quality,
            met=met,
        )

    def configured(self, config: ElasticTrainingConfig, *, steady: bool) -> ElasticTrainingConfig:
        """The job's settings, as its data wants them.

        Where a network is slow and nothing else, a shard takes its time, and nobody is to fail for that.
        """
        policy = LostDataPolicy.ABORT if self.source.random() < 0.5 and not self.is_dealt else LostDataPolicy.WAIT
        return msgspec.structs.replace(
            config,
            redistribution_type=self.source.choice(tuple(RedistributionType)),
            lost_data_policy=policy,
            use_synchronous_rescaling=self.source.random() >= WITHOUT_A_STOP,
            use_parallel_data_transfer=self.source.random() < 0.7,
            max_concurrent_transfers=self.source.choice((1, 4)),
            rescale_timeout_ms=max(config.rescale_timeout_ms, STEADY_TIMEOUT_MS if steady else 0),
            rescale_silence_ms=max(config.rescale_silence_ms, STEADY_TIMEOUT_MS if steady else 0),
            scale_batch_with_world=self.source.random() < 0.15,
        )

    @property
    def dataset(self) -> Dataset:
        return Dataset(self.samples, self.shards)

    @property
    def fetching_s(self) -> float:
        """How long a worker takes to fetch all of it, one shard after the other."""
        return self.shards * self.shard_takes_s

    def content(self, shard: int) -> bytes:
        """What a shard really is."""
        return _content(self.job, shard, self.dataset.shard(shard).size * self.bytes_per_sample)

    # What a process is given.

    def disk(self, slot: int, host: str, slots: int) -> Disk:
        """What lies there, and what a slot begins with where it begins."""
        disk = self.disks.get((slot, host))
        if disk is None:
            is_first = not any(known == slot for known, _ in self.disks)
            disk = self.disks[slot, host] = self._empty_disk()
            if is_first and not self.has_origin:
                dealt = range(slot, self.shards, slots) if self.is_dealt else range(self.shards)
                self._fill(disk, dealt)
        elif disk.held():
            self.met("a worker comes back to its shards")
        return disk

    def restock(self, slot: int, hosts: tuple[str, ...], slots: int) -> None:
        """Bring all shards to where the next process of a slot will be."""
        for host in hosts:
            self._fill(self.disk(slot, host, slots), range(self.shards))

    def _fill(self, disk: Disk, shards: range) -> None:
        for shard in shards:
            # One that is arriving just now comes as it is.
            with suppress(StoreFailed):
                if not disk.holds(shard):
                    disk.put(shard, [self.content(shard)])

    def lose_host(self, host: str) -> None:
        """What lies there is gone."""
        for place in [place for place in self.disks if place[1] == host]:
            self.disks.pop(place).is_gone = True
            # A slot that begins once more does not begin with what it had.
            self.disks[place] = self._empty_disk()

    def _empty_disk(self) -> Disk:
        disk = Disk(lambda disk, shard: self.dropped(disk, shard), self.met)
        disk.can_be_mended = self.has_origin
        return disk

    def training_data(self, disk: Disk) -> TrainingData:
        """What a worker is given to train with."""
        weight = self.weighing.choice(WEIGHTS) if self.is_weighed else 1.0
        return TrainingData(
            self.samples,
            self.shards,
            disk,
            origin=_Origin(self) if self.has_origin else None,
            replication=self.replication,
            weight=weight,
            origin_timeout_s=self.link_quality.origin_timeout_s,
        )

    def sampler(self) -> ElasticSampler:
        """What a worker draws with."""
        dataset = self.dataset if self.mode is SamplingMode.SHARDED else None
        return ElasticSampler(
            self.samples, self.batch, seed=7, drop_last=self.drop_last, mode=self.mode, dataset=dataset
        )

    def carrier(self) -> LoopBulkTransport:
        """The transport that carries shards to it."""
        return BadCarrier(self.link_quality, self.shard_takes_s, self.source, self.met)

    async def bring(self, shard: DataShard, file: BinaryIO) -> None:
        """Write a shard, if nothing comes between."""
        content = self.content(shard.shard_id)
        if self.hanging.random() < self.link_quality.origin_hangs:
            file.write(content[: self.hanging.choice((0, len(content) // 2))])
            self.link_quality.origin_failed = True
            self.met("the origin hangs")
            self.hung.add(shard.shard_id)
            await anyio.sleep_forever()
        if self.source.random() < self.link_quality.origin_fails:
            file.write(content[: len(content) // 2])
            self.link_quality.origin_failed = True
            self.met("the origin fails")
            raise OSError("the origin is away")
        file.write(content)
        if shard.shard_id in self.hung:
            self.met("a shard comes of an origin that has hung")


class _Origin:
    """It hangs in what it returns, as there are no threads for it to hang in."""

    def __init__(self, data: JobData) -> None:
        self._data = data

    def write_to(self, shard: DataShard, file: BinaryIO) -> Any:
        return self._data.bring(shard, file)


@cache
def _content(job: str, shard: int, size: int) -> bytes:
    return Random(f"{job} {shard} {size}").randbytes(size)


class BadCarrier(LoopBulkTransport):
    """Carries states unchanged, and shards with the faults of the links."""

    def __init__(
        self, link_quality: LinkQuality, shard_takes_s: float, source: Random, met: Callable[[str], None]
    ) -> None:
        self._ways = link_quality
        self._shard_takes_s = shard_takes_s
        self._source = source
        self._met = met

    async def open(self, transport: asyncio.Transport) -> LoopChannel:
        """Read the connection as a stream."""
        return _BadChannel(transport, self._worsened)

    def _worsened(self, wire: DialogueWire) -> DialogueWire:
        return _BadWire(wire, self._ways, self._shard_takes_s, self._source, self._met)


class _BadChannel(LoopChannel):
    def __init__(self, transport: asyncio.Transport, worsen: Callable[[DialogueWire], DialogueWire]) -> None:
        super().__init__(transport)
        self._worsen = worsen

    async def converse(self, conversation: Conversation[T], turns: CapacityLimiter) -> T:
        return await super().converse(lambda wire: conversation(self._worsen(wire)), turns)


class _BadWire:
    def __init__(
        self,
        wire: DialogueWire,
        link_quality: LinkQuality,
        shard_takes_s: float,
        source: Random,
        met: Callable[[str], None],
    ) -> None:
        self._wire = wire
        self._ways = link_quality
        self._shard_takes_s = shard_takes_s
        self._source = source
        self._met = met
        self._is_new_piece = True
        self._until_cut: int | None = None
        """After so many more bytes the connection is cut."""
        self._is_corrupt = False

    async def say(self, message: Message) -> None:
        await self._wire.say(message)

    async def hear(self, patience_s: float) -> PeerMessage | None:
        return await self._wire.hear(patience_s)

    async def give(self, fd: int, offset: int, count: int, stall_timeout_s: float) -> None:
        await self._wire.give(fd, offset, count, stall_timeout_s)

    async def pause(self, seconds: float) -> None:
        """A piece of a shard follows, with faults of its own."""
        await self._wire.pause(seconds)
        self._is_new_piece = True

    async def take(self, count: int) -> memoryview:
        if self._is_new_piece:
            self._is_new_piece = False
            await self._draw_faults(count)
        if self._until_cut == 0:
            raise cut_off()
        data = await self._wire.take(count if self._until_cut is None else min(count, self._until_cut))
        if self._until_cut is not None:
            self._until_cut -= data.nbytes
        if not self._is_corrupt:
            return data
        changed = bytearray(data)
        changed[len(changed) // 2] ^= 1
        return memoryview(changed)

    async def _draw_faults(self, count: int) -> None:
        if self._shard_takes_s:
            await anyio.sleep(self._shard_takes_s)
        if self._source.random() < self._ways.delay:
            await anyio.sleep(self._source.uniform(0.0, DELAY_S))
        if self._source.random() < self._ways.cut:
            self._met("a way is cut while a shard comes")
            self._until_cut = self._source.randint(0, count - 1)
            return
        self._is_corrupt = self._source.random() < self._ways.corrupt
        if self._is_corrupt:
            self._met("a shard is changed on its way")
