"""Options, enums and results of checkpoints: values that are checked when they are made."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol, SupportsFloat, TypeVar, runtime_checkable

import msgspec
import numpy as np

from forged.checkpoint.errors import invalid
from forged.checkpoint.format.boxes import Box, Shape, whole
from forged.leaf_types import PerRank as PerRank

DEFAULT_TIMEOUT_S = 600.0
COPIES_MAX = 8
CHAIN_MAX = 8
"""The default for the number of checkpoints that a restore reads from."""
COUNT_MAX = (1 << 53) - 1
"""The largest step or epoch: JSON readers keep it exactly."""
PREFIX_CHARS_MAX = 200
AXES_MAX = 32
METRICS_MAX = 64
METRIC_NAME_CHARS_MAX = 128
ELEMENTS_MAX = 1 << 52
"""A larger array would fit in no storage and no manifest."""
Kind = TypeVar("Kind", bound=StrEnum)
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*(?:/[A-Za-z0-9_][A-Za-z0-9._+=-]*)*")


class CheckpointFormat(StrEnum):
    """How a checkpoint is divided into files."""

    MULTI_SHARD = "multi_shard"
    """One file per rank that has something to write."""
    SINGLE_FILE = "single_file"
    """One file."""
    CONSOLIDATED = "consolidated"
    """Files of whole tensors with the names and the index that Hugging Face's tools expect."""


class CompressionLevel(StrEnum):
    """How much time compression may take."""

    NONE = "none"
    FAST = "fast"
    BALANCED = "balanced"
    MAXIMUM = "maximum"


class WhenBusy(StrEnum):
    """What a save does while one save is written and another is staged."""

    WAIT = "wait"
    REFUSE = "refuse"


class ReshardingStrategy(StrEnum):
    """What a rank loads without a target state if the world size differs from the saved one."""

    PARALLEL = "parallel"
    """Its slice of each sharded tensor, along the same axis; unsharded tensors whole."""
    SIMPLE = "simple"
    """Whole tensors, round-robin."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and loaded."""

    def state_dict(self) -> Any:
        """The state: nested dicts, lists and tuples of arrays and plain values."""
        ...

    def load_state_dict(self, state: Any) -> object: ...


def is_stateful(value: Any) -> bool:
    """Whether the value is an object whose state can be saved and loaded; a dict is a value itself."""
    # Without isinstance for the protocol, which takes tens of microseconds for each value.
    has_both = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return has_both and not isinstance(value, Mapping | type)


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
            raise invalid(
                f"global_shape {self.global_shape} has more than {ELEMENTS_MAX} elements", "use a smaller shape"
            )
        axes = {len(shape), len(self.global_shape), len(self.offset)}
        if len(axes) > 1 or min(self.offset, default=0) < 0 or not whole(self.global_shape).covers(self.box):
            raise invalid(
                f"a box of shape {shape} at offset {self.offset} is not inside global_shape {self.global_shape}",
                "give the shape of the whole array, and the offset of the local part in it",
                code="checkpoint_box_invalid",
            )

    @property
    def box(self) -> Box:
        """The local part's box in the global array."""
        return Box(self.offset, tuple(map(int, np.shape(self.local))))


@dataclass(frozen=True, slots=True, eq=False)
class ObjectState:
    """What an object with `state_dict` returned. A load may give the object more than that."""

    value: Any
    owner: Any


@dataclass(frozen=True, slots=True, init=False)
class SaveOptions:
    """How to save. Enums may be given as strings."""

    checkpoint_prefix: str | None
    """The checkpoint's name; default `checkpoint_<UTC time>` with random digits."""
    format: CheckpointFormat
    compression_level: CompressionLevel
    include_optimizer: bool
    include_rng_state: bool
    timeout: float | None
    """Seconds; default: the timeout of the checkpoint's options."""
    custom_metadata: Mapping[str, Any]
    """JSON values."""
    copies: int
    """How many ranks write each array that several hold, so that a corrupt copy can be repaired."""
    when_busy: WhenBusy
    step: int | None
    """The steps that the state has; default: those of the coordinator, if it counts them."""
    epoch: int | None
    """The state's epoch; default: the coordinator's, if it has one."""
    metrics: Mapping[str, float]
    """Measures of the state, such as its loss: for the catalogue, and in the manifest. Those of rank 0 count."""
    reason: str
    """Why it is saved now; for the catalogue."""
    base: str | None
    """The checkpoint of the same folder to build on: its chunks are not written again. None saves everything."""
    chain_max: int
    """How many checkpoints a save may need, counted from parent to parent; one that would exceed it is full."""

    def __init__(
        self,
        checkpoint_prefix: str | None = None,
        format: CheckpointFormat | str = CheckpointFormat.MULTI_SHARD,  # noqa: A002 - a public name
        compression_level: CompressionLevel | str = CompressionLevel.NONE,
        include_optimizer: bool = True,
        include_rng_state: bool = True,
        timeout: float | None = None,
        custom_metadata: Mapping[str, Any] = MappingProxyType({}),
        copies: int = 1,
        when_busy: WhenBusy | str = WhenBusy.WAIT,
        step: int | None = None,
        epoch: int | None = None,
        metrics: Mapping[str, SupportsFloat] = MappingProxyType({}),
        reason: str = "",
        base: str | None = None,
        chain_max: int = CHAIN_MAX,
    ) -> None:
        for prefix in (checkpoint_prefix, base):
            if prefix is not None:
                check_prefix(prefix)
        check_timeout(timeout)
        if not isinstance(copies, int) or not 1 <= copies <= COPIES_MAX:
            raise invalid(f"copies must be from 1 to {COPIES_MAX}, got {copies!r}")
        layout = _chosen("format", format, CheckpointFormat)
        if base is not None and layout is not CheckpointFormat.MULTI_SHARD:
            raise invalid(
                f"an incremental checkpoint cannot have the format {layout}, whose files have whole tensors",
                "use the format multi_shard, or save without base",
            )
        if base is not None and base.rpartition("/")[0] != (checkpoint_prefix or "").rpartition("/")[0]:
            raise invalid(
                f"base {base} is in another folder than {checkpoint_prefix or 'the checkpoint'}",
                "name a base in the same folder, so that a path to one of them leads to both",
            )
        _set_fields(
            self,
            checkpoint_prefix=checkpoint_prefix,
            format=layout,
            compression_level=_chosen("compression_level", compression_level, CompressionLevel),
            include_optimizer=include_optimizer,
            include_rng_state=include_rng_state,
            timeout=timeout,
            custom_metadata=_as_json(custom_metadata),
            copies=copies,
            when_busy=_chosen("when_busy", when_busy, WhenBusy),
            step=None if step is None else check_count("step", step),
            epoch=None if epoch is None else check_count("epoch", epoch),
            metrics=_checked_metrics(metrics),
            reason=reason,
            base=base,
            chain_max=check_positive("chain_max", chain_max),
        )


