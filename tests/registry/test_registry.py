from __future__ import annotations

import random
import threading
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import forged.registry
from forged.registry import (
    TRANSITIONS,
    DeploymentState,
    ModelInvalid,
    ModelMetadata,
    ModelRegistry,
    ModelUnknown,
    ModelVersion,
    RegistryRefused,
    TransitionRefused,
    VersionTaken,
)
from tests.registry.records import (
    CANARY,
    PRODUCTION,
    REGISTERED,
    STAGING,
    V1,
    V2,
    VALIDATING,
    metadata,
    registered,
    result,
)
from tests.threads import THREADS, in_threads


@pytest.fixture
def registry() -> ModelRegistry:
    return ModelRegistry()


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in forged.registry.__all__ if not hasattr(forged.registry, name)] == []


def test_there_are_as_many_tests_as_the_seed_asks_for() -> None:
    sources = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    assert sum(source.count("\ndef test_") for source in sources) >= 20


# --- registering and finding ------------------------------------------------------------------------------------------


def test_new_registry_is_empty(registry: ModelRegistry) -> None:
    assert (registry.model_count(), registry.version_count(), registry.list_versions("model")) == (0, 0, [])
    assert (registry.get("model", V1), registry.get_latest("model")) == (None, None)
    assert registry.get_validation("model", V1) is None
    assert [registry.find_by_state(state) for state in DeploymentState] == [[]] * len(DeploymentState)


def test_registered_version_is_what_was_given(registry: ModelRegistry) -> None:
    registry.register(metadata())
    assert registry.get("model", V1) == metadata()
    assert (registry.get("model", V2), registry.get("other", V1)) == (None, None)


def test_version_is_registered_once(registry: ModelRegistry) -> None:
    registry.register(metadata())
    with pytest.raises(VersionTaken, match=r"model 'model' has version 1\.0\.0 already") as refused:
        registry.register(metadata(name="another"))
    assert (refused.value.model_id, refused.value.version) == ("model", V1)
    assert registry.get("model", V1) == metadata()
    registry.register(metadata("other"))
    registry.register(metadata(version=V2))


@pytest.mark.parametrize("state", [state for state in DeploymentState if state is not REGISTERED])
def test_version_begins_as_registered(registry: ModelRegistry, state: DeploymentState) -> None:
    with pytest.raises(ModelInvalid, match=f"state must be registered, got <DeploymentState.*'{state}'"):
        registry.register(metadata(state=state))
    assert registry.version_count() == 0


def test_invalid_metadata_is_refused_and_changes_nothing(registry: ModelRegistry) -> None:
    with pytest.raises(ModelInvalid, match="size_bytes"):
        registry.register(metadata(size_bytes=-1))
    assert (registry.model_count(), registry.get("model", V1)) == (0, None)


@pytest.mark.parametrize("model_id", ["", " ", "a/b@c:d", "模型", "\x00", "m" * 10_000])
def test_any_text_is_a_model_id(registry: ModelRegistry, model_id: str) -> None:
    registry.register(metadata(model_id))
    assert registry.get(model_id, V1) == metadata(model_id)


def test_latest_version_is_the_highest_by_number(registry: ModelRegistry) -> None:
    for version in (ModelVersion(1, 9, 0), ModelVersion(1, 10, 0), ModelVersion(1, 2, 99)):
        registry.register(metadata(version=version))
    registry.register(metadata("other", V2))
    latest = registry.get_latest("model")
    assert latest is not None
    assert latest.version == ModelVersion(1, 10, 0)


def test_versions_are_listed_in_ascending_order(registry: ModelRegistry) -> None:
    versions = [ModelVersion(*numbers) for numbers in product((0, 2, 10), repeat=3)]
    for version in random.Random(1).sample(versions, len(versions)):
        registry.register(metadata(version=version))
    assert registry.list_versions("model") == versions


def test_models_and_versions_are_counted(registry: ModelRegistry) -> None:
    for model_id, version in product("abc", (V1, V2)):
        registry.register(metadata(model_id, version))
    assert (registry.model_count(), registry.version_count()) == (3, 6)


