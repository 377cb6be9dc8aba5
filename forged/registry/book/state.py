"""All models in memory, with what finds them; the only owner of this state.

Invariants:
- The memory is what the store holds and what the decisions under way write.
- Each byte that is stored is charged to the principal that has caused it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from forged.auth.model import Principal
from forged.catalog.records import CheckpointRecord
from forged.errors import RequestRefused
from forged.registry import errors
from forged.registry.book.model import Model
from forged.registry.book.version_index import Key, Property, VersionIndex
from forged.registry.model import ModelVersion
from forged.registry.names import checked_model_id, form_of, namespace_of
from forged.registry.records import (
    DELETED,
    MOVES,
    RECORD_OVERHEAD_BYTES,
    TAG_OVERHEAD_BYTES,
    AliasMove,
    VersionRecord,
    decoded_head,
    decoded_move,
    decoded_record,
)
from forged.registry.selection import SERVING_STATES, quality
from forged.registry.versions import parse_version
from forged.shares import Holder, Shares

REGISTRY_BYTES_MAX = 512 << 20
PARTS = 16
"""One part of the registry is left to operators, and four to principals other than the largest."""
ALL = ""
"""The ranking of the versions of all models."""

Rank = tuple[float, float, float, float, tuple[int, int, int], str, ModelVersion]
"""The quality of a version, the smallest the best, and its model's id."""


