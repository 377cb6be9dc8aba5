"""Loading: the state of one rank, from a manifest to verified arrays.

Order of a load: match the saved tree with the given state (`matching`) or choose tensors and boxes for new arrays
(`resharding`), report differences, read and verify the chunks (`fetching`, which plans with `read_plan` and repairs
with `repair`), build the state.

Invariants:
- All differences between state and checkpoint are reported before any array is written.
- Arrays receive verified bytes of the checkpoint only; an error after the first write says that they may be incomplete.
- Ranks do not communicate here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.format.boxes import Box
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.format.tree import Node, tensor_numbers, unflatten
from forged.checkpoint.loading.fetching import READER_THREADS, Array, Fetched, fetch, is_storage_failure
from forged.checkpoint.loading.manifest_index import Index
from forged.checkpoint.loading.matching import Matching, resolve_pending
from forged.checkpoint.loading.repair import CopyRepairer
from forged.checkpoint.loading.resharding import (
    boxes_for,
    left_to_other_ranks,
    missing_per_rank,
    other_trees,
    prune,
    tensors_of_all_ranks,
    tree_for,
)
from forged.checkpoint.model import CompressionLevel, LoadOptions, RepairedChunk, ReshardingStrategy, ShardedArray
from forged.checkpoint.ports import CancelToken, Storage, WouldBlock, bounded
from forged.checkpoint.storage.listing import hold_files, read_manifest
from forged.leaf_types import LeafType

OPTIMIZER = "optimizer"
RNG = "rng"
DIFFERENCES_SHOWN_MAX = 24
PARTLY_OVERWRITTEN = "; the arrays of the state may be partly overwritten"
"""The end of an error's message, if a state was given."""
NONBLOCKING_BYTES_MAX = 4 << 20
"""Up to this size, the files of a checkpoint may be loaded in the caller's thread if they are in memory."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of `load_state`."""

    state: Any
    repaired: tuple[RepairedChunk, ...]
    missing: tuple[str, ...]
    """Tensors that the state, or this rank, has and the checkpoint lacks."""
    unexpected: tuple[str, ...]
    """Tensors that the checkpoint has and the state lacks."""
    mismatched: tuple[str, ...]
    """Tensors whose shape or type differs."""
    bytes_read: int
    bytes_needed: int


def load_state(
    storage: Storage,
    manifest: Manifest,
    into: Any | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    options: LoadOptions | None = None,
    token: CancelToken | None = None,
    leaf_types: Sequence[LeafType] = (),
    sections: Collection[str] | None = None,
    other_manifests: Callable[[], Iterator[Manifest]] | None = None,
    threads: int = READER_THREADS,
) -> Loaded:
    """Load the state of a rank; into the arrays of `into` if given, else into new arrays.

    `sections` are the top-level keys to load; sections that `into` lacks come in new arrays. `other_manifests` gives
    the checkpoints to search for healthy copies of corrupt chunks; default: all in the storage, newest first.
    """
    token = token or CancelToken()
    storage = bounded(storage, token)

    def loaded(manifest: Manifest) -> Loaded:
        load = _Load(manifest, rank, world_size, options or LoadOptions(), tuple(leaf_types))
        build_state = load.plan(into, sections)
        load.require_match()
        with hold_files(storage, manifest):
            repairer = CopyRepairer(storage, load.index, token, other_manifests)
            return _loaded(load, build_state, load.fetch(storage, token, repairer, threads))

    try:
        return loaded(manifest)
    except CheckpointException as error:
        full = _made_full(storage, manifest) if is_storage_failure(error) else None
        if full is None:
            raise
        return loaded(full)


def _made_full(storage: Storage, manifest: Manifest) -> Manifest | None:
    """The manifest of an incremental checkpoint that was made full during the load; None if it was not."""
    if not manifest.links:
        return None
    try:
        now = read_manifest(storage, manifest.prefix)
    except CheckpointException:
        return None
    return now if now.save_id == manifest.save_id and now.links != manifest.links else None