def test_what_is_returned_is_the_callers_own(registry: ModelRegistry) -> None:
    registry.register(metadata())
    for found in (registry.get("model", V1), registry.get_latest("model"), *registry.find_by_state(REGISTERED)):
        assert found is not None
        found.tags["team"] = "other"  # type: ignore[index]
    registry.list_versions("model").clear()
    assert registry.get("model", V1) == metadata()
    assert registry.list_versions("model") == [V1]


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), list(product(DeploymentState, DeploymentState)))
def test_version_changes_its_state_only_as_the_table_allows(
    registry: ModelRegistry, before: DeploymentState, after: DeploymentState
) -> None:
    made = registered(registry, state=before)
    if after in TRANSITIONS[before]:
        registry.transition_state("model", V1, after)
        assert registry.get("model", V1) == replace(made, state=after)
        return
    with pytest.raises(TransitionRefused, match=f"is {before}; it cannot become {after}"):
        registry.transition_state("model", V1, after)
    assert registry.get("model", V1) == made


def test_transition_of_an_unknown_version_is_refused(registry: ModelRegistry) -> None:
    with pytest.raises(ModelUnknown, match="there is no model 'model'"):
        registry.transition_state("model", V1, VALIDATING)
    registered(registry)
    with pytest.raises(ModelUnknown, match=r"model 'model' has no version 2\.0\.0"):
        registry.transition_state("model", V2, VALIDATING)


def test_unknown_state_is_refused(registry: ModelRegistry) -> None:
    registered(registry)
    with pytest.raises(ModelInvalid, match="state must be one of registered"):
        registry.transition_state("model", V1, "lost")  # type: ignore[arg-type]
    with pytest.raises(ModelInvalid, match="version must be a ModelVersion"):
        registry.transition_state("model", "1.0.0", VALIDATING)  # type: ignore[arg-type]
    with pytest.raises(ModelInvalid, match="state must be one of registered"):
        registry.find_by_state("lost")  # type: ignore[arg-type]


def test_versions_are_found_by_state_in_the_order_of_model_and_version(registry: ModelRegistry) -> None:
    for model_id, version, state in [("b", V1, CANARY), ("a", V2, CANARY), ("a", V1, CANARY), ("c", V1, STAGING)]:
        registered(registry, model_id, version, state)
    assert [(one.model_id, one.version) for one in registry.find_by_state(CANARY)] == [("a", V1), ("a", V2), ("b", V1)]
    assert [one.state for one in registry.find_by_state(CANARY)] == [CANARY] * 3
    registry.transition_state("a", V2, PRODUCTION)
    assert [(one.model_id, one.version) for one in registry.find_by_state(CANARY)] == [("a", V1), ("b", V1)]
    assert [(one.model_id, one.version) for one in registry.find_by_state(PRODUCTION)] == [("a", V2)]


# --- validations ------------------------------------------------------------------------------------------------------


def test_newest_validation_of_a_version_is_kept(registry: ModelRegistry) -> None:
    registered(registry)
    registry.record_validation(result(0.5))
    registry.record_validation(result(0.9, version=V2))
    registry.record_validation(result(0.7))
    assert registry.get_validation("model", V1) == result(0.7)
    assert registry.get_validation("model", V2) == result(0.9, version=V2)
    assert registry.get_validation("other", V1) is None


def test_validation_may_come_before_its_version(registry: ModelRegistry) -> None:
    registry.record_validation(result())
    assert registry.get_validation("model", V1) == result()
    assert (registry.model_count(), registry.version_count()) == (0, 0)


def test_invalid_validation_is_refused(registry: ModelRegistry) -> None:
    with pytest.raises(ModelInvalid, match="latency_p99_ms must be a number"):
        registry.record_validation(result(p99="fast"))  # type: ignore[arg-type]
    assert registry.get_validation("model", V1) is None


def test_promotion_needs_no_evidence_here(registry: ModelRegistry) -> None:
    registry.record_validation(result(0.0, passed=False, errors=["wrong"]))
    assert registered(registry, state=PRODUCTION).state is PRODUCTION


# --- all of it --------------------------------------------------------------------------------------------------------

IDS = st.sampled_from("ab")
NUMBERS = st.builds(ModelVersion, st.integers(0, 1), st.integers(0, 1), st.just(0))
STEPS = st.tuples(st.none() | st.sampled_from(DeploymentState), IDS, NUMBERS)


@given(st.lists(STEPS, max_size=40))
def test_any_sequence_of_calls_leaves_what_a_plain_dictionary_has(
    steps: list[tuple[DeploymentState | None, str, ModelVersion]],
) -> None:
    registry = ModelRegistry()
    expected: dict[tuple[str, ModelVersion], ModelMetadata] = {}
    for state, model_id, version in steps:
        known = expected.get((model_id, version))
        try:
            if state is None:
                registry.register(metadata(model_id, version))
            else:
                registry.transition_state(model_id, version, state)
        except RegistryRefused:
            assert (known is not None) if state is None else (known is None or state not in TRANSITIONS[known.state])
            continue
        expected[model_id, version] = metadata(model_id, version, state=state or REGISTERED)
    _assert_same(registry, expected)


