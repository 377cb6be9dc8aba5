"""The client's methods of the model registry, against a real daemon."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import forged.checkpoint
from forged.auth.model import Role
from forged.catalog.messages import AdoptedCheckpoint
from forged.checkpoint.ports import CancelToken
from forged.client import BlockingClient, ForgedClient
from forged.client.model_files.checkpoint_files import describe_checkpoint
from forged.client.model_methods import ModelMethods
from forged.errors import ForgedError, RequestRefused
from forged.registry import DeploymentState, ModelMetadata, ModelVersion
from forged.registry.messages import (
    REQUESTS,
    ArtifactState,
    CanaryAction,
    ImportedVersion,
    ModelPolicy,
    ModelRolledBack,
)
from tests.client.daemon_runner import DaemonRunner
from tests.client.threaded_daemon import ThreadedDaemon


@pytest.fixture
def client(threaded_daemon: ThreadedDaemon) -> Iterator[BlockingClient]:
    with threaded_daemon.client() as client:
        yield client


def into_production(client: BlockingClient, version: str, accuracy: float = math.nan) -> None:
    """A version that is registered, validated and promoted to production."""
    client.register_model("resnet", version=version, checksum=f"sum {version}")
    client.promote_model("resnet", version)
    client.validate_model("resnet", version, passed=True, accuracy=accuracy)
    for _ in range(3):
        client.promote_model("resnet", version)


def test_three_lines_register_a_checkpoint(threaded_daemon: ThreadedDaemon, tmp_path: Path) -> None:
    forged.checkpoint.save(tmp_path / "step-7", {"w": np.zeros(8)}, step=7)
    with threaded_daemon.client() as client:
        model = client.register_model("resnet", checkpoint=tmp_path / "step-7", framework="numpy")
        view = client.model("resnet")
    assert (f"{model.version}", model.state, model.size_bytes) == ("0.1.0", DeploymentState.REGISTERED, 64)
    assert view.metadata == model
    assert (view.artifact.location, view.lineage.step if view.lineage else None) == (f"{tmp_path}/step-7", 7)


def test_adopted_checkpoint_is_found_in_the_catalogue_of_its_job(client: BlockingClient, tmp_path: Path) -> None:
    forged.checkpoint.save(tmp_path / "step-7", {"w": np.zeros(8)}, step=7)
    save_id = describe_checkpoint(tmp_path / "step-7", CancelToken()).artifact.save_id
    client.create_job("run", {"nodes": 8})
    adopted = AdoptedCheckpoint(f"{tmp_path}/step-7", save_id, 0, 7, 64, 1.0)
    client.adopt_checkpoints("run", str(tmp_path), [adopted])
    client.register_model("resnet", checkpoint=tmp_path / "step-7", job="run")
    view = client.model("resnet")
    assert view.artifact.checkpoint_id.startswith("ckpt-")
    assert view.lineage is not None
    assert (view.lineage.job, view.lineage.settings) == ("run", {"nodes": 8})


def test_files_are_hashed_with_progress(client: BlockingClient, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"weights")
    told: list[tuple[int, int]] = []
    model = client.register_model(
        "resnet",
        version="1.2.3",
        files=tmp_path / "model.onnx",
        name="ResNet",
        input_shape=(3, 224, 224),
        output_shape=[1000],
        tags={"git": "abc"},
        progress=lambda done, total: told.append((done, total)),
    )
    assert model == ModelMetadata(
        "resnet", "ResNet", ModelVersion(1, 2, 3), "", (3, 224, 224), (1000,), 7, model.checksum, model.registered_at,
        DeploymentState.REGISTERED, {"git": "abc"},
    )  # fmt: skip
    assert told[-1] == (7, 7)


def test_next_version_is_minor_unless_another_step_is_given(client: BlockingClient) -> None:
    versions = [client.register_model("resnet", checksum="x", bump=bump).version for bump in ("", "patch", "major", "")]
    assert list(map(str, versions)) == ["0.1.0", "0.1.1", "1.0.0", "1.1.0"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"version": "1.0.0", "bump": "minor", "checksum": "x"}, "model_version_ambiguous"),
        ({"version": "1.0", "checksum": "x"}, "model_version_invalid"),
        ({"files": "a", "checkpoint": "b"}, "model_files_ambiguous"),
    ],
)
def test_ambiguous_registration_is_refused(client: BlockingClient, arguments: dict[str, str], code: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        client.register_model("resnet", **arguments)  # type: ignore[arg-type]
    assert refused.value.code == code


def test_checksum_that_the_files_do_not_have_is_refused(client: BlockingClient, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(RequestRefused, match="given is sha256:00"):
        client.register_model("resnet", files=tmp_path / "a", checksum="sha256:00")
    assert list(client.models()) == []


def test_model_goes_into_production_and_back(client: BlockingClient) -> None:
    into_production(client, "1.0.0", accuracy=0.9)
    into_production(client, "1.1.0", accuracy=0.91)
    assert f"{client.model('resnet', 'serving').metadata.version}" == "1.1.0"
    rolled_back = client.roll_back_model("resnet", reason="wrong labels")
    assert (f"{rolled_back.version}", f"{rolled_back.to}") == ("1.1.0", "1.0.0")
    assert client.model("resnet", "1.1.0").metadata.state is DeploymentState.DEPRECATED
    served = client.served_model("resnet", 9e9)
    assert served.version == ModelVersion(1, 0, 0)
    client.transition_model("resnet", "1.1.0", "archived", expected="deprecated")
    client.delete_model("resnet", "1.1.0", reason="gone")
    assert [f"{one.version}" for one in client.model_versions("resnet")] == ["1.0.0"]


def test_promotion_past_production_is_refused(client: BlockingClient) -> None:
    into_production(client, "1.0.0")
    with pytest.raises(RequestRefused, match=r"resnet@1\.0\.0 is production"):
        client.promote_model("resnet", "1.0.0")


def test_promotion_of_a_changed_state_is_refused(client: BlockingClient) -> None:
    client.register_model("resnet", version="1.0.0", checksum="x")
    client.promote_model("resnet", "latest", to="validating")
    with pytest.raises(RequestRefused, match="not registered as the caller saw"):
        client.transition_model("resnet", "1.0.0", DeploymentState.STAGING, expected=DeploymentState.REGISTERED)


def test_validations_have_percentiles_and_missing_measures(client: BlockingClient) -> None:
    client.register_model("resnet", version="1.0.0", checksum="x")
    recorded = client.validate_model(
        "resnet", "latest", passed=True, samples_ms=np.array([4, 1, 9, 7]), environment={"gpu": "a100"}
    )
    assert (recorded.result.latency_p50_ms, recorded.samples, recorded.checksum) == (4.0, 4, "x")
    assert math.isnan(recorded.result.accuracy_score)
    client.validate_model("resnet", ModelVersion(1, 0, 0), passed=False, errors=["late"])
    assert [one.number for one in client.model_validations("resnet")] == [2, 1]
    with pytest.raises(RequestRefused, match="checksum must be x"):
        client.validate_model("resnet", "1.0.0", passed=True, checksum="y")


def test_validation_of_other_files_is_refused(client: BlockingClient, tmp_path: Path) -> None:
    for name in ("model", "other"):
        forged.checkpoint.save(tmp_path / name, {"w": np.zeros(8), "name": name})
    client.register_model("resnet", checkpoint=tmp_path / "model")
    client.validate_model("resnet", "latest", passed=True, checkpoint=tmp_path / "model")
    with pytest.raises(RequestRefused, match="checksum must be forged:"):
        client.validate_model("resnet", "latest", passed=True, checkpoint=tmp_path / "other")


def test_bad_canary_is_rolled_back_by_the_registry(client: BlockingClient) -> None:
    into_production(client, "1.0.0", accuracy=0.9)
    client.set_model_policy("resnet", ModelPolicy(canary=CanaryAction.ACT))
    client.register_model("resnet", version="1.1.0", checksum="y")
    client.promote_model("resnet", "1.1.0")
    client.validate_model("resnet", "1.1.0", passed=True, accuracy=0.9)
    client.promote_model("resnet", "1.1.0")
    client.promote_model("resnet", "1.1.0")
    with client.facts(ModelRolledBack) as facts:
        measured = client.report_canary("resnet", "1.1.0", accuracy=0.5)
        assert measured.priority > measured.threshold
        fact = next(facts).fact  # type: ignore[union-attr]
    assert isinstance(fact, ModelRolledBack)
    assert fact.version == ModelVersion(1, 1, 0)
    assert client.model("resnet", "1.1.0").metadata.state is DeploymentState.STAGING


def test_questions_are_answered(client: BlockingClient) -> None:
    into_production(client, "1.0.0", accuracy=0.9)
    client.register_model("resnet", checksum="y", tags={"git": "abc"}, input_shape=[3])
    client.tag_model("resnet", "1.1.0", {"owner": "me"}, remove=["git"])
    client.move_alias("resnet", "champion", "1.0.0")
    client.move_alias("resnet", "champion", None)
    [summary] = client.models()
    assert (summary.model_id, summary.versions, f"{summary.serving}") == ("resnet", 2, "1.0.0")
    assert [f"{one.version}" for one in client.find_models(state="production")] == ["1.0.0"]
    assert [f"{one.version}" for one in client.find_models(tags={"owner": None}, text="RES")] == ["1.1.0"]
    assert client.best_model(min_accuracy=0.5).metadata == client.model("resnet", "1.0.0").metadata
    assert client.best_model("resnet", max_latency_ms=1.0).metadata is None
    difference = client.compare_models("resnet", "serving", "latest")
    assert difference.changed_tags == {"owner": (None, "me")}
    kinds = [entry.kind for entry in client.model_journal("resnet", "1.1.0")]
    assert kinds == ["tagged", "registered"]


def test_iterators_go_through_all_pages(client: BlockingClient) -> None:
    for number in range(1, 521):
        client.register_model("resnet", version=f"0.0.{number}", checksum="x")
    assert len({one.version for one in client.model_versions("resnet")}) == 520
    assert len({(one.model_id, one.version) for one in client.find_models(checksum="x")}) == 520
    assert [one.number for one in client.model_journal("resnet")] == list(range(520, 0, -1))


def test_imports_are_sent_in_parts(client: BlockingClient) -> None:
    metadata = [ModelMetadata("resnet", "", ModelVersion(0, 0, n), "", (), (), 0, "x") for n in range(1, 702)]
    versions = [ImportedVersion(one) for one in metadata]
    assert len(client.import_models(versions, "moved", dry_run=True).imported) == 701
    assert len(client.import_models(versions, "moved").imported) == 701
    assert len(client.import_models(versions, "moved").known) == 701


def test_verification_and_copy_are_reported(client: BlockingClient, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"weights")
    client.register_model("resnet", files=tmp_path / "model.onnx")
    assert client.pull_model("resnet", target=tmp_path / "copy").path.read_bytes() == b"weights"
    assert client.model("resnet").artifact_state is ArtifactState.SOUND
    (tmp_path / "model.onnx").write_bytes(b"damaged")
    with pytest.raises(ForgedError, match="nothing was copied"):
        client.pull_model("resnet", target=tmp_path / "other")
    assert client.model("resnet").artifact_state is ArtifactState.DAMAGED
    assert client.verify_model("resnet").state is ArtifactState.DAMAGED
    assert client.verify_model("resnet", location=tmp_path / "copy").state is ArtifactState.SOUND
    assert client.model("resnet").artifact_state is ArtifactState.DAMAGED


def test_viewer_may_pull_and_verify(client: BlockingClient, threaded_daemon: ThreadedDaemon, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"weights")
    client.register_model("resnet", files=tmp_path / "model.onnx")
    token = client.create_token("reader", Role.VIEWER)
    with threaded_daemon.client(token=token) as reader:
        assert reader.verify_model("resnet").state is ArtifactState.SOUND
        assert reader.pull_model("resnet", target=tmp_path / "copy").files == 1
    assert client.model("resnet").artifact_state is ArtifactState.UNVERIFIED


async def test_async_client_iterates_with_async_for(runner: DaemonRunner) -> None:
    async with ForgedClient(runner.endpoint) as client:
        for name in ("a", "b"):
            await client.register_model(name, checksum="x")
        assert [one.model_id async for one in client.models()] == ["a", "b"]


def test_every_request_has_a_method() -> None:
    methods = {name for name in vars(ModelMethods) if not name.startswith("_")}
    assert len(methods) == len(REQUESTS) - 1 + 3, "without ReportArtifact; promotion, verification and copy beside it"
    assert methods <= set(vars(BlockingClient))