@dataclass(frozen=True, slots=True, init=False)
class LoadOptions:
    """How to load. Enums may be given as strings."""

    checkpoint_prefix: str | None
    load_optimizer: bool
    load_rng_state: bool
    resharding_strategy: ReshardingStrategy
    timeout: float | None
    skip_validation: bool
    """Skip the validation before the load. Everything that is read is verified all the same."""
    strict_mode: bool
    """Names, shapes and dtypes must equal those of the target state."""
    only: tuple[str, ...]
    """Names of tensors or patterns such as `model/encoder.*`; empty: all."""

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
        _set_fields(
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
    """The storage of checkpoints; `provider` is local, s3, gs, az or memory."""

    provider: str = "local"
    connection_settings: Mapping[str, str] = field(
        default_factory=lambda: {"base_path": "./checkpoints"},
        repr=False,  # It may contain secrets.
    )


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint in a listing."""

    prefix: str
    version: str
    timestamp: float
    """Wall-clock seconds of the save."""
    world_size: int
    size_bytes: int
    format: CheckpointFormat
    step: int | None = None
    """The steps that the saved state had."""
    epoch: int | None = None
    parent: str | None = None
    """The newest of the earlier checkpoints whose files this one uses; None for a full checkpoint."""
    chain: tuple[str, ...] = ()
    """The checkpoints that a restore reads from, from the root to this one."""


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
    """Whether the text is a valid prefix."""
    return len(text) <= PREFIX_CHARS_MAX and _PREFIX.fullmatch(text) is not None


def check_prefix(prefix: str) -> str:
    """Refuse an invalid prefix; prefixes become file names, so they must not leave the storage."""
    if not isinstance(prefix, str) or not is_prefix(prefix):
        raise invalid(
            f"invalid checkpoint_prefix {repr(prefix)[:PREFIX_CHARS_MAX]}",
            f"use at most {PREFIX_CHARS_MAX} letters, digits and ._+=-, with / between parts, none of ._+=- first",
            code="checkpoint_prefix_invalid",
        )
    return prefix


def check_count(name: str, value: Any) -> int:
    """A step or an epoch as an int; refuses any other value."""
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= COUNT_MAX:
        raise invalid(f"{name} must be an integer from 0 to {COUNT_MAX}, got {value!r}")
    return int(value)


def _checked_metrics(given: Any) -> dict[str, float]:
    """The metrics as floats, which may be NaN or infinite; refuses other values."""
    if not isinstance(given, Mapping) or len(given) > METRICS_MAX:
        raise invalid(f"metrics must be a dict of at most {METRICS_MAX} numbers, got {type(given).__name__}")
    for name, value in given.items():
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool | np.complexfloating)
        is_name = isinstance(name, str) and 0 < len(name) <= METRIC_NAME_CHARS_MAX and name.isprintable()
        if not is_name or not is_number:
            limit = METRIC_NAME_CHARS_MAX
            raise invalid(f"metrics must map names of 1 to {limit} characters to numbers, got {name!r}: {value!r}")
    return {name: float(value) for name, value in given.items()}


def check_positive(name: str, value: Any) -> int:
    """A number of things as an int; refuses 0 and what is no number."""
    if check_count(name, value) < 1:
        raise invalid(f"{name} must be at least 1, got {value!r}")
    return int(value)


def _chosen(name: str, value: str, kind: type[Kind]) -> Kind:
    """The member of the enum for a value."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise invalid(f"{name} must be one of {known}, got {value!r}") from None


def _set_fields(options: SaveOptions | LoadOptions, **values: Any) -> None:
    """Set the fields of frozen options."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


def _as_json(given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the metadata as JSON values."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(given), allow_nan=False))
        msgspec.json.encode(copied)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise invalid(
            f"custom_metadata cannot be written as JSON: {error}",
            "use dicts with string keys, lists, strings, finite numbers, booleans and None",
            code="checkpoint_metadata_invalid",
        ) from None
    return copied


def check_timeout(timeout: float | None, name: str = "timeout") -> None:
    """Refuse a timeout that is not a positive number or None."""
    if timeout is not None and not (isinstance(timeout, int | float) and 0.0 < timeout <= math.inf):
        raise invalid(f"{name} must be above 0 seconds or None, got {timeout!r}")
