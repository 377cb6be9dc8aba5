"""Deliberate bugs, to show that the trials find bugs.

Law: a mutant changes one thing that saving, loading or deleting rests on. Each must be caught by its trial, which finds
nothing without it; one that survives says that the trials are blind there.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pytest

from forged.checkpoint.format import tree
from forged.checkpoint.format.manifest import SUFFIX, TOMBSTONE, Manifest, decode
from forged.checkpoint.format.tree import _Flattening
from forged.checkpoint.loading.fetching import _Fetching
from forged.checkpoint.model import PerRank
from forged.checkpoint.ports import Storage
from forged.checkpoint.saving import publication
from forged.checkpoint.saving.pipeline import Saver
from forged.checkpoint.storage import direct_write, listing, local
from forged.checkpoint.storage.ancestry import AncestryCache
from forged.checkpoint.storage.direct_write import write_whole
from forged.checkpoint.storage.files import UNNAMED, Files, directory_of
from forged.checkpoint.storage.local import LocalStorage
from tests.checkpoint.crashes.crash_trials import (
    DELETE,
    SAVE,
    SAVE_INCREMENT,
    Group,
    after_damage,
    after_kills,
    after_refusals,
    before,
    concurrent_actions,
    kills_and_power_cuts,
)
from tests.checkpoint.crashes.save_history import HALF, lives_in_chains
from tests.checkpoint.fixtures.memory_files import ROOT

Plant = Callable[[pytest.MonkeyPatch], None]
Trial = Callable[[], Iterator[str]]


class Mutant(NamedTuple):
    """A bug, and what finds it."""

    plant: Plant
    trial: Trial


def power_cuts(size: int = 1) -> Trial:
    return lambda: kills_and_power_cuts(Group(size))


def refusals(number: int, lasting: Any) -> Trial:
    return lambda: after_refusals(Group(), before(Group()), SAVE, number, lasting)


def kills(action: Any) -> Trial:
    return lambda: after_kills(Group(), before(Group()), action)


def power_cuts_in_chains() -> Trial:
    return lambda: kills_and_power_cuts(Group(), lives_in_chains)


def deletions_of_bases() -> Trial:
    """Whether an incremental save is half there after its base was deleted meanwhile."""

    def trial() -> Iterator[str]:
        for concurrent in concurrent_actions(Group(), SAVE_INCREMENT, lambda history: history.delete("old", 1)):
            if HALF in concurrent.found.values():
                yield f"{concurrent}"

    return trial


def damage() -> Trial:
    return lambda: after_damage(Group())


TRIALS = {
    "power cuts": power_cuts(),
    "power cuts of two": power_cuts(2),
    "passing refusals": refusals(errno.EIO, "once"),
    "lasting refusals": refusals(errno.EIO, "kind"),
    "kills of a save": kills(SAVE),
    "kills of a deletion": kills(DELETE),
    "damage": damage(),
    "power cuts in chains": power_cuts_in_chains(),
    "deletions of bases": deletions_of_bases(),
}

# What is not made durable.


def parts_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The bytes of a part are written, and never made to last."""

    def hasty(act: Any, *args: Any) -> Any:
        return None if _is_sync(act) else act(*args)

    patch.setattr(direct_write, "retry_interrupted", hasty)
    patch.setattr(local, "write_whole", _write_and_sync)


def manifests_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The bytes of a manifest are written, and never made to last."""
    patch.setattr(local, "write_whole", _write)


def nothing_is_settled(patch: pytest.MonkeyPatch) -> None:
    """Names of parts are not made to last before the manifest is published."""
    patch.setattr(LocalStorage, "sync_names", lambda self, names: None)


def directories_above_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """A directory is synced, but not the name of the directory itself."""

    def alone(self: LocalStorage, directories: Collection[str]) -> None:
        for directory in directories:
            self._sync_directory(directory)

    patch.setattr(LocalStorage, "_sync_up", alone)


def the_storages_directory_is_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The directory of all checkpoints is made, and its own name not made to last."""

    def make(self: LocalStorage, path: str) -> None:
        if path != ROOT:
            make(self, directory_of(path))
            with suppress(FileExistsError):
                self._files.make_directory(path)

    patch.setattr(LocalStorage, "_make_directories", make)


