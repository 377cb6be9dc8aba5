"""Mutants of the rows of tensorforge_greenfield_tasks.md, Task 1."""

from __future__ import annotations

from collections.abc import Mapping

from tests.seed_map_mutants.mutation import Constant, Edit, Mutation

MODEL = "forged/registry/model.py"
REGISTRY = "forged/registry/registry.py"
SELECTION = "forged/registry/selection.py"
VERSIONS = "forged/registry/versions.py"
CRITERIA = "Registry: acceptance criteria"


def thawed(record: str) -> Edit:
    return Edit(MODEL, f"class {record}(msgspec.Struct, frozen=True", f"class {record}(msgspec.Struct")


def constants(record: str, values: Mapping[str, str]) -> dict[str, Mutation | str]:
    return {f"{record}.{name}": Constant(MODEL, f"{record}.{name}", value) for name, value in values.items()}


def following(state: str, states: str) -> Edit:
    """Adds to what may follow a state."""
    old = f"    DeploymentState.{state}: frozenset("
    return Edit(MODEL, old, f"    DeploymentState.{state}: frozenset({{DeploymentState.{states}}}) | frozenset(")


MUTANTS: Mapping[str, Mutation | str] = {
    "struct ModelVersion": thawed("ModelVersion"),
    **constants("ModelVersion", {"major": "1 + 1", "minor": "1", "patch": "1"}),
    "enum DeploymentState": Edit(
        MODEL, "class DeploymentState(StrEnum):\n", 'class DeploymentState(StrEnum):\n    NOTHING = "nothing"\n'
    ),
    "DeploymentState.Registered": Edit(
        MODEL, "= DeploymentState.REGISTERED\n    tags", "= DeploymentState.VALIDATING\n    tags"
    ),
    "DeploymentState.Validating": following("VALIDATING", "CANARY"),
    "DeploymentState.Staging": following("STAGING", "PRODUCTION"),
    "DeploymentState.Canary": following("CANARY", "REGISTERED"),
    "DeploymentState.Production": following("PRODUCTION", "CANARY"),
    "DeploymentState.Deprecated": following("DEPRECATED", "PRODUCTION"),
    "DeploymentState.Archived": following("ARCHIVED", "REGISTERED"),
    "struct ModelMetadata": thawed("ModelMetadata"),
    **constants(
        "ModelMetadata",
        {
            "model_id": '""',
            "name": '""',
            "version": "None",
            "framework": '""',
            "input_shape": "()",
            "output_shape": "(1,)",
            "size_bytes": "0",
            "checksum": '""',
            "registered_at": "0.0",
            "state": "DeploymentState.REGISTERED",
            "tags": "{}",
        },
    ),
    "struct ValidationResult": thawed("ValidationResult"),
    **constants(
        "ValidationResult",
        {
            "model_id": '""',
            "version": "None",
            "passed": "False",
            "latency_p50_ms": "0.0",
            "latency_p99_ms": "0.0",
            "accuracy_score": "0.0",
            "errors": "()",
        },
    ),
    "fn compare_versions(a, b)": Edit(VERSIONS, "return (a > b) - (a < b)", "return (a < b) - (a > b)"),
    "fn parse_version(version_str)": Edit(VERSIONS, '"(0|[1-9][0-9]{0,9})"', r'r"(\d{1,10})"'),
    "fn format_version(version)": Edit(
        VERSIONS, "    return str(version)\n", '    return f"{version.major}.{version.minor}"\n'
    ),
    "fn can_transition_state(from, to)": Edit(
        MODEL,
        "return to_state in TRANSITIONS.get(from_state, frozenset())",
        "return from_state in TRANSITIONS.get(to_state, frozenset())",
    ),
    "fn shape_compatibility(input_a, output_a, input_b, output_b)": Edit(
        VERSIONS, "/ max(len(a), len(b))", "/ (min(len(a), len(b)) or 1)"
    ),
    "fn meets_sla(result, max_latency_ms, min_accuracy)": Edit(
        SELECTION, "result.latency_p99_ms <= max_latency_ms", "result.latency_p99_ms < max_latency_ms"
    ),
    "fn select_best_model(candidates)": Edit(SELECTION, "        -latency if", "        latency if"),
    "fn rollback_priority(current, baseline)": Edit(
        SELECTION, "_growth(-current.accuracy_score, -baseline.", "_growth(current.accuracy_score, baseline."
    ),
    "struct ModelRegistry": Edit(
        REGISTRY, "            insort(self._versions.setdefault", "            list.append(self._versions.setdefault"
    ),
    "ModelRegistry.new()": Edit(
        REGISTRY,
        "self._versions: dict[str, list[ModelVersion]] = {}",
        'self._versions: dict[str, list[ModelVersion]] = {"": []}',
    ),
    "ModelRegistry.register(metadata)": Edit(REGISTRY, "            if key in self._records:", "            if False:"),
    "ModelRegistry.get(model_id, version)": Edit(
        REGISTRY,
        "record = self._records.get((model_id, version))",
        "record = next((one for (known, _), one in self._records.items() if known == model_id), None)",
    ),
    "ModelRegistry.get_latest(model_id)": Edit(
        REGISTRY, "self._records[model_id, versions[-1]]", "self._records[model_id, versions[0]]"
    ),
    "ModelRegistry.list_versions(model_id)": Edit(
        REGISTRY, "list(self._versions.get(model_id, ()))", "list(self._versions.get(model_id, ()))[::-1]"
    ),
    "ModelRegistry.transition_state(model_id, version, new_state)": Edit(
        REGISTRY,
        "            if not can_transition_state(record.state, state):",
        "            if record.state is state:",
    ),
    "ModelRegistry.record_validation(result)": Edit(
        REGISTRY,
        "self._validations[checked.model_id, checked.version] = checked",
        "self._validations.setdefault((checked.model_id, checked.version), checked)",
    ),
    "ModelRegistry.get_validation(model_id, version)": Edit(
        REGISTRY, "result = self._validations.get((model_id, version))", "result = None"
    ),
    "ModelRegistry.find_by_state(state)": Edit(REGISTRY, "            self._in_state[record.state].remove(key)\n", ""),
    "ModelRegistry.model_count()": Edit(REGISTRY, "return len(self._versions)", "return len(self._records)"),
    "ModelRegistry.version_count()": Edit(REGISTRY, "return len(self._records)", "return len(self._versions)"),
    "Use `statistics::percentile` for latency calculations in validation": Edit(
        SELECTION, "Decimal(repr(percent)) * len(ordered) / 100", "percent / 100 * len(ordered)"
    ),
    "Use `workflow::can_transition` pattern for state machine logic": Edit(
        MODEL, "    DeploymentState.ARCHIVED: frozenset(),\n", ""
    ),
    f"{CRITERIA}: All trait methods implemented with correct logic": Edit(
        REGISTRY, "            self._in_state[state].add(key)\n", ""
    ),
    "State transitions follow the defined lifecycle exactly": following("REGISTERED", "STAGING"),
    "Version comparison handles edge cases (0.0.0, max values)": Edit(
        VERSIONS, "    return (a > b) - (a < b)\n", "    return (str(a) > str(b)) - (str(a) < str(b))\n"
    ),
    f"{CRITERIA}: Thread-safe operations using RwLock appropriately": Edit(
        REGISTRY, "        with self._lock:\n            return len(self._records)", "        return len(self._records)"
    ),
    "Version parsing and comparison (edge cases)": Edit(
        VERSIONS, "max(numbers) <= NUMBER_MAX", "max(numbers) < NUMBER_MAX"
    ),
    "All valid and invalid state transitions": Edit(
        REGISTRY, "            if not can_transition_state(record.state, state):", "            if False:"
    ),
    "Shape compatibility scoring": Edit(VERSIONS, "sum(one == other for", "sum(one <= other for"),
    "Model selection algorithm": Edit(
        SELECTION,
        "frozenset({DeploymentState.PRODUCTION, DeploymentState.CANARY})",
        "frozenset({DeploymentState.PRODUCTION, DeploymentState.CANARY, DeploymentState.STAGING})",
    ),
    "Registry CRUD operations": Edit(
        REGISTRY, "if model_id in self._versions else", "if model_id in self._records else"
    ),
    "Concurrent access patterns": Edit(REGISTRY, "            self._records[key] = replace(record, state=state)\n", ""),
    "Minimum 20 test cases": "it counts tests, which no edit of the code changes",
}