class RegistryState:
    """All models of a daemon."""

    def __init__(self, has_job: Callable[[str], bool] = lambda job: True, bytes_max: int = REGISTRY_BYTES_MAX) -> None:
        self.models: dict[str, Model] = {}
        self.ids: list[str] = []
        """Of the models that have versions, in ascending order."""
        self.index = VersionIndex()
        self.shares = Shares("registry bytes", 0)
        self._has_job = has_job
        self._forms: dict[str, list[str]] = {}
        """The ids of each form; two of them belong to different jobs."""
        self._costs: dict[Key, int] = {}
        self._ranked: dict[str, list[Rank]] = {}
        """The canary and production versions that were validated, of all models and of each one, the best first."""
        self.set_bytes_max(bytes_max)

    def set_bytes_max(self, bytes_max: int) -> None:
        part = bytes_max // PARTS
        self.shares.resize(bytes_max, part, bytes_max - 4 * part)

    # Loading.

    def load(
        self,
        heads: Iterable[bytes],
        records: Iterable[bytes],
        moves: Mapping[str, bytes],
        deleted: Mapping[str, bytes],
    ) -> None:
        """Replace everything by what the store holds; `moves` and `deleted` by their keys."""
        for (model_id, version), cost in self._costs.items():
            self.shares.give_back(self.models[model_id].records[version].holder, cost)
        for model in self.models.values():
            self._charge_journal(model, -1)
        for table in (self.models, self.ids, self._forms, self._costs, self._ranked, self.index):
            table.clear()
        by_digest: dict[str, Model] = {}
        for value in heads:
            model = self._loaded_head(value)
            by_digest[model.digest] = model
        found = [(decoded_record(value), len(value)) for value in records]
        # In order, so that each index grows at its end.
        found.sort(key=lambda one: (one[0].model_id, one[0].version))
        for record, size in found:
            self.put(self.models[record.model_id], record, size)
        for key, value in moves.items():
            self.add_move(by_digest[key.removeprefix(MOVES).partition("/")[0]], decoded_move(value))
        for key, value in deleted.items():
            digest, _, text = key.removeprefix(DELETED).partition("/")
            gone = parse_version(text)
            assert gone is not None, f"{key} names no version"
            by_digest[digest].deleted[gone] = int(value)
            by_digest[digest].note_version(gone)

    def _loaded_head(self, value: bytes) -> Model:
        head = decoded_head(value)
        model = self.add_model(head.model_id)
        model.entries, model.at, model.policy = head.entries, head.at, head.policy
        model.charges = dict(head.charges)
        self._charge_journal(model, 1)
        for alias, version in head.aliases.items():
            self.set_alias(model, alias, version)
        return model

    def _charge_journal(self, model: Model, sign: int) -> None:
        for holder, charged in model.charges.items():
            if sign > 0:
                self.shares.charge(holder, charged)
            else:
                self.shares.give_back(holder, charged)

    # Changes.

    def add_model(self, model_id: str) -> Model:
        model = self.models[model_id] = Model(model_id)
        self._forms.setdefault(form_of(model_id), []).append(model_id)
        return model

    def put(self, model: Model, record: VersionRecord, size: int) -> None:
        """Add or replace a version, whose record is stored in so many bytes."""
        key = model.model_id, record.version
        before = model.records.get(record.version)
        had = _properties(before) if before is not None else set[Property]()
        has = _properties(record)
        for what in had - has:
            self.index.remove(key, what)
        for what in has - had:
            self.index.add(key, what)
        if before is not None:
            self._unrank(before)
            self.shares.give_back(before.holder, self._costs[key])
        elif not model.versions:
            insort(self.ids, model.model_id)
        model.put(record)
        self._rank(record)
        cost = self._costs[key] = cost_of(record, size)
        self.shares.charge(record.holder, cost)

    def remove(self, model: Model, version: ModelVersion) -> None:
        """Delete a version, whose number stays taken."""
        key, record = (model.model_id, version), model.records[version]
        for what in _properties(record):
            self.index.remove(key, what)
        self._unrank(record)
        self.shares.give_back(record.holder, self._costs.pop(key))
        model.deleted[version] = record.last_entry
        model.remove(version)
        if not model.versions:
            del self.ids[bisect_left(self.ids, model.model_id)]

    def set_alias(self, model: Model, alias: str, version: ModelVersion | None) -> None:
        before = model.aliases.pop(alias, None)
        if before is not None:
            self.index.remove((model.model_id, before), ("alias", alias))
        if version is not None:
            model.aliases[alias] = version
            self.index.add((model.model_id, version), ("alias", alias))

    def add_move(self, model: Model, move: AliasMove) -> None:
        model.moves.setdefault(move.alias, []).append(move)

    def charge(self, model: Model, holder: Holder, cost: int) -> None:
        """Charge bytes of a model's journal."""
        model.charges[holder] = model.charges.get(holder, 0) + cost
        self.shares.charge(holder, cost)

    def require_room(self, holder: Holder, cost: int) -> None:
        if not self.shares.fits(holder, cost):
            fix = "delete versions that nobody needs, or raise registry_bytes_max"
            raise RequestRefused("registry_full", self.shares.shortage(holder), fix)

    # Finding.

    def model(self, model_id: str) -> Model:
        """The model of this id, or a refusal."""
        model = self.models.get(model_id)
        if model is None:
            raise errors.model_unknown(model_id)
        return model

    def record(self, model_id: str, version: ModelVersion) -> VersionRecord:
        return self.model(model_id).record(version)

    def require_name(self, model_id: str, principal: Principal) -> None:
        """Refuse an id that is no name, or that looks like another one that the principal may see."""
        checked_model_id(model_id)
        if model_id in self.models:
            return
        for other in self._forms.get(form_of(model_id), ()):
            if sees(principal, other):
                raise errors.name_taken(model_id, other)

    def job_of(self, model_id: str) -> str:
        """The job that the facts about a model belong to; empty if there is none of its name."""
        namespace = namespace_of(model_id)
        return namespace if self._has_job(namespace) else ""

    def models_of(self, checkpoint: CheckpointRecord) -> Iterator[str]:
        """The names of the versions that refer to a checkpoint, in whichever job it is catalogued: it has one save id.
        A version holds only checkpoints that the principal who registered it may use."""
        for what in (("save", checkpoint.save_id), ("path", checkpoint.path)):
            for model_id, version in self.index.having(what):
                jobs = self.models[model_id].records[version].jobs
                if jobs is None or checkpoint.job in jobs:
                    yield f"model {model_id}@{version}"

    def ranking(self, model_ids: Iterable[str]) -> Sequence[Rank]:
        """The validated canary and production versions of these models, the best first."""
        return sorted(chain.from_iterable(self._ranked.get(model_id, ()) for model_id in model_ids))

    def ranking_of(self, model_id: str) -> Sequence[Rank]:
        """The same of one model, or of all; it changes when a version is validated or gets another state."""
        return self._ranked.get(model_id, ())

    def ranked(self, rank: Rank) -> VersionRecord | None:
        """The version that had this rank; None if it has none any more."""
        record = self.models[rank[-2]].records.get(rank[-1])
        return record if record is not None and record.state in SERVING_STATES else None

    def _rank(self, record: VersionRecord) -> None:
        if (rank := _rank_of(record)) is not None:
            for name in (ALL, record.model_id):
                insort(self._ranked.setdefault(name, []), rank)

    def _unrank(self, record: VersionRecord) -> None:
        if (rank := _rank_of(record)) is not None:
            for name in (ALL, record.model_id):
                ranked = self._ranked[name]
                del ranked[bisect_left(ranked, rank)]
                if not ranked:
                    del self._ranked[name]


def sees(principal: Principal, model_id: str) -> bool:
    """Whether a principal may see a model."""
    return principal.jobs is None or namespace_of(model_id) in principal.jobs


def cost_of(record: VersionRecord, size: int) -> int:
    """What a version is charged with; its record is stored in so many bytes."""
    in_memory = RECORD_OVERHEAD_BYTES + TAG_OVERHEAD_BYTES * len(record.metadata.tags)
    return in_memory + size + record.details_bytes + sum(record.validation_sizes)


def _properties(record: VersionRecord) -> set[Property]:
    artifact, metadata = record.artifact, record.metadata
    tags = metadata.tags.items()
    return {
        ("state", metadata.state),
        ("checksum", metadata.checksum),
        *(("tag", key) for key, _ in tags),
        *(("tag", key, value) for key, value in tags),
        *([("save", artifact.save_id)] if artifact.save_id else []),
        *([("path", artifact.location)] if artifact.location and not artifact.save_id else []),
    }


def _rank_of(record: VersionRecord) -> Rank | None:
    if record.state not in SERVING_STATES or record.validation is None:
        return None
    has_accuracy, accuracy, has_latency, latency, version = quality(record.metadata, record.validation.result)
    number = (-version.major, -version.minor, -version.patch)
    return -has_accuracy, -accuracy, -has_latency, -latency, number, record.model_id, version