def _assert_same(registry: ModelRegistry, expected: dict[tuple[str, ModelVersion], ModelMetadata]) -> None:
    assert {key: registry.get(*key) for key in expected} == expected
    assert (registry.model_count(), registry.version_count()) == (len({id_ for id_, _ in expected}), len(expected))
    for model_id in "ab":
        versions = sorted(version for id_, version in expected if id_ == model_id)
        assert registry.list_versions(model_id) == versions
        assert registry.get_latest(model_id) == (expected[model_id, versions[-1]] if versions else None)
    for state in DeploymentState:
        found = [expected[key] for key in sorted(expected) if expected[key].state is state]
        assert registry.find_by_state(state) == found


# --- threads ----------------------------------------------------------------------------------------------------------

ROUNDS = 60


def checked(name: str) -> Any:
    """A method of a dictionary that may be called only while the lock is held."""

    def method(self: Guarded, *arguments: Any) -> Any:
        assert self.lock.locked(), f"{name} is used without the lock"
        return getattr(dict, name)(self, *arguments)

    return method


class Guarded(dict[Any, Any]):
    lock: threading.Lock
    __getitem__, __setitem__, __contains__ = checked("__getitem__"), checked("__setitem__"), checked("__contains__")
    __len__, get, setdefault = checked("__len__"), checked("get"), checked("setdefault")


def test_every_call_holds_the_lock(registry: ModelRegistry) -> None:
    registered(registry)
    registry.record_validation(result())
    for name, value in list(vars(registry).items()):
        if isinstance(value, dict):
            guarded = Guarded(value)
            guarded.lock = registry._lock
            setattr(registry, name, guarded)
    calls: dict[str, tuple[Any, ...]] = {
        "register": (metadata("other"),),
        "get": ("model", V1),
        "get_latest": ("model",),
        "list_versions": ("model",),
        "transition_state": ("model", V1, VALIDATING),
        "record_validation": (result(),),
        "get_validation": ("model", V1),
        "find_by_state": (VALIDATING,),
        "model_count": (),
        "version_count": (),
    }
    assert calls.keys() == {name for name in dir(ModelRegistry) if not name.startswith("_")}
    for name, arguments in calls.items():
        getattr(registry, name)(*arguments)
        assert not registry._lock.locked()


def test_of_threads_that_register_one_version_one_succeeds(registry: ModelRegistry) -> None:
    def register(number: int, version: ModelVersion) -> bool:
        try:
            registry.register(metadata(version=version, name=str(number)))
        except VersionTaken:
            return False
        return True

    for patch in range(ROUNDS):
        assert sum(in_threads(partial(register, version=ModelVersion(1, 0, patch)))) == 1
    assert registry.version_count() == ROUNDS


def test_of_threads_that_promote_one_version_one_succeeds(registry: ModelRegistry) -> None:
    def promote(number: int, version: ModelVersion) -> bool:
        try:
            registry.transition_state("model", version, VALIDATING)
        except TransitionRefused:
            return False
        return True

    for patch in range(ROUNDS):
        registered(registry, version=ModelVersion(1, 0, patch))
        assert sum(in_threads(partial(promote, version=ModelVersion(1, 0, patch)))) == 1


def test_threads_that_read_and_write_at_once_see_whole_models(registry: ModelRegistry) -> None:
    def work(number: int) -> None:
        generator = random.Random(number)
        for patch in range(ROUNDS):
            model_id, version = generator.choice("ab"), ModelVersion(1, number, patch)
            registry.register(metadata(model_id, version))
            registry.transition_state(model_id, version, VALIDATING)
            registry.record_validation(result(model_id=model_id, version=version))
            latest, versions = registry.get_latest(model_id), registry.list_versions(model_id)
            assert latest is not None
            assert latest.version >= version
            assert versions == sorted(set(versions))
            assert version in [one.version for one in registry.find_by_state(VALIDATING) if one.model_id == model_id]

    in_threads(work)
    assert (registry.model_count(), registry.version_count()) == (2, THREADS * ROUNDS)
    assert len(registry.find_by_state(VALIDATING)) == THREADS * ROUNDS
    assert [registry.get_latest(model_id) for model_id in "ab"] == [
        registry.get(model_id, registry.list_versions(model_id)[-1]) for model_id in "ab"
    ]
