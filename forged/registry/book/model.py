"""One model in memory: its versions, its aliases and how they have moved, its policy.

Invariants:
- The versions are in ascending order; the numbers of deleted ones are known and never given again.
- The moves of an alias are in the order of their times, which never go back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator
from operator import attrgetter

from forged.registry import errors
from forged.registry.messages import LATEST, SERVING, ArtifactState, ModelPolicy
from forged.registry.model import DeploymentState, ModelVersion
from forged.registry.names import digest_of
from forged.registry.records import AliasMove, ModelHead, VersionRecord
from forged.registry.versions import parse_version
from forged.shares import Holder

ALIASES_MAX = 1000
"""Of one model: its head, which every decision about it writes, has all of them."""
UNSOUND = frozenset({ArtifactState.DAMAGED, ArtifactState.MISSING})
"""What a verification has found of files that cannot be served."""

_at = attrgetter("at")


class Model:
    """One model. Only `RegistryState` changes it."""

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self.digest = digest_of(model_id)
        self.records: dict[ModelVersion, VersionRecord] = {}
        self.versions: list[ModelVersion] = []
        """In ascending order."""
        self.deleted: dict[ModelVersion, int] = {}
        """The newest entry of the journal about each deleted version."""
        self.aliases: dict[str, ModelVersion] = {}
        self.policy = ModelPolicy()
        self.entries = 0
        self.at = 0.0
        self.charges: dict[Holder, int] = {}
        self.moves: dict[str, list[AliasMove]] = {}
        self.highest: ModelVersion | None = None
        """The highest version that it ever had."""

    @property
    def head(self) -> ModelHead:
        """What is stored of it."""
        charges = list(self.charges.items())
        return ModelHead(self.model_id, self.entries, self.at, self.aliases, self.policy, charges)

    @property
    def latest(self) -> ModelVersion | None:
        """The highest version."""
        return self.versions[-1] if self.versions else None

    @property
    def serving(self) -> ModelVersion | None:
        return self.aliases.get(SERVING)

    def record(self, version: ModelVersion) -> VersionRecord:
        """The record of a version, or a refusal."""
        record = self.records.get(version)
        if record is None:
            raise errors.version_unknown(self.model_id, version)
        return record

    def resolve(self, ref: str) -> VersionRecord:
        """The version that `1.2.3`, an alias or `latest` names."""
        version = parse_version(ref)
        if version is None:
            version = self.latest if ref == LATEST else self.aliases.get(ref)
        if version is None:
            raise errors.reference_unknown(self.model_id, ref)
        return self.record(version)

    def aliases_of(self, version: ModelVersion) -> list[str]:
        return sorted(alias for alias, named in self.aliases.items() if named == version)

    def below(self, before: ModelVersion | None) -> Iterator[VersionRecord]:
        """The versions below this one, the highest first."""
        end = len(self.versions) if before is None else bisect_left(self.versions, before)
        return (self.records[self.versions[place]] for place in range(end - 1, -1, -1))

    def served_at(self, alias: str, at: float) -> AliasMove | None:
        """The last move of an alias up to this time."""
        moves = self.moves.get(alias, [])
        place = bisect_right(moves, at, key=_at)
        return moves[place - 1] if place else None

    def predecessor(self, unfit: Collection[ArtifactState] = UNSOUND) -> ModelVersion | None:
        """The version that served before the present one, is still in production, and whose files are not unfit."""
        for move in reversed(self.moves.get(SERVING, [])):
            record = self.records.get(move.version) if move.version is not None else None
            if record is None or record.version == self.serving or record.artifact_state in unfit:
                continue
            if is_in_production(record):
                return record.version
        return None

    def put(self, record: VersionRecord) -> None:
        if record.version not in self.records:
            if not self.versions or self.versions[-1] < record.version:
                self.versions.append(record.version)
            else:
                insort(self.versions, record.version)
            self.note_version(record.version)
        self.records[record.version] = record

    def note_version(self, version: ModelVersion) -> None:
        """It has, or had, this version."""
        if self.highest is None or self.highest < version:
            self.highest = version

    def remove(self, version: ModelVersion) -> None:
        del self.records[version]
        del self.versions[bisect_left(self.versions, version)]


def is_in_production(record: VersionRecord) -> bool:
    return record.state is DeploymentState.PRODUCTION
