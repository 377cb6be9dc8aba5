"""A state out of a checkpoint: into arrays that there are, or into new ones.

Law: it is told what differs before anything is written. Arrays are written by the checkpoint's bytes alone, verified;
if that cannot be done to its end, an error says that they may hold a part of them. Ranks do not speak to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.format.boxes import Box
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.format.tree import LeafType, Node, tensor_numbers, unflatten
from forged.checkpoint.loading.fetching import READERS, Array, Fetched, fetch, is_of_storage
from forged.checkpoint.loading.matching import Matching, settled
from forged.checkpoint.loading.read_plan import Index
from forged.checkpoint.loading.repair import CopyRepairer
from forged.checkpoint.loading.resharding import (
    boxes_for,
    common_of_others,
    common_to_all,
    lacking,
    pruned,
    tree_for,
    turns,
)
from forged.checkpoint.model import LoadOptions, RepairedChunk, ReshardingStrategy, ShardedArray
from forged.checkpoint.ports import Halt, Storage, bounded
from forged.checkpoint.storage.listing import read_manifest

OPTIMIZER = "optimizer"
RNG = "rng"
NAMES_TOLD_MAX = 24


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded."""

    state: Any
    repaired: tuple[RepairedChunk, ...]
    missing: tuple[str, ...]
    """What the state has, or a rank has for itself, and the checkpoint has not."""
    unexpected: tuple[str, ...]
    """What the checkpoint has and the state has not."""
    mismatched: tuple[str, ...]
    """What differs in shape or type."""
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
    halt: Halt | None = None,
    leaf_types: Sequence[LeafType] = (),
    sections: Collection[str] | None = None,
    others: Callable[[], Iterator[Manifest]] | None = None,
    threads: int = READERS,
) -> Loaded:
    """The state of a rank; in the arrays of `into`, where it is given.

    `sections` are the top keys of the state that are to be loaded; those that `into` lacks come in new arrays. `others`
    gives the manifests in which healthy copies of bad chunks are looked for; without it, all in the storage.
    """
    loading = _Loading(manifest, rank, world_size, options or LoadOptions(), tuple(leaf_types))
    state = loading.state(into, sections)
    loading.require_alike()
    halt, index = halt or Halt(), loading.index
    storage = bounded(storage, halt)
    fetched = loading.fetch(storage, halt, CopyRepairer(storage, index, halt, others), threads)
    return Loaded(
        settled(state(fetched.arrays)) if loading.has_foreign else state(fetched.arrays),
        tuple(fetched.repaired),
        tuple(loading.missing),
        tuple(loading.unexpected),
        tuple(loading.mismatched),
        fetched.read,
        fetched.needed,
    )


State = Callable[[Sequence[Array]], Any]
"""Gives a state when its arrays were read."""


