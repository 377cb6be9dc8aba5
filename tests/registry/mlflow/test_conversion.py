from __future__ import annotations

from typing import Any

import pytest

from forged.registry import DeploymentState, ModelVersion
from forged.registry.messages import IMPORTED_ALIASES_MAX, ImportedVersion
from forged.registry.mlflow.conversion import (
    METRICS_MAX,
    FoundModel,
    FoundRegistry,
    FoundVersion,
    converted,
)


def found(*versions: FoundVersion, model: FoundModel | None = None, **metrics: float) -> FoundRegistry:
    models = {model.name: model} if model else {}
    return FoundRegistry(models, list(versions), {"run": metrics})


def version(number: str = "1", **changes: Any) -> FoundVersion:
    return FoundVersion("model", number, **changes)


def imported(given: FoundVersion, model: FoundModel | None = None, **metrics: float) -> ImportedVersion:
    """The only version, which is not refused."""
    registry = converted(found(given, model=model, **metrics))
    assert registry.refused == []
    [one] = registry.versions
    return one


def refusal(given: FoundVersion, model: FoundModel | None = None, **metrics: float) -> str:
    registry = converted(found(given, model=model, **metrics))
    assert registry.versions == []
    [reason] = registry.refused
    return reason


@pytest.mark.parametrize(("number", "expected"), [("1", 1), ("0", 0), ("4294967295", 2**32 - 1)])
def test_version_n_becomes_n_0_0(number: str, expected: int) -> None:
    assert imported(version(number)).metadata.version == ModelVersion(expected, 0, 0)


@pytest.mark.parametrize("number", ["", "-1", "01", "1.0", "4294967296", "9" * 5000, "one", "١"])
def test_version_that_is_no_number_is_refused(number: str) -> None:
    assert "its version must be a number from 0 to 4294967295, got" in refusal(version(number))


@pytest.mark.parametrize(
    ("stage", "state"),
    [
        ("", "registered"),
        ("None", "registered"),
        ("Staging", "staging"),
        ("Production", "production"),
        ("Archived", "archived"),
    ],
)
def test_stage_becomes_a_state(stage: str, state: str) -> None:
    assert imported(version(stage=stage)).metadata.state is DeploymentState(state)


def test_unknown_stage_is_refused_with_the_version() -> None:
    text = "model@3: its stage must be one of None, Staging, Production, Archived, got 'Shadow'"
    assert refusal(version("3", stage="Shadow")) == text


def test_deleted_version_is_no_version() -> None:
    assert converted(found(version(stage="Deleted_Internal"))).versions == []
    assert converted(found(version(stage="Deleted_Internal"))).refused == []


@pytest.mark.parametrize("status", ["PENDING_REGISTRATION", "FAILED_REGISTRATION"])
def test_version_without_files_is_refused(status: str) -> None:
    assert refusal(version(status=status)) == f"model@1: its status must be READY, got {status!r}"
    assert imported(version(status="READY")).metadata.model_id == "model"


def test_aliases_that_are_allowed_stay_and_the_others_become_tags() -> None:
    names = ["champion", "Challenger", "latest", "serving", "best-of_3", "1.2.3", "ä"]
    model = FoundModel("model", aliases={**dict.fromkeys(names, "1"), "other": "2"})
    one = imported(version(), model)
    assert one.aliases == ["best-of_3", "champion"]
    assert one.metadata.tags == {
        f"mlflow.alias.{alias}": "1" for alias in ("Challenger", "latest", "serving", "1.2.3", "ä")
    }


