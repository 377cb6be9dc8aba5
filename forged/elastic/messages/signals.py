"""What workers and their pulses signal to the daemon."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from forged.kernel.messages import Signal

MEETING_CHARS_MAX = 64
"""The length of the name of a meeting."""


class Heartbeat(Signal, frozen=True):
    """A worker's library is alive: its committed steps, its last collective, and the interval of heartbeats."""

    external: ClassVar[bool] = True

    job: str
    worker_id: str
    incarnation: bytes
    step: int = 0
    collective_seq: int = 0
    interval_s: float = 0.0
    last_step_done: bool = False
    """Whether a draining worker trains no more and only finishes what it does before it leaves."""
    is_done: bool = False
    """Whether the worker has made the last step of its script, which wants no other."""
    meeting: Annotated[str, msgspec.Meta(max_length=MEETING_CHARS_MAX)] = ""
    """The meeting of the script's own collectives that the worker is in; empty for none."""

    @property
    def key(self) -> str:
        return self.worker_id


class AttemptProgress(Signal, frozen=True):
    """A member of an attempt receives state or training data, or waits for other members."""

    external: ClassVar[bool] = True

    job: str
    worker_id: str
    incarnation: bytes
    attempt: int
    state_bytes: int
    shards: int = 0
    """How many shards it has completely received."""
    data_bytes: int = 0
    """How many bytes of training data it has received."""
    is_waiting: bool = False
    """Whether it waits for other members."""
    problem: str = ""
    """Its problem; empty without one."""
    unreachable_peer: str = ""
    """The peer that it cannot reach; empty without one."""
    store_failing_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """For how long its shard store has failed while it had a plan, in this attempt and earlier ones; 0 if it works."""

    @property
    def key(self) -> str:
        return self.worker_id


class Pulse(Signal, frozen=True):
    """A worker's process is alive: CPU seconds used, committed steps, last collective, interval of pulses."""

    external: ClassVar[bool] = True

    job: str
    worker_id: str
    incarnation: bytes
    cpu_s: float = 0.0
    step: int = 0
    collective_seq: int = 0
    interval_s: float = 0.0

    @property
    def key(self) -> str:
        return self.worker_id