class _Loading:
    """One load: what is wanted, and where it goes."""

    def __init__(
        self, manifest: Manifest, rank: int, world_size: int, options: LoadOptions, leaf_types: tuple[LeafType, ...]
    ) -> None:
        if not 0 <= rank < world_size:
            raise invalid(f"rank {rank} of {world_size}", "give a rank from 0 to world_size - 1")
        self.index = Index(manifest)
        self.wanted: list[int] = []
        self.boxes: dict[int, Box] = {}
        self.rooms: dict[int, Array] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: dict[str, str] = {}
        self.has_foreign = False
        self._manifest = manifest
        self._rank = rank
        self._world_size = world_size
        self._options = options
        self._leaf_types = leaf_types
        self._chosen = _chosen(manifest, options.only)
        self._lacking = lacking(manifest, rank)

    @property
    def _is_same_world(self) -> bool:
        return self._world_size == self._manifest.world_size

    def state(self, into: Any | None, sections: Collection[str] | None) -> State:
        """What is to be read for the state."""
        tree = tree_for(self._manifest, self._rank, self._world_size)
        match tree:
            case {"d": entries}:
                return self._sections(dict(entries), into, sections)
            case _ if into is None:
                return self._new(tree)
            case _:
                return self._filled(tree, into)

    def _sections(self, entries: dict[str, Node], into: Any | None, sections: Collection[str] | None) -> State:
        """The same, where the state is a dict."""
        options = self._options
        left = {*(() if options.load_optimizer else [OPTIMIZER]), *(() if options.load_rng_state else [RNG])}

        def is_wanted(key: Any) -> bool:
            return key not in left and (sections is None or key in sections)

        wanted = {key: node for key, node in entries.items() if is_wanted(key)}
        self.missing += sorted(name for name in self._lacking if is_wanted(name.partition("/")[0]))
        if into is None:
            return self._new({"d": wanted})
        if not isinstance(into, Mapping):
            return self._filled({"d": wanted}, into)
        fresh = {key: node for key, node in wanted.items() if sections is not None and key not in into}
        filled = self._filled(
            {"d": {key: node for key, node in wanted.items() if key not in fresh}},
            {key: value for key, value in into.items() if is_wanted(key)},
        )
        new = self._new({"d": fresh})

        def state(arrays: Sequence[Array]) -> Any:
            both = {**filled(arrays), **new(arrays)}
            return {key: both[key] for key in (*wanted, *both) if key in both}

        return state

    def _filled(self, tree: Node, into: Any) -> State:
        """The state with the arrays that there are."""
        matching = Matching(self._manifest.tensors, self._leaf_types, self._chosen, self._of_others)
        state = matching.match(tree, into)
        matching.fit()
        self.wanted = matching.numbers
        self.boxes = matching.boxes
        self.rooms = dict(enumerate(matching.arrays))
        self.has_foreign = matching.has_foreign
        self.mismatched = matching.mismatched
        self.missing += [name for name in matching.missing if self._is_chosen(name) and name not in self._lacking]
        self.unexpected += self._unexpected(matching)
        return lambda arrays: state

    def _unexpected(self, matching: Matching) -> list[str]:
        """What of the checkpoint has no place in the state; in another world, of what every rank had."""
        if not matching.unexpected:
            return []
        expected = None if self._is_same_world else common_to_all(self._manifest)
        taken = set(matching.numbers)
        names = self._manifest.tensors.names
        return [
            names[number]
            for number in matching.unexpected
            if number not in taken and (expected is None or number in expected) and self._is_chosen(names[number])
        ]

    def _of_others(self) -> list[Node]:
        return common_of_others(self._manifest, self._rank)

    def _new(self, tree: Node) -> State:
        """The state in new arrays."""
        names = self._manifest.tensors.names
        everything = list(tensor_numbers(tree))
        numbers = [number for number in everything if self._is_chosen(names[number])]
        strategy = self._options.resharding_strategy
        if not self._is_same_world and strategy is ReshardingStrategy.SIMPLE:
            others = turns(self._manifest, self._rank, self._world_size, numbers)
            numbers = [number for number in numbers if number not in others]
        first = len(self.wanted)
        self.wanted = self.wanted + numbers
        parts = boxes_for(self._manifest, self._rank, self._world_size, strategy, numbers)
        places = {number: place for place, number in enumerate(numbers, first)}
        self.boxes = self.boxes | {places[number]: box for number, box in parts.items() if number in places}
        if len(numbers) < len(everything):
            tree = pruned(tree, places.__contains__, keeps_private=True)
        shapes = self._manifest.tensors.shapes

        def state(arrays: Sequence[Array]) -> Any:
            def tensor(number: int) -> Any:
                array = arrays[places[number]]
                return ShardedArray(array, shapes[number], parts[number].offset) if number in parts else array

            return unflatten(tree, tensor)

        return state

    def _is_chosen(self, name: str) -> bool:
        return self._chosen is None or self._chosen(name)

    def require_alike(self) -> None:
        """Refuse what differs, if it has to be the same."""
        missing = [name for name in self.missing if name not in self._lacking]
        if not self._options.strict_mode or not (missing or self.unexpected or self.mismatched):
            return
        told = [
            *self.mismatched.values(),
            *(f"{name} is not in the checkpoint" for name in missing),
            *(f"{name} is not in the state" for name in self.unexpected),
        ]
        more = [f"and {len(told) - NAMES_TOLD_MAX} more"] if len(told) > NAMES_TOLD_MAX else []
        raise CheckpointException(
            f"the state is not like that in {self._manifest.prefix}: " + "; ".join([*told[:NAMES_TOLD_MAX], *more]),
            self._manifest.prefix,
            ExceptionType.LOAD_FAILED,
            code="checkpoint_state_differs",
            fix="make the state as it was when it was saved, or load what fits (strict_mode=False, or strict=False)",
        )

    def fetch(self, storage: Storage, halt: Halt, repairer: CopyRepairer, threads: int) -> Fetched:
        """Read it."""
        tied = _tied(self.rooms)
        rooms = {want: room for want, room in self.rooms.items() if want not in tied} if tied else self.rooms
        try:
            fetched = fetch(
                storage,
                self.index,
                self.wanted,
                halt,
                boxes=self.boxes,
                into=rooms,
                repairer=repairer,
                rank=self._rank,
                threads=threads,
            )
        except CheckpointException as error:
            raise self._told(_gone(storage, self._manifest) or error if is_of_storage(error) else error) from error
        self._copy(tied, fetched)
        return fetched

    def _copy(self, tied: Collection[int], fetched: Fetched) -> None:
        """Put what was read into arrays that share memory; there has to be room for all of it."""
        for want in tied:
            self.rooms[want][...] = fetched.arrays[want]
        for want in tied:
            room = self.rooms[want]
            if room.tobytes() != fetched.arrays[want].tobytes():
                raise self._told(
                    CheckpointException(
                        f"{self._manifest.tensors.names[self.wanted[want]]} shares memory with another array of the "
                        "state, or has elements that do with each other, and the checkpoint has other values for it",
                        self._manifest.prefix,
                        ExceptionType.LOAD_FAILED,
                        code="checkpoint_arrays_shared",
                        fix="load it into arrays of its own",
                    )
                )
            fetched.arrays[want] = room

    def _told(self, error: CheckpointException) -> CheckpointException:
        """An error that says what became of the arrays."""
        if not self.rooms:
            return error
        return CheckpointException(
            f"{error.message}; the arrays of the state may be overwritten in part",
            error.checkpoint_path,
            error.type,
            code=error.code,
            fix=error.fix,
            retryable=error.retryable,
        )


