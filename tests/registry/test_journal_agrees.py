"""Any sequence of operations leaves journal and state in agreement, and replaying the journal gives the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from forged.errors import RequestRefused
from forged.registry.book.state import RegistryState
from forged.registry.messages import (
    SERVING,
    CanaryAction,
    DeleteModel,
    ImportedVersion,
    ImportModels,
    ModelPolicy,
    MoveAlias,
    RecordValidation,
    RegisterModel,
    ReportArtifact,
    ReportCanary,
    RollBackModel,
    SetModelPolicy,
    TagModel,
    TransitionModel,
)
from forged.registry.messages import ArtifactState as Found
from forged.registry.model import TRANSITIONS, DeploymentState, ModelVersion
from tests.registry.registry_fixture import CHECKSUM, metadata, result
from tests.registry.stored_registry import StoredRegistry, load, replayed

MODELS = ("a", "a/b")
STATES = list(DeploymentState)
Operation = tuple[str, int, int, int]


def request_for(registry: StoredRegistry, operation: Operation) -> tuple[Callable[..., Any], Any]:
    """The decision and its request that an operation stands for."""
    name, model, number, choice = operation
    model_id, version = MODELS[model], ModelVersion(0, number, 0)
    lifecycle = registry.lifecycle
    match name:
        case "promote":
            return lifecycle.transition, promotion(registry, model_id, version, choice)
        case "roll back":
            return lifecycle.roll_back, RollBackModel(model_id, version if choice % 2 else None)
        case "alias":
            alias = ("x", "y", SERVING, "latest")[choice % 4]
            return lifecycle.move_alias, MoveAlias(model_id, alias, version if choice < 4 else None)
        case "policy":
            policy = ModelPolicy(choice % 3 > 0, 100.0 * choice, 20.0, canary=list(CanaryAction)[choice % 3])
            return lifecycle.set_policy, SetModelPolicy(model_id, policy)
        case "tag":
            return lifecycle.tag, TagModel(model_id, version, {str(choice): "x" * number}, [str(choice - 1)])
        case "delete":
            return lifecycle.delete, DeleteModel(model_id, version, "x" * (choice % 2))
    return report(registry, name, model_id, version, choice)


def report(
    registry: StoredRegistry, name: str, model_id: str, version: ModelVersion, choice: int
) -> tuple[Callable[..., Any], Any]:
    """What is told about a version: that it exists, and what it shows."""
    evidence = registry.evidence
    match name:
        case "register":
            bump = ("", "", "minor", "patch")[choice % 4]
            return registry.registration.register, RegisterModel(metadata(version, model_id=model_id), bump)
        case "validate":
            latency = (10.0, 30.0, float("nan"))[choice % 3]
            measured = result(version, model_id=model_id, passed=choice % 4 > 0, latency_p99_ms=latency)
            return evidence.validate, RecordValidation(measured, CHECKSUM if choice else "another")
        case "report":
            return evidence.measure, ReportCanary(result(version, model_id=model_id, latency_p99_ms=5.0 * choice))
        case "check":
            return evidence.check_files, ReportArtifact(model_id, version, list(Found)[choice % 4])
    state = STATES[choice % len(STATES)]
    aliases = [SERVING] if state is DeploymentState.PRODUCTION else ["x"]
    one = ImportedVersion(metadata(version, model_id=model_id, state=state), aliases)
    return registry.registration.import_models, ImportModels([one, one], "x")


def promotion(registry: StoredRegistry, model_id: str, version: ModelVersion, choice: int) -> TransitionModel:
    """A transition that the table mostly allows."""
    known = registry.state.models.get(model_id)
    record = known.records.get(version) if known else None
    following = sorted(TRANSITIONS[record.state]) if record and choice < 6 else STATES
    to = following[choice % len(following)] if following else DeploymentState.STAGING
    return TransitionModel(model_id, version, to, waiver="for once" if choice in (1, 4) else "")


OPERATIONS = (
    "register",
    "register",
    "validate",
    "validate",
    "promote",
    "promote",
    "promote",
    "promote",
    "roll back",
    "report",
    "alias",
    "policy",
    "tag",
    "delete",
    "check",
    "import",
    "clock",
)


def contents(state: RegistryState) -> dict[str, Any]:
    """All that the memory holds, for comparison."""
    return {
        "ids": state.ids,
        "index": {what: list(keys) for what, keys in state.index._having.items()},
        "ranked": state._ranked,
        "costs": state._costs,
        "used": state.shares.used,
        "models": {
            model_id: (
                sorted(map(str, model.records.values())),
                model.versions,
                model.deleted,
                model.highest,
                model.head,
                {alias: moves for alias, moves in model.moves.items() if moves},
            )
            for model_id, model in state.models.items()
        },
    }


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1), st.integers(0, 2), st.integers(0, 7)),
        max_size=60,
    )
)
def test_any_sequence_of_operations_leaves_journal_and_state_in_agreement(operations: list[Operation]) -> None:
    registry = StoredRegistry()
    for operation in operations:
        if operation[0] == "clock":
            registry.now += (-500.0, -1.0, 0.0, 1.0, 50.0, 200.0, 300.0, 1000.0)[operation[3]]
            continue
        before, stored = contents(registry.state), dict(registry.stored)
        reply = registry.do(*request_for(registry, operation))
        if isinstance(reply, RequestRefused):
            assert (contents(registry.state), registry.stored) == (before, stored), operation
    _, problems = replayed(registry.stored)
    assert problems == []
    assert contents(registry.loaded()) == contents(registry.state)
    # As after a failed commit: the same memory again.
    load(registry.state, registry)
    assert contents(registry.loaded()) == contents(registry.state)
