"""What is asked of a checkpoint, and what is told of one.

Law: values, checked when they are made; nothing here touches a storage.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from forged.checkpoint.errors import invalid
from forged.checkpoint.format.boxes import Box, Shape, whole

DEFAULT_TIMEOUT_S = 600.0
COPIES_MAX = 8
PREFIX_CHARS_MAX = 200
AXES_MAX = 32
ELEMENTS_MAX = 1 << 52
"""More would not fit in any storage, and in no manifest."""
Kind = TypeVar("Kind", bound=StrEnum)
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*(?:/[A-Za-z0-9_][A-Za-z0-9._+=-]*)*")


class CheckpointFormat(StrEnum):
    """How the bytes lie in files."""

    MULTI_SHARD = "multi_shard"
    """One file of every rank that has something to write."""
    SINGLE_FILE = "single_file"
    """One file of all."""
    CONSOLIDATED = "consolidated"
    """Whole tensors under the names and with the index that Hugging Face's tools expect."""


class CompressionLevel(StrEnum):
    """How much time may be spent on fewer bytes."""

    NONE = "none"
    FAST = "fast"
    BALANCED = "balanced"
    MAXIMUM = "maximum"


class WhenBusy(StrEnum):
    """What becomes of a save when one is being written and another one is staged."""

    WAIT = "wait"
    REFUSE = "refuse"


class ReshardingStrategy(StrEnum):
    """What a rank is given that does not say what it wants, where the world has another size than the saving one."""

    PARALLEL = "parallel"
    """Its slice of each tensor that was saved in parts, along the same axis; all of the others."""
    SIMPLE = "simple"
    """Whole tensors, in turn."""


@runtime_checkable
class Stateful(Protocol):
    """What has a state that can be saved."""

    def state_dict(self) -> Any:
        """The state: nested dicts, lists and tuples of arrays and plain values."""
        ...

    def load_state_dict(self, state: Any) -> object:
        """Take a state over."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ShardedArray:
    """The part of a global array that this rank holds: `local` lies at `offset` in an array of `global_shape`."""

    local: Any
    global_shape: Shape
    offset: Shape

    def __post_init__(self) -> None:
        shape = tuple(map(int, np.shape(self.local)))
        object.__setattr__(self, "global_shape", tuple(map(int, self.global_shape)))
        object.__setattr__(self, "offset", tuple(map(int, self.offset)))
        if math.prod(max(1, size) for size in self.global_shape) > ELEMENTS_MAX:
            raise invalid(f"global_shape = {self.global_shape}", f"give at most {ELEMENTS_MAX} elements")
        axes = {len(shape), len(self.global_shape), len(self.offset)}
        if len(axes) > 1 or min(self.offset, default=0) < 0 or not whole(self.global_shape).covers(self.box):
            raise invalid(
                f"a part of shape {shape} at {self.offset} does not lie in an array of shape {self.global_shape}",
                "give the shape of the whole array, and where in it the part begins",
                code="checkpoint_box_invalid",
            )

    @property
    def box(self) -> Box:
        """Where it lies."""
        return Box(self.offset, tuple(map(int, np.shape(self.local))))


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """A value that every rank has for itself: never taken for a copy of another's, and given back to the same rank."""

    value: Any


@dataclass(frozen=True, slots=True, init=False)
class SaveOptions:
    """How to save. Choices may be given by their names."""

    checkpoint_prefix: str | None
    """The checkpoint's name; `checkpoint_<UTC time>` without one."""
    format: CheckpointFormat
    compression_level: CompressionLevel
    include_optimizer: bool
    include_rng_state: bool
    timeout: float | None
    """Seconds; without it, what the checkpoint's options say."""
    custom_metadata: Mapping[str, Any]
    """Plain values that can be shown as JSON."""
    copies: int
    """How many ranks write each array that all hold, so that one bad copy does no harm."""
    when_busy: WhenBusy

    def __init__(
        self,
        checkpoint_prefix: str | None = None,
        format: CheckpointFormat | str = CheckpointFormat.MULTI_SHARD,  # noqa: A002 - the name that its users know
        compression_level: CompressionLevel | str = CompressionLevel.NONE,
        include_optimizer: bool = True,
        include_rng_state: bool = True,
        timeout: float | None = None,
        custom_metadata: Mapping[str, Any] = MappingProxyType({}),
        copies: int = 1,
        when_busy: WhenBusy | str = WhenBusy.WAIT,
    ) -> None:
        if checkpoint_prefix is not None:
            check_prefix(checkpoint_prefix)
        check_timeout(timeout)
        if not isinstance(copies, int) or not 1 <= copies <= COPIES_MAX:
            raise invalid(f"copies = {copies!r}", f"give 1 to {COPIES_MAX}")
        _fill(
            self,
            checkpoint_prefix=checkpoint_prefix,
            format=_chosen("format", format, CheckpointFormat),
            compression_level=_chosen("compression_level", compression_level, CompressionLevel),
            include_optimizer=include_optimizer,
            include_rng_state=include_rng_state,
            timeout=timeout,
            custom_metadata=_as_json(custom_metadata),
            copies=copies,
            when_busy=_chosen("when_busy", when_busy, WhenBusy),
        )


