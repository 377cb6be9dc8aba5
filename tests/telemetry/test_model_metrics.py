"""The metrics about models."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from forged.kernel.bus import Bus
from forged.kernel.messages import Record
from forged.registry.messages import ImportedVersion, ImportModels, RegisterModel
from forged.registry.model import DeploymentState, ModelVersion
from forged.telemetry.model_metrics import ModelCollector
from tests.net.manual_daemon import ManualClock
from tests.registry.registry_fixture import V1, V2, metadata
from tests.registry.stored_registry import StoredRegistry


def test_versions_are_counted_by_state_and_facts_by_kind() -> None:
    stored, bus, registry = StoredRegistry(), Bus(ManualClock()), CollectorRegistry(auto_describe=False)
    registry.register(ModelCollector(bus, stored.state))
    stored.do(stored.registration.register, RegisterModel(metadata(V1)))
    stored.do(stored.registration.register, RegisterModel(metadata(V2)))
    elsewhere = metadata(ModelVersion(0, 0, 1), model_id="other", state=DeploymentState.STAGING)
    stored.do(stored.registration.import_models, ImportModels([ImportedVersion(elsewhere)], "x"))
    bus.publish([Record.of(fact, fact_id=number, at=0.0) for number, fact in enumerate(stored.facts, 1)])
    value = registry.get_sample_value
    states = [value("forged_model_versions", {"state": state}) for state in ("registered", "staging", "production")]
    assert states == [2, 1, 0]
    assert value("forged_models") == 2
    assert value("forged_registry_bytes") == stored.state.shares.used
    assert value("forged_model_registrations_total") == 3
    assert value("forged_model_rollbacks_total") == 0