def _loaded(load: _Load, build_state: BuildState, fetched: Fetched) -> Loaded:
    state = build_state(fetched.arrays)
    return Loaded(
        resolve_pending(state) if load.has_pending else state,
        tuple(fetched.repaired),
        tuple(load.missing),
        tuple(load.unexpected),
        tuple(load.mismatched),
        fetched.bytes_read,
        fetched.bytes_needed,
    )


def require_small(manifest: Manifest, token: CancelToken) -> None:
    """Raise `WouldBlock` if the load may not block its caller, and takes longer than a thread takes to start."""
    is_small = manifest.size_bytes <= NONBLOCKING_BYTES_MAX and manifest.compression is CompressionLevel.NONE
    if not token.may_block and (manifest.links or not is_small):
        raise WouldBlock


BuildState = Callable[[Sequence[Array]], Any]
"""Builds the state from the loaded arrays, in the order of `_Load.tensors`."""


class _Load:
    """One load: the tensors to read, and the arrays that receive them."""

    def __init__(
        self, manifest: Manifest, rank: int, world_size: int, options: LoadOptions, leaf_types: tuple[LeafType, ...]
    ) -> None:
        if not 0 <= rank < world_size:
            raise invalid(f"rank must be from 0 to {world_size - 1}, got {rank}", "give a rank below world_size")
        self.index = Index(manifest)
        self.tensors: list[int] = []
        """Numbers of the tensors to read; a target is a position in this list."""
        self.boxes: dict[int, Box] = {}
        """By target, the part to read, where it is not the whole tensor."""
        self.into: dict[int, Array] = {}
        """By target, the array of the given state to fill."""
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: dict[str, str] = {}
        self.has_pending = False
        self._manifest = manifest
        self._rank = rank
        self._world_size = world_size
        self._options = options
        self._leaf_types = leaf_types
        self._selected = _selected(manifest, options.only)
        self._missing_per_rank = missing_per_rank(manifest, rank)

    @property
    def _is_same_world_size(self) -> bool:
        return self._world_size == self._manifest.world_size

    def plan(self, into: Any | None, sections: Collection[str] | None) -> BuildState:
        """Decide what to read and where it goes."""
        tree = tree_for(self._manifest, self._rank, self._world_size)
        match tree:
            case {"d": entries}:
                return self._plan_sections(dict(entries), into, sections)
            case _ if into is None:
                return self._plan_new(tree)
            case _:
                return self._plan_into(tree, into)

    def _plan_sections(
        self, entries: dict[str, Node], into: Any | None, sections: Collection[str] | None
    ) -> BuildState:
        """Plan a state that is a dict, whose keys are the sections."""
        options = self._options
        excluded = {*(() if options.load_optimizer else [OPTIMIZER]), *(() if options.load_rng_state else [RNG])}

        def is_wanted(key: Any) -> bool:
            return key not in excluded and (sections is None or key in sections)

        wanted = {key: node for key, node in entries.items() if is_wanted(key)}
        self.missing += sorted(name for name in self._missing_per_rank if is_wanted(name.partition("/")[0]))
        if into is None:
            return self._plan_new({"d": wanted})
        if not isinstance(into, Mapping):
            return self._plan_into({"d": wanted}, into)
        new_sections = {key: node for key, node in wanted.items() if sections is not None and key not in into}
        build_given = self._plan_into(
            {"d": {key: node for key, node in wanted.items() if key not in new_sections}},
            {key: value for key, value in into.items() if is_wanted(key)},
        )
        build_new = self._plan_new({"d": new_sections})

        def build(arrays: Sequence[Array]) -> Any:
            both = {**build_given(arrays), **build_new(arrays)}
            return {key: both[key] for key in (*wanted, *both) if key in both}

        return build

    def _plan_into(self, tree: Node, into: Any) -> BuildState:
        """Plan to fill the arrays of a given state."""
        matching = Matching(self._manifest.tensors, self._leaf_types, self._selected, self._other_trees)
        state = matching.match(tree, into)
        matching.drop_mismatches()
        self.tensors = matching.numbers
        self.boxes = matching.boxes
        self.into = dict(enumerate(matching.arrays))
        self.has_pending = matching.has_pending
        self.mismatched = matching.mismatched
        already_missing = self._missing_per_rank
        self.missing += [name for name in matching.missing if self._is_selected(name) and name not in already_missing]
        self.unexpected += self._unexpected(matching)
        return lambda arrays: state

    def _unexpected(self, matching: Matching) -> list[str]:
        """Tensors without a place in the state; with another world size only of those that all ranks had."""
        if not matching.unexpected:
            return []
        expected = None if self._is_same_world_size else tensors_of_all_ranks(self._manifest)
        placed = set(matching.numbers)
        names = self._manifest.tensors.names
        return [
            names[number]
            for number in matching.unexpected
            if number not in placed and (expected is None or number in expected) and self._is_selected(names[number])
        ]

    def _other_trees(self) -> list[Node]:
        return other_trees(self._manifest, self._rank)

    def _plan_new(self, tree: Node) -> BuildState:
        """Plan to load into new arrays."""
        names = self._manifest.tensors.names
        everything = list(tensor_numbers(tree))
        numbers = [number for number in everything if self._is_selected(names[number])]
        strategy = self._options.resharding_strategy
        if not self._is_same_world_size and strategy is ReshardingStrategy.SIMPLE:
            left = left_to_other_ranks(self._manifest, self._rank, self._world_size, numbers)
            numbers = [number for number in numbers if number not in left]
        first = len(self.tensors)
        self.tensors = self.tensors + numbers
        parts = boxes_for(self._manifest, self._rank, self._world_size, strategy, numbers)
        targets = {number: target for target, number in enumerate(numbers, first)}
        self.boxes = self.boxes | {targets[number]: box for number, box in parts.items() if number in targets}
        if len(numbers) < len(everything):
            tree = prune(tree, targets.__contains__, keep_per_rank=True)
        shapes = self._manifest.tensors.shapes

        def build(arrays: Sequence[Array]) -> Any:
            def tensor(number: int) -> Any:
                array = arrays[targets[number]]
                return ShardedArray(array, shapes[number], parts[number].offset) if number in parts else array

            return unflatten(tree, tensor)

        return build

    def _is_selected(self, name: str) -> bool:
        return self._selected is None or self._selected(name)

    def require_match(self) -> None:
        """In strict mode, refuse a state that differs from the checkpoint."""
        missing = [name for name in self.missing if name not in self._missing_per_rank]
        if not self._options.strict_mode or not (missing or self.unexpected or self.mismatched):
            return
        differences = [
            *self.mismatched.values(),
            *(f"{name} is not in the checkpoint" for name in missing),
            *(f"{name} is not in the state" for name in self.unexpected),
        ]
        shown = differences[:DIFFERENCES_SHOWN_MAX]
        if len(differences) > len(shown):
            shown.append(f"and {len(differences) - len(shown)} more")
        raise CheckpointException(
            f"the state differs from checkpoint {self._manifest.prefix}: " + "; ".join(shown),
            self._manifest.prefix,
            ExceptionType.LOAD_FAILED,
            code="checkpoint_state_differs",
            fix="give a state like the saved one, or load what fits (strict_mode=False, or strict=False)",
        )

    def fetch(self, storage: Storage, token: CancelToken, repairer: CopyRepairer, threads: int) -> Fetched:
        """Read and verify all targets."""
        overlapping = _overlapping(self.into)
        into = {target: array for target, array in self.into.items() if target not in overlapping}
        try:
            fetched = fetch(
                storage,
                self.index,
                self.tensors,
                token,
                boxes=self.boxes,
                into=into,
                repairer=repairer,
                rank=self._rank,
                threads=threads,
            )
        except CheckpointException as error:
            cause = error
            if is_storage_failure(error):
                cause = _replaced_or_deleted(storage, self._manifest) or error
            raise self._with_partial_note(cause) from error
        self._fill_overlapping(overlapping, fetched)
        return fetched

    def _fill_overlapping(self, overlapping: Collection[int], fetched: Fetched) -> None:
        """Copy into arrays that share memory; refuse if their values in the checkpoint differ."""
        for target in overlapping:
            self.into[target][...] = fetched.arrays[target]
        for target in overlapping:
            array = self.into[target]
            if array.tobytes() != fetched.arrays[target].tobytes():
                raise self._with_partial_note(
                    CheckpointException(
                        f"{self._manifest.tensors.names[self.tensors[target]]} overlaps in memory with itself or with "
                        "another array of the state, and the checkpoint has different values for both",
                        self._manifest.prefix,
                        ExceptionType.LOAD_FAILED,
                        code="checkpoint_arrays_shared",
                        fix="load into arrays that do not share memory",
                    )
                )
            fetched.arrays[target] = array

    def _with_partial_note(self, error: CheckpointException) -> CheckpointException:
        """The error, with the warning that arrays of the given state may be incomplete."""
        if not self.into:
            return error
        return CheckpointException(
            f"{error.message}{PARTLY_OVERWRITTEN}",
            error.checkpoint_path,
            error.type,
            code=error.code,
            fix=error.fix,
            retryable=error.retryable,
        )


