"""Crash trials: power cuts, kills and refusals at every operation of an action on checkpoints.

A trial yields a description of each violation; none if all invariants hold.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, Literal, NamedTuple, TypeAlias

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.crashes.save_history import (
    AT,
    PATIENCE_S,
    Expectation,
    Finder,
    History,
    expected_after,
    lives,
    load_all,
    same,
    state,
)
from tests.checkpoint.fixtures.faulty_files import Act, Fault, ProcessDied, with_fault
from tests.checkpoint.fixtures.memory_files import CrashImages, Image, MemoryFiles

STATES_PER_MOMENT_MAX = 400
CALLS = "checkpoint-calls"
"""The thread that asks object stores: there is one in a process, and it stays."""
TORN = 200
"""So many mixtures of what was written and what was not are tried of every file."""
SHORT = 0
"""Stands for the number of an error: writes take less than they are given."""
UNDECIDED = "checkpoint_undecided"

Lasting: TypeAlias = Literal["once", "kind", "all"]
"""Whether an operation fails, or it and all later ones of its kind, or it and all later ones."""


class Group(NamedTuple):
    """How many ranks there are, how they save, and what their file system lacks."""

    size: int = 1
    in_background: bool = False
    retries: int = 0
    lacking: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    timeout_s: float = PATIENCE_S

    def __str__(self) -> str:
        """What differs from the simplest one, for the names of tests."""
        plain = Group()
        told = [f"{name}={mine}" for name, mine, its in zip(self._fields, self, plain, strict=True) if mine != its]
        return ",".join(told) or "alone"

    def disk(self, image: Image | None = None) -> MemoryFiles:
        """A disk with this on it."""
        return MemoryFiles(lacking=self.lacking) if image is None else MemoryFiles(image, self.lacking)

    def history(self, memory: MemoryFiles, fault: Fault | None = None) -> History:
        """What these ranks do on a disk, perhaps with faults."""
        files = None if fault is None else with_fault(memory, fault)
        return History(
            memory,
            files,
            self.size,
            retries=self.retries,
            in_background=self.in_background,
            timeout_s=self.timeout_s,
            **dict(self.options),
        )


BEFORE = {"old": 1}


class Action(NamedTuple):
    """Something that is done on a disk, and done again when it was interrupted."""

    name: str
    act: Callable[[History], object]
    again: Callable[[History], object]
    leaves: Mapping[str, int]
    """The checkpoints that are there afterwards."""
    prepare: Callable[[History], object] = lambda history: history.save("old", 1)
    finds: Mapping[str, int] = BEFORE
    """The checkpoints that are there before."""

    def __str__(self) -> str:
        return self.name


def _save_again(history: History) -> None:
    history.clear_away()
    with unless("checkpoint_exists"):
        history.save("new", 2)


def _save_increment_again(history: History) -> None:
    history.clear_away()
    with unless("checkpoint_exists"):
        history.save("new", 2, base="old")


def _save_two(history: History) -> None:
    """A full checkpoint, and an incremental one that uses its files."""
    history.save("old", 1)
    history.save("new", 2, base="old")


def _compact_again(history: History) -> None:
    history.clear_away()
    history.compact("new")


def _convert_again(history: History) -> None:
    history.clear_away()
    with unless("checkpoint_exists"):
        history.convert("old", "new", 1)


def _delete_again(history: History) -> None:
    with unless("checkpoint_missing"):
        history.delete("old", 1)


SAVE = Action("save", lambda history: history.save("new", 2), _save_again, {"old": 1, "new": 2})
CONVERT = Action("convert", lambda history: history.convert("old", "new", 1), _convert_again, {"old": 1, "new": 1})
DELETE = Action("delete", lambda history: history.delete("old", 1), _delete_again, {})
SAVE_INCREMENT = Action(
    "incremental save", lambda history: history.save("new", 2, base="old"), _save_increment_again, {"old": 1, "new": 2}
)
COMPACT = Action(
    "compaction",
    lambda history: history.compact("new"),
    _compact_again,
    {"old": 1, "new": 2},
    _save_two,
    {"old": 1, "new": 2},
)


def before(world: Group, action: Action = SAVE) -> Image:
    """A disk with the checkpoints that an action finds."""
    memory = world.disk()
    action.prepare(world.history(memory))
    return memory.image


def operations(world: Group, image: Image, action: Action) -> list[str]:
    """The names of the operations that a action takes."""
    names: dict[int, str] = {}

    def noted(number: int, name: str, act: Act) -> Any:
        names[number] = name
        return act()

    action.act(world.history(world.disk(image), noted))
    return [names[number] for number in range(len(names))]


# Power cuts.


def kills_and_power_cuts(world: Group, live: Callable[[History], object] = lives, **rest: Any) -> Iterator[str]:
    """What is wrong on the disks that a power cut may leave in a long history."""
    memory = world.disk()
    live(world.history(memory))
    return after_power_cuts(memory, Finder(world.size), **rest)


def after_power_cuts(
    memory: MemoryFiles,
    finder: Finder,
    certain: Mapping[str, int] | None = None,
    *,
    seen: dict[Any, Image] | None = None,
    states_max: int = STATES_PER_MOMENT_MAX,
    torn: int = TORN,
) -> Iterator[str]:
    """What is wrong on the disks that a power cut may leave, at every moment of what was done to these files.

    What was looked at is gathered in `seen`.
    """
    platter, expected, random = CrashImages(memory), Expectation(dict(certain or {})), Random(0)
    for operation in memory.operations:
        platter.follow(operation)
        if operation.kind == "mark":
            expected.note(operation.path)
        yield from _wrong_after_one(platter, finder, expected, random, seen, states_max, torn)


def _wrong_after_one(
    platter: CrashImages,
    finder: Finder,
    expected: Expectation,
    random: Random,
    seen: dict[Any, Image] | None,
    states_max: int,
    torn: int,
) -> Iterator[str]:
    for image in platter.crashes(random, states_max, torn):
        if seen is not None:
            seen[image.key] = image
        if wrong := finder.wrong(image, expected):
            yield f"after a power cut {wrong}"


# Refusals.


def failing_from(first: int, number: int, lasting: Lasting) -> Fault:
    """Refuse one operation with this errno, and possibly the following ones."""
    kind = ""

    def fault(count: int, name: str, act: Act) -> Any:
        nonlocal kind
        if count == first:
            kind = name
        elif count < first or lasting == "once" or (lasting == "kind" and name != kind):
            return act()
        if number == SHORT:
            return _shortened(act) if name == "write" else act()
        if name == "close":
            act()
        raise OSError(number, os.strerror(number))

    return fault


def dying_at(first: int) -> Fault:
    """The process dies before this operation."""

    def fault(count: int, name: str, act: Act) -> Any:
        if count < first:
            return act()
        if name == "close":
            act()
        raise ProcessDied(errno.EIO, os.strerror(errno.EIO))

    return fault


def after_refusals(
    world: Group, image: Image, action: Action, number: int, lasting: Lasting, *, moments: Collection[int] | None = None
) -> Iterator[str]:
    """What is wrong when one operation after the other is the one that is refused."""
    for first in moments if moments is not None else range(len(operations(world, image, action))):
        memory = world.disk(image)
        for wrong in _after(world, memory, action, failing_from(first, number, lasting), is_once=lasting == "once"):
            yield f"{action.name} in {world}, operation {first} refused with {number} {lasting}: {wrong}"


def after_fault(world: Group, image: Image, action: Action, fault: Fault) -> Iterator[str]:
    """What is wrong after this fault has come once in between."""
    return _after(world, world.disk(image), action, fault, is_once=True)


def _after(world: Group, memory: MemoryFiles, action: Action, fault: Fault, *, is_once: bool) -> Iterator[str]:
    untouched = memory.image.key
    error = _outcome(lambda: action.act(world.history(memory, fault)))
    if error is not None and not isinstance(error, CheckpointException):
        yield f"an error without a type: {error!r}"
    yield from _leaks(memory)
    expected, finder = expected_after(memory, action.finds), Finder(world.size)
    if wrong := finder.wrong(memory.image, expected):
        yield f"in spite of {error!r} {wrong}"
    is_decided = isinstance(error, CheckpointException) and error.code != UNDECIDED and not world.in_background
    if is_once and is_decided and action not in (DELETE, COMPACT) and memory.image.key != untouched:
        yield f"left behind by {error!r}: {sorted(memory.image.files)}, {sorted(memory.image.directories)}"
    platter = CrashImages(memory)
    for operation in memory.operations:
        platter.follow(operation)
    yield from _wrong_after_one(platter, finder, expected, Random(0), None, 30, 2)
    yield from after_clearing(world, memory, finder)


def _leaks(memory: MemoryFiles) -> Iterator[str]:
    if memory.descriptors:
        yield f"{memory.descriptors} descriptors are open"
    names = [thread.name for thread in threading.enumerate()]
    if threads := [name for name in names if name.startswith("checkpoint") and name != CALLS]:
        yield f"threads are left: {threads}"


def _shortened(act: Act) -> Any:
    """A write that takes about half, in whole pages where it was given whole pages."""
    assert isinstance(act, partial)
    fd, data, offset = act.args
    half = len(data) // 2 if len(data) % 4096 else len(data) // 8192 * 4096
    return act.func(fd, data[: max(half, 1 if len(data) % 4096 else 4096)], offset)


# Kills.


def after_kills(
    world: Group, image: Image, action: Action, *, finder: Finder | None = None, moments: Collection[int] | None = None
) -> Iterator[str]:
    """What is wrong when a process dies at one operation after the other, another one does the same again, and then,
    at any moment of that, the power is cut."""
    finder = finder or Finder(world.size)
    for first in moments if moments is not None else range(len(operations(world, image, action))):
        memory = world.disk(image)
        _outcome(lambda: action.act(world.history(memory, dying_at(first))))  # noqa: B023
        after = f"{action.name} in {world}, killed at operation {first}"
        if wrong := finder.wrong(memory.image, expected_after(memory, action.finds)):
            yield f"{after}: {wrong}"
        if error := _outcome(lambda: action.again(world.history(memory))):  # noqa: B023
            yield f"{after}: done again, {error!r}"
            continue
        yield from (
            f"{after}: {wrong}" for wrong in after_power_cuts(memory, finder, action.finds, states_max=60, torn=2)
        )
        yield from (f"{after}: {wrong}" for wrong in _rest(world, memory, action, finder))


def _rest(world: Group, memory: MemoryFiles, action: Action, finder: Finder) -> Iterator[str]:
    """What is there in the end besides what ought to be."""
    if (found := finder.found(memory.image)) != action.leaves:
        yield f"in the end there is {found}"
    yield from after_clearing(world, memory, finder)


def after_clearing(world: Group, memory: MemoryFiles, finder: Finder) -> Iterator[str]:
    """What is wrong when everything has been cleared away that is no checkpoint."""
    found = finder.found(memory.image)
    world.history(memory).clear_away()
    if (left := finder.found(memory.image)) != found:
        yield f"clearing away has made {left} of {found}"
    known = tuple(f"{AT}/{prefix}" for prefix in found)
    lost = [path for path in memory.image.files if not path.startswith(known) and "/." not in path]
    if lost:
        yield f"no cleanup will ever remove {lost}"


# Meetings.


class ConcurrentActions(NamedTuple):
    """What came of it when something was done in the middle of something else, and what was found then."""

    first: BaseException | None
    other: BaseException | None
    found: dict[str, int]
    wrong: list[str]
    """Violations after a further power cut, and files that no cleanup will remove."""


def concurrent_actions(world: Group, first: Action, other: Callable[[History], object]) -> Iterator[ConcurrentActions]:
    """Something else is done as a whole, by another process, before one operation of a action after the other."""
    image = before(world, first)
    stranger = world._replace(options=(*world.options, ("seed", 1)))
    for moment in range(1, len(operations(world, image, first))):
        memory = world.disk(image)
        errors: list[BaseException | None] = []

        def come_in(
            number: int,
            name: str,
            act: Act,
            moment: int = moment,
            memory: MemoryFiles = memory,
            errors: list[BaseException | None] = errors,
        ) -> Any:
            if number == moment:
                errors.append(_outcome(lambda: other(stranger.history(memory))))
            return act()

        error = _outcome(lambda: first.act(world.history(memory, come_in)))  # noqa: B023
        finder = Finder(world.size)
        found = finder.found(memory.image)
        yield ConcurrentActions(error, errors[0], found, list(_worse(world, memory, finder, found)))


def _worse(world: Group, memory: MemoryFiles, finder: Finder, found: dict[str, int]) -> Iterator[str]:
    platter = CrashImages(memory)
    for operation in memory.operations:
        platter.follow(operation)
    for image in platter.crashes(Random(0), 30, 2):
        for prefix, version in finder.found(image).items():
            if version != found.get(prefix):
                yield f"{prefix} is {version} after a power cut, and was {found.get(prefix)}"
    yield from after_clearing(world, memory, finder)


# Damage.


def after_damage(world: Group, every: int = 97) -> Iterator[str]:
    """What is loaded without an error, and is wrong, when one bit is."""
    image = before(world)
    wanted = [state(1, rank, world.size) for rank in range(world.size)]
    for path, data in image.files.items():
        # A manifest is small, and few of its bits make another state.
        for offset in range(0, len(data), min(every, max(1, len(data) // 64))):
            damaged = data[:offset] + bytes([data[offset] ^ 1 << offset % 8]) + data[offset + 1 :]
            storage = LocalStorage(AT, files=world.disk(Image({**image.files, path: damaged}, image.directories)))
            try:
                is_right = all(map(same, load_all(storage, "old"), wanted))
            except CheckpointException:
                continue
            if not is_right:
                yield f"a bit of byte {offset} of {path} makes another state"


def _outcome(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - what it is, is what is looked at
        return error
    return None


@contextmanager
def unless(code: str) -> Iterator[None]:
    """Let errors with this code pass."""
    try:
        yield
    except CheckpointException as error:
        if error.code != code:
            raise