@dataclass(frozen=True, slots=True, init=False)
class LoadOptions:
    """How to load. Choices may be given by their names."""

    checkpoint_prefix: str | None
    load_optimizer: bool
    load_rng_state: bool
    resharding_strategy: ReshardingStrategy
    timeout: float | None
    skip_validation: bool
    """Do not look at the whole checkpoint before; what is read is verified all the same."""
    strict_mode: bool
    """Names, shapes and types have to be those of the state that is loaded into."""
    only: tuple[str, ...]
    """Names of tensors, or patterns of them such as `model/encoder.*`; all without any."""

    def __init__(
        self,
        checkpoint_prefix: str | None = None,
        load_optimizer: bool = True,
        load_rng_state: bool = True,
        resharding_strategy: ReshardingStrategy | str = ReshardingStrategy.PARALLEL,
        timeout: float | None = None,
        skip_validation: bool = False,
        strict_mode: bool = True,
        only: str | Iterable[str] = (),
    ) -> None:
        check_timeout(timeout)
        _fill(
            self,
            checkpoint_prefix=checkpoint_prefix,
            load_optimizer=load_optimizer,
            load_rng_state=load_rng_state,
            resharding_strategy=_chosen("resharding_strategy", resharding_strategy, ReshardingStrategy),
            timeout=timeout,
            skip_validation=skip_validation,
            strict_mode=strict_mode,
            only=(only,) if isinstance(only, str) else tuple(only),
        )


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Where checkpoints lie: `provider` is local, s3, gs, az or memory."""

    provider: str = "local"
    connection_settings: Mapping[str, str] = field(
        default_factory=lambda: {"base_path": "./checkpoints"},
        repr=False,  # There may be secrets among them.
    )


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One of the checkpoints in a storage."""

    prefix: str
    version: str
    timestamp: float
    """When it was saved, by the wall clock; seconds."""
    world_size: int
    size_bytes: int
    format: CheckpointFormat


@dataclass(frozen=True, slots=True)
class RepairedChunk:
    """A bad chunk in whose place a healthy copy was read."""

    tensor: str
    rank: int
    file: str
    chunk: int
    source: str
    """Where the healthy copy was."""


def is_prefix(text: str) -> bool:
    """Whether a checkpoint can be called so."""
    return len(text) <= PREFIX_CHARS_MAX and _PREFIX.fullmatch(text) is not None


def check_prefix(prefix: str) -> str:
    """A prefix names files: it must not lead anywhere else."""
    if not isinstance(prefix, str) or not is_prefix(prefix):
        raise invalid(
            f"checkpoint_prefix = {repr(prefix)[:PREFIX_CHARS_MAX]} is no name of a checkpoint",
            f"use at most {PREFIX_CHARS_MAX} letters, digits and ._+=-, with / between parts, none of ._+=- first",
            code="checkpoint_prefix_invalid",
        )
    return prefix


def _chosen(name: str, value: str, kind: type[Kind]) -> Kind:
    """The choice, or the one of that name."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise invalid(f"{name} = {value!r}", f"use one of {known}") from None


def _fill(options: SaveOptions | LoadOptions, **values: Any) -> None:
    """Give frozen options what they hold."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


def _as_json(given: Mapping[str, Any]) -> dict[str, Any]:
    """What will stand in the manifest, whatever becomes of what was given."""
    try:
        said: dict[str, Any] = json.loads(json.dumps(dict(given), allow_nan=False))
        msgspec.json.encode(said)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise invalid(
            f"custom_metadata cannot be written as JSON: {error}",
            "use dicts with string keys, lists, strings, finite numbers, booleans and None",
            code="checkpoint_metadata_invalid",
        ) from None
    return said


def check_timeout(timeout: float | None, name: str = "timeout") -> None:
    """Refuse what is no time that something may take."""
    if timeout is not None and not (isinstance(timeout, int | float) and 0.0 < timeout <= math.inf):
        raise invalid(f"{name} = {timeout!r}", "give a number of seconds above 0, or None")