def _selected(manifest: Manifest, patterns: Sequence[str]) -> Callable[[str], bool] | None:
    """A test for tensor names; None selects all. A pattern without a match is refused."""
    if not patterns:
        return None
    names = set(manifest.tensors.names)
    found: set[str] = set()
    for pattern in patterns:
        matched = {pattern} if pattern in names else {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise invalid(
                f"no tensor of {manifest.prefix} matches {pattern!r}",
                "`forgectl ckpt show` lists the names",
                code="checkpoint_tensor_unknown",
            )
        found |= matched
    return found.__contains__


def _replaced_or_deleted(storage: Storage, manifest: Manifest) -> CheckpointException | None:
    """The error for a checkpoint that was replaced or deleted during the load; None if it is unchanged."""
    try:
        if read_manifest(storage, manifest.prefix).save_id == manifest.save_id:
            return None
        code, change = "checkpoint_replaced", "replaced"
    except CheckpointException as error:
        if error.code != "checkpoint_missing":
            return None
        code, change = "checkpoint_deleted", "deleted"
    return CheckpointException(
        f"checkpoint {manifest.prefix} was {change} during the load",
        manifest.prefix,
        ExceptionType.LOAD_FAILED,
        code=code,
        fix="load it again" if change == "replaced" else "load another one; `forgectl ckpt ls` lists them",
        retryable=True,
    )


def _overlapping(arrays: Mapping[int, Array]) -> list[int]:
    """The targets whose arrays may share memory with another array, or whose own elements overlap."""
    if all(array.base is None for array in arrays.values()) and len(set(map(id, arrays.values()))) == len(arrays):
        return []
    ranges = sorted((*_memory_range(array), target) for target, array in arrays.items() if array.size)
    overlapping = {target for target, array in arrays.items() if _overlaps_itself(array)}
    end, last = 0, -1
    for low, high, target in ranges:
        if low < end:
            overlapping |= {target, last}
        if high > end:
            end, last = high, target
    return sorted(overlapping)


def _overlaps_itself(array: Array) -> bool:
    """Whether two elements of a strided array may share bytes."""
    reach = array.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += max(0, size - 1) * stride
    return False


def _memory_range(array: Array) -> tuple[int, int]:
    """The addresses of an array's first byte and of the byte after its last."""
    low = high = int(array.__array_interface__["data"][0])
    for size, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, (size - 1) * stride), high + max(0, (size - 1) * stride)
    return low, high + array.itemsize