def _chosen(manifest: Manifest, patterns: Sequence[str]) -> Callable[[str], bool] | None:
    """Whether a name is one of those or matches one of them; a pattern for which there is nothing is refused."""
    if not patterns:
        return None
    names = set(manifest.tensors.names)
    found: set[str] = set()
    for pattern in patterns:
        matched = {pattern} if pattern in names else {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise invalid(
                f"nothing in {manifest.prefix} is called {pattern!r}",
                "`forgectl ckpt show` lists the names",
                code="checkpoint_tensor_unknown",
            )
        found |= matched
    return found.__contains__


def _gone(storage: Storage, manifest: Manifest) -> CheckpointException | None:
    """What is raised where a checkpoint is not the one any more that was to be read."""
    try:
        if read_manifest(storage, manifest.prefix).save_id == manifest.save_id:
            return None
        code, became = "checkpoint_replaced", "replaced"
    except CheckpointException as error:
        if error.code != "checkpoint_missing":
            return None
        code, became = "checkpoint_deleted", "deleted"
    return CheckpointException(
        f"the checkpoint {manifest.prefix} was {became} while it was loaded",
        manifest.prefix,
        ExceptionType.LOAD_FAILED,
        code=code,
        fix="load it again" if became == "replaced" else "load another one; `forgectl ckpt ls` shows which there are",
        retryable=True,
    )


def _tied(rooms: Mapping[int, Array]) -> list[int]:
    """The wants whose arrays may share memory with others, or whose own elements do."""
    if all(room.base is None for room in rooms.values()) and len(set(map(id, rooms.values()))) == len(rooms):
        return []
    bounds = sorted((*_bounds(room), want) for want, room in rooms.items() if room.size)
    tied = {want for want, room in rooms.items() if _folds(room)}
    end, last = 0, -1
    for low, high, want in bounds:
        if low < end:
            tied |= {want, last}
        if high > end:
            end, last = high, want
    return sorted(tied)


def _folds(array: Array) -> bool:
    """Whether elements of an array may lie one over the other."""
    reach = array.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += max(0, size - 1) * stride
    return False


def _bounds(array: Array) -> tuple[int, int]:
    """Where in memory an array begins and ends."""
    low = high = int(array.__array_interface__["data"][0])
    for size, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, (size - 1) * stride), high + max(0, (size - 1) * stride)
    return low, high + array.itemsize