def publications_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """A manifest is named, and the name not made to last."""

    def publish(self: LocalStorage, name: str, data: bytes) -> None:
        assert self._publish_unnamed(self._path(name), memoryview(data))

    patch.setattr(LocalStorage, "publish", publish)


def moves_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """A tombstone stands, and may be gone after a power cut."""
    tombstones_of_others_are_trusted(patch)
    patch.setattr(LocalStorage, "move", lambda self, name, to: self._rename(self._path(name), self._path(to)))


def deletions_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """What is removed may be back after a power cut."""
    patch.setattr(LocalStorage, "_sync_nearest", lambda self, directory: None)


def only_own_deletions_are_synced(patch: pytest.MonkeyPatch) -> None:
    """What is gone already is taken for gone for good."""
    delete = LocalStorage.delete

    def lazy(self: LocalStorage, names: Collection[str]) -> None:
        delete(self, [name for name in names if self._is_there(self._path(name))])

    patch.setattr(LocalStorage, "delete", lazy)


def tombstones_of_others_are_trusted(patch: pytest.MonkeyPatch) -> None:
    """A tombstone that is found is taken to be durable."""
    sync_names = LocalStorage.sync_names

    def trusting(self: LocalStorage, names: Collection[str]) -> None:
        sync_names(self, [name for name in names if not name.endswith(TOMBSTONE)])

    patch.setattr(LocalStorage, "sync_names", trusting)


def failed_syncs_are_tried_again(patch: pytest.MonkeyPatch) -> None:
    """A sync that has failed is called a second time, which succeeds and means nothing."""

    def stubborn(act: Any, *args: Any) -> Any:
        try:
            return act(*args)
        except OSError:
            return act(*args)

    patch.setattr(direct_write, "retry_interrupted", stubborn)


def failed_syncs_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A failed sync is not reported."""

    def forgetful(act: Any, *args: Any) -> Any:
        try:
            return act(*args)
        except OSError:
            if not _is_sync(act):
                raise

    patch.setattr(direct_write, "retry_interrupted", forgetful)


def failed_syncs_of_directories_are_tried_again(patch: pytest.MonkeyPatch) -> None:
    """Likewise of a directory."""
    sync_directory = LocalStorage._sync_directory

    def stubborn(self: LocalStorage, path: str) -> None:
        try:
            sync_directory(self, path)
        except OSError:
            sync_directory(self, path)

    patch.setattr(LocalStorage, "_sync_directory", stubborn)


# What is done in another order.


def manifests_are_named_before_they_are_whole(patch: pytest.MonkeyPatch) -> None:
    """A manifest gets its name first, and its bytes then."""

    def publish(self: LocalStorage, path: str, data: memoryview) -> bool:
        fd = self._open_new(directory_of(path), UNNAMED)
        self._files.link_open(fd, path)
        write_whole(self._files, fd, data)
        self._files.close(fd)
        return True

    patch.setattr(LocalStorage, "_publish_unnamed", publish)


def manifests_are_published_before_parts_are_settled(patch: pytest.MonkeyPatch) -> None:
    """The names of the parts are made to last after the manifest's."""
    unsettled: list[str] = []
    sync_names, publish = LocalStorage.sync_names, LocalStorage.publish

    def later(self: LocalStorage, name: str, data: bytes) -> None:
        publish(self, name, data)
        sync_names(self, unsettled)
        unsettled.clear()

    patch.setattr(LocalStorage, "sync_names", lambda self, names: unsettled.extend(names))
    patch.setattr(LocalStorage, "publish", later)


def files_are_deleted_before_the_tombstone_stands(patch: pytest.MonkeyPatch) -> None:
    """What a manifest names goes first, and the manifest then."""

    def delete(storage: Storage, prefix: str, ancestries: object) -> None:
        storage.delete(listing.files_of(listing.read_manifest(storage, prefix)))
        storage.delete([prefix + SUFFIX])

    patch.setattr(listing, "delete", delete)


def parts_are_deleted_while_the_manifest_may_stand(patch: pytest.MonkeyPatch) -> None:
    """A manifest is kept after its publication failed."""
    patch.setattr(publication, "_exists_after", lambda *args: False)