@pytest.mark.parametrize(
    ("stages", "alias", "serving"),
    [
        ({"1": "Production"}, None, "1"),
        ({"9": "Production", "10": "Production", "11": "Staging"}, None, "10"),
        ({"1": "Production", "2": "Production"}, "1", "1"),
        ({"1": "Production", "2": "Staging"}, "2", "1"),
        ({"1": "Staging", "2": "None"}, "2", None),
        ({"1": "None"}, None, None),
    ],
)
def test_highest_version_in_production_serves_unless_another_one_there_has_the_alias(
    stages: dict[str, str], alias: str | None, serving: str | None
) -> None:
    model = FoundModel("model", aliases={"serving": alias} if alias else {})
    registry = converted(found(*(version(number, stage=stage) for number, stage in stages.items()), model=model))
    assert [f"{one.metadata.version.major}" for one in registry.versions if one.aliases == ["serving"]] == [
        *([serving] if serving else [])
    ]
    tagged = [one for one in registry.versions if "mlflow.alias.serving" in one.metadata.tags]
    assert len(tagged) == (alias is not None and alias != serving)


def test_aliases_beyond_the_limit_become_tags() -> None:
    names = [f"alias-{number:02d}" for number in range(IMPORTED_ALIASES_MAX + 1)]
    one = imported(version(), FoundModel("model", aliases=dict.fromkeys(names, "1")))
    assert (one.aliases, one.metadata.tags) == (names[:-1], {f"mlflow.alias.{names[-1]}": "1"})


def test_what_mlflow_knows_becomes_metadata_and_tags() -> None:
    given = version(
        created_ms=1_500,
        description="two\nlines",
        source="models:/m-1",
        location="s3://bucket/model",
        run_id="run",
        user_id="ada",
        tags={"team": "vision"},
    )
    one = imported(given, FoundModel("model", "of all", {"task": "speech"}), accuracy=0.5, loss=float("nan"))
    assert (one.metadata.model_id, one.metadata.name, one.metadata.framework) == ("model", "model", "mlflow")
    assert (one.metadata.registered_at, one.metadata.checksum) == (1.5, "mlflow:model/1")
    assert (one.artifact.location, one.validation) == ("s3://bucket/model", None)
    assert one.metadata.tags == {
        "team": "vision",
        "mlflow.description": "two\nlines",
        "mlflow.source": "models:/m-1",
        "mlflow.run_id": "run",
        "mlflow.user_id": "ada",
        "mlflow.model.description": "of all",
        "mlflow.model.tag.task": "speech",
        "mlflow.metric.accuracy": "0.5",
        "mlflow.metric.loss": "nan",
    }


@pytest.mark.parametrize("source", ["", "models:/m-1", "runs:/abc/model", "mlflow-artifacts:/1/abc", "relative/path"])
def test_files_that_only_mlflow_finds_have_no_location(source: str) -> None:
    assert imported(version(source=source)).artifact.location == ""


@pytest.mark.parametrize("source", ["/models/a", "s3://bucket/a", "file:///models/a"])
def test_files_at_a_path_or_url_have_a_location(source: str) -> None:
    assert imported(version(source=source)).artifact.location == source


def test_tag_that_would_be_changed_refuses_the_version() -> None:
    text = "model@1: its tag 'mlflow.run_id' must be 'run', got 'another'"
    assert refusal(version(run_id="run", tags={"mlflow.run_id": "another"})) == text
    assert imported(version(run_id="run", tags={"mlflow.run_id": "run"})).metadata.tags == {"mlflow.run_id": "run"}


def test_metrics_beyond_the_limit_are_counted() -> None:
    metrics = {f"metric-{number:03d}": 1.0 for number in range(METRICS_MAX + 3)}
    tags = imported(version(run_id="run"), None, **metrics).metadata.tags
    assert tags["mlflow.metrics_left_out"] == "3"
    assert sum(key.startswith("mlflow.metric.") for key in tags) == METRICS_MAX


def test_version_that_is_too_large_is_refused() -> None:
    assert "it must have at most 520,192 bytes, got" in refusal(version(tags={"text": "a" * 600_000}))


def test_versions_are_in_the_order_of_model_and_number() -> None:
    registry = converted(found(version("10"), version("9"), FoundVersion("a", "11")))
    assert [(one.metadata.model_id, one.metadata.version.major) for one in registry.versions] == [
        ("a", 11),
        ("model", 9),
        ("model", 10),
    ]
