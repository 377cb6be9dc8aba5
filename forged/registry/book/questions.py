"""What callers ask of the registry: views, lists, searches, what served at a time, which version is the best.

Invariants:
- A question changes nothing, and its cost does not grow with the number of versions that it is not about.
- A reply fits into a frame.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice

from msgspec.structs import replace

from forged.auth.model import Principal
from forged.pagination import take_page
from forged.registry.book.evidence import missing
from forged.registry.book.model import Model
from forged.registry.book.state import ALL, Rank, RegistryState, sees
from forged.registry.book.version_index import Key, Property
from forged.registry.errors import argument_invalid
from forged.registry.messages import (
    BestVersion,
    CompareModels,
    FindBestModel,
    FindModels,
    FindServed,
    ListModels,
    ListModelVersions,
    ModelDifference,
    ModelPage,
    ModelSummary,
    ModelView,
    ServedVersion,
    VersionPage,
)
from forged.registry.model import PROMOTIONS, TRANSITIONS, DeploymentState, ModelMetadata, ValidationResult
from forged.registry.names import checked_alias
from forged.registry.records import VersionDetails, VersionRecord
from forged.registry.versions import parse_version, shape_compatibility, suggested_bump

LOOKED_AT_MAX = 2_000
"""So many versions are looked at before other requests get their turn."""
TAGS_SHOWN_MAX = 100


class Questions:
    """Answers questions about the models in memory."""

    def __init__(self, state: RegistryState) -> None:
        self._state = state

    # One version.

    def view(self, model: Model, record: VersionRecord, details: VersionDetails, now: float) -> ModelView:
        return ModelView(
            record.metadata,
            record.registered_by,
            model.aliases_of(record.version),
            replace(record.artifact, files=details.files),
            details.lineage,
            record.validation,
            record.artifact_state,
            record.artifact_checked_at,
            _next_states(model, record),
            model.policy,
            _why_blocked(model, record, max(now, model.at)),
        )

    def compare(self, request: CompareModels) -> ModelDifference:
        """How two versions of a model differ."""
        model = self._state.model(request.model_id)
        one, other = model.resolve(request.first), model.resolve(request.second)
        first, second = one.metadata, other.metadata
        bump, reason = suggested_bump(first, second)
        keys = sorted({*first.tags, *second.tags})
        changed = (key for key in keys if first.tags.get(key) != second.tags.get(key))
        return ModelDifference(
            first,
            second,
            shape_compatibility(first.input_shape, first.output_shape, second.input_shape, second.output_shape),
            bump,
            reason,
            {key: (first.tags.get(key), second.tags.get(key)) for key in islice(changed, TAGS_SHOWN_MAX)},
            (_latency(one), _latency(other)),
            (_accuracy(one), _accuracy(other)),
        )

    def served(self, request: FindServed) -> ServedVersion:
        """What an alias named at a time."""
        alias = checked_alias(request.alias)
        move = self._state.model(request.model_id).served_at(alias, request.at)
        return ServedVersion(None, None) if move is None else ServedVersion(move.version, move.at, move.entry)

    # Lists.

    def models(self, request: ListModels, by: Principal) -> ModelPage:
        """Some models that the principal may see, by id."""
        found = (_summary(self._state.models[model_id]) for model_id in self._visible(by, request.after))
        return ModelPage(*take_page(found, request.limit))

    def versions(self, request: ListModelVersions) -> VersionPage:
        """Some versions of a model, the highest first."""
        found = (record.metadata for record in self._state.model(request.model_id).below(request.before))
        return VersionPage(*take_page(found, request.limit))

    def _visible(self, by: Principal, after: str) -> Iterator[str]:
        """The ids after this one that a principal may see, in order; another one is not even looked at."""
        ids = self._state.ids
        if by.jobs is None:
            return _between(ids, f"{after}\0" if after else "")
        # `J`, and what begins with `J/`: the character after `/` is `0`.
        ranges = [(job, f"{job}\0") for job in by.jobs] + [(f"{job}/", f"{job}0") for job in by.jobs]
        return merge(*(_between(ids, max(first, f"{after}\0") if after else first, end) for first, end in ranges))

    # Searches.

    def find(
        self, request: FindModels, by: Principal, after: Key | None, most: int
    ) -> tuple[list[ModelMetadata], Key | None]:
        """The next versions that match, of so many that are looked at; and the key to continue after, None at the
        end."""
        wanted = _wanted(request)
        if wanted:
            keys, position = self._state.index.search(wanted, after, most)
        else:
            keys = list(islice(self._keys(by, after), most + 1))
            position = keys[most - 1] if len(keys) > most else None
            del keys[most:]
        text = request.text.casefold()
        found = [self._state.models[model_id].records[version].metadata for model_id, version in keys]
        return [one for one in found if sees(by, one.model_id) and (not text or _contains(one, text))], position

    def _keys(self, by: Principal, after: Key | None) -> Iterator[Key]:
        """All versions after this key that a principal may see, by model and version."""
        if after is not None:
            model = self._state.models.get(after[0])
            versions = [] if model is None or not sees(by, after[0]) else model.versions
            yield from ((after[0], versions[place]) for place in range(bisect_right(versions, after[1]), len(versions)))
        for model_id in self._visible(by, "" if after is None else after[0]):
            yield from ((model_id, version) for version in self._state.models[model_id].versions)

    # The best version.

    def ranking(self, request: FindBestModel, by: Principal) -> Sequence[Rank]:
        """The validated canary and production versions that are asked for, the best first."""
        if request.model_id:
            return self._state.ranking_of(self._state.model(request.model_id).model_id)
        return self._state.ranking_of(ALL) if by.jobs is None else self._state.ranking(self._visible(by, ""))

    def best(self, request: FindBestModel, ranks: Iterable[Rank]) -> BestVersion | None:
        """The first of these versions that is within the limits."""
        for record in filter(None, map(self._state.ranked, ranks)):
            validation = record.validation
            if validation is not None and _meets(validation.result, request):
                is_limited = request.max_latency_ms is not None or request.min_accuracy is not None
                within = " within the limits" if is_limited else ""
                accuracy = validation.result.accuracy_score
                reason = f"the highest accuracy ({accuracy:g}) of the canary and production versions{within}"
                return BestVersion(record.metadata, validation.result, reason)
        return None


def no_best(ranking: Sequence[Rank]) -> BestVersion:
    """The answer if none of these versions is within the limits."""
    if ranking:
        return BestVersion(None, None, "no validated canary or production version is within the limits")
    return BestVersion(None, None, "no canary or production version was validated")


def parsed_key(after: str) -> Key | None:
    """The key that a caller continues after; None for the beginning."""
    if not after:
        return None
    model_id, _, text = after.rpartition("@")
    version = parse_version(text)
    if version is None or not model_id:
        raise argument_invalid("after", after, "empty, or MODEL@VERSION such as vision/resnet@1.2.3")
    return model_id, version


def _wanted(request: FindModels) -> list[Property]:
    wanted: list[Property] = []
    if request.state is not None:
        wanted.append(("state", request.state))
    if request.checksum:
        wanted.append(("checksum", request.checksum))
    if request.alias:
        wanted.append(("alias", checked_alias(request.alias)))
    wanted += [("tag", key) if value is None else ("tag", key, value) for key, value in request.tags.items()]
    return wanted


def _contains(metadata: ModelMetadata, text: str) -> bool:
    return text in metadata.model_id.casefold() or text in metadata.name.casefold()


def _between(ids: list[str], first: str, end: str | None = None) -> Iterator[str]:
    """The ids from one on, up to another one."""
    stop = len(ids) if end is None else bisect_left(ids, end)
    return (ids[place] for place in range(bisect_left(ids, first), stop))


def _summary(model: Model) -> ModelSummary:
    latest = model.latest
    assert latest is not None, "a listed model has versions"
    return ModelSummary(model.model_id, len(model.versions), latest, model.serving, dict(model.aliases), model.policy)


def _next_states(model: Model, record: VersionRecord) -> list[DeploymentState]:
    serves = record.version == model.serving
    return [] if serves else [state for state in DeploymentState if state in TRANSITIONS[record.state]]


def _why_blocked(model: Model, record: VersionRecord, now: float) -> str:
    """Why the version cannot go on towards production; empty if it can, or is there."""
    following = PROMOTIONS.get(record.state)
    if following is None:
        return "" if record.state is DeploymentState.PRODUCTION else f"it is {record.state}"
    if following is DeploymentState.VALIDATING:
        return ""
    lacking = missing(record, model.policy, now)
    return "" if lacking is None else f"{lacking.reason}; {lacking.fix}"


def _meets(result: ValidationResult, request: FindBestModel) -> bool:
    most, least = request.max_latency_ms, request.min_accuracy
    # NaN is within no limit.
    return (most is None or result.latency_p99_ms <= most) and (least is None or result.accuracy_score >= least)


def _latency(record: VersionRecord) -> float | None:
    return None if record.validation is None else record.validation.result.latency_p99_ms


def _accuracy(record: VersionRecord) -> float | None:
    return None if record.validation is None else record.validation.result.accuracy_score