def compacted_files_are_written_after_the_manifest(patch: pytest.MonkeyPatch) -> None:
    """A manifest names the new files of a compaction before their names last."""
    unsettled: list[str] = []
    sync_names, move = LocalStorage.sync_names, LocalStorage.move

    def later(self: LocalStorage, name: str, to: str) -> None:
        move(self, name, to)
        sync_names(self, unsettled)
        unsettled.clear()

    patch.setattr(LocalStorage, "sync_names", lambda self, names: unsettled.extend(names))
    patch.setattr(LocalStorage, "move", later)


# What is left behind, mixed up or not looked at.


def deleted_bases_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """An incremental save does not see that its base was deleted meanwhile."""
    patch.setattr(publication, "require_links", lambda storage, manifest: None)


def users_of_files_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """A deletion does not see that a later checkpoint uses the files."""
    patch.setattr(AncestryCache, "users_of", lambda *args: [])


def saves_that_fail_are_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """A save fails, and its files stay."""
    patch.setattr(Saver, "roll_back", lambda self, work: None)


def random_states_are_taken_for_copies(patch: pytest.MonkeyPatch) -> None:
    """What every rank has for itself is saved once, as if all had the same."""
    container = _Flattening._container

    def shared(self: _Flattening, value: Any, path: str, depth: int, *, is_per_rank: bool) -> Any:
        if isinstance(value, PerRank):
            return self.node(value.value, path, depth, is_per_rank=False)
        return container(self, value, path, depth, is_per_rank=is_per_rank)

    patch.setattr(tree._Flattening, "_container", shared)


def hashes_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """What is read is taken as it is."""
    patch.setattr(_Fetching, "_verify", lambda self, layout, first, slots, unreadable: None)


def manifests_are_believed(patch: pytest.MonkeyPatch) -> None:
    """The checksum of a manifest is not looked at."""
    import xxhash

    def credulous(data: bytes, path: str) -> Manifest:
        body, _, tail = data.rpartition(b',"checksum":"')
        return decode(body + b',"checksum":"' + xxhash.xxh3_128_hexdigest(body).encode() + tail[32:], path)

    patch.setattr(listing, "decode", credulous)


def _is_sync(act: Any) -> bool:
    name: str = act.args[0] if isinstance(act, partial) else act.__name__
    return name == "sync"


def _write(files: Files, fd: int, data: memoryview) -> None:
    files.write(fd, data, 0)


def _write_and_sync(files: Files, fd: int, data: memoryview) -> None:
    files.write(fd, data, 0)
    files.sync(fd)


MUTANTS = [
    Mutant(parts_are_not_synced, power_cuts()),
    Mutant(manifests_are_not_synced, power_cuts()),
    Mutant(nothing_is_settled, power_cuts()),
    Mutant(directories_above_are_not_synced, power_cuts()),
    Mutant(the_storages_directory_is_not_synced, power_cuts()),
    Mutant(publications_are_not_synced, power_cuts()),
    Mutant(moves_are_not_synced, power_cuts()),
    Mutant(deletions_are_not_synced, power_cuts()),
    Mutant(only_own_deletions_are_synced, kills(DELETE)),
    Mutant(tombstones_of_others_are_trusted, kills(DELETE)),
    Mutant(failed_syncs_are_tried_again, refusals(errno.EIO, "once")),
    Mutant(failed_syncs_of_directories_are_tried_again, refusals(errno.EIO, "once")),
    Mutant(failed_syncs_are_forgotten, refusals(errno.EIO, "once")),
    Mutant(manifests_are_named_before_they_are_whole, power_cuts()),
    Mutant(manifests_are_published_before_parts_are_settled, power_cuts()),
    Mutant(files_are_deleted_before_the_tombstone_stands, power_cuts()),
    Mutant(parts_are_deleted_while_the_manifest_may_stand, refusals(errno.EIO, "kind")),
    Mutant(saves_that_fail_are_not_rolled_back, refusals(errno.EIO, "once")),
    Mutant(random_states_are_taken_for_copies, power_cuts(2)),
    Mutant(hashes_are_not_looked_at, damage()),
    Mutant(manifests_are_believed, damage()),
    Mutant(compacted_files_are_written_after_the_manifest, power_cuts_in_chains()),
    Mutant(deleted_bases_are_not_looked_for, deletions_of_bases()),
    Mutant(users_of_files_are_not_looked_for, deletions_of_bases()),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.plant.__name__)
def test_a_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)
    assert next(mutant.trial(), None) is not None


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_nothing_is_caught_without_one(trial: Trial) -> None:
    assert next(trial(), None) is None
