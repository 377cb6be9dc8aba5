from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from forged.auth.model import Principal, Role
from forged.catalog.model import CheckpointState
from forged.catalog.records import CheckpointRecord
from forged.errors import ForgedError, Unavailable
from forged.kernel.bus.requests import Proceed
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call
from forged.kernel.store.port import Conflict, Transaction
from forged.registry.book.lifecycle import ENTRIES_BYTES_MAX
from forged.registry.book.model import ALIASES_MAX
from forged.registry.errors import RegistryRefused
from forged.registry.messages import (
    LATEST,
    SERVING,
    AliasMoved,
    Artifact,
    ArtifactFile,
    ArtifactState,
    CanaryAction,
    CanaryMeasured,
    CompareModels,
    DeleteModel,
    FindBestModel,
    FindModels,
    FindServed,
    ImportedVersion,
    ImportModels,
    JournalKind,
    Lineage,
    ListModels,
    ListModelVersions,
    ListValidations,
    ModelArtifactChecked,
    ModelPolicy,
    ModelRegistered,
    ModelRolledBack,
    ModelTagged,
    ModelTransitioned,
    MoveAlias,
    ReadModelJournal,
    RegisterModel,
    ReportArtifact,
    ReportCanary,
    RollbackAdvised,
    RollBackModel,
    SetModelPolicy,
    ShowModel,
    TagModel,
    TransitionModel,
    ValidationRecorded,
)
from forged.registry.model import DeploymentState, ModelVersion
from forged.registry.records import RECORD_BYTES_MAX, VALIDATIONS_KEPT
from forged.shares import Holder
from tests.catalog.records import record as checkpoint_meta
from tests.faulty_store import FaultyStore, full
from tests.kernel_fixture import OPERATOR, on_virtual_time
from tests.registry.registry_fixture import (
    CHECKSUM,
    JOB,
    JOB_OPERATOR,
    MODEL,
    STRANGER,
    TENANT,
    TO_CANARY,
    V1,
    V2,
    V3,
    VIEWER,
    Registry,
    metadata,
    registry,
    result,
)

REGISTERED, VALIDATING = DeploymentState.REGISTERED, DeploymentState.VALIDATING
STAGING, CANARY = DeploymentState.STAGING, DeploymentState.CANARY
PRODUCTION, DEPRECATED = DeploymentState.PRODUCTION, DeploymentState.DEPRECATED
ARCHIVED = DeploymentState.ARCHIVED
DAY_S = 86_400.0
SAVE = "0123456789abcdef"
PATH = "/ckpt/vision/step-100"


async def refused(asked: Any) -> str:
    """The code of the refusal."""
    with pytest.raises(ForgedError) as error:
        await asked
    return error.value.code


async def why_refused(asked: Any) -> str:
    """The text of the refusal."""
    with pytest.raises(RegistryRefused) as error:
        await asked
    return str(error.value)


# Registration.


@on_virtual_time
async def test_registered_version_is_shown_and_in_the_journal() -> None:
    async with registry() as one:
        registered = await one.register(tags={"owner": "a"}, registered_at=7.0, reason="nightly")
        assert registered == metadata(tags={"owner": "a"}, registered_at=one.clock.wall())
        view = await one.show()
        assert (view.metadata, view.registered_by, view.aliases) == (registered, TENANT.name, [])
        assert view.next_states == [VALIDATING]
        (entry,) = await one.journal()
        assert (entry.number, entry.kind, entry.version, entry.now) == (1, JournalKind.REGISTERED, V1, "registered")
        assert (entry.by, entry.reason, entry.at) == (TENANT.name, "nightly", one.clock.wall())
        assert one.kernel.facts(ModelRegistered) == [ModelRegistered(MODEL, V1, REGISTERED, CHECKSUM, TENANT.name)]
        (record,) = one.kernel.journal.after(0, 10)
        assert record.job == JOB


@on_virtual_time
async def test_version_is_registered_once() -> None:
    async with registry() as one:
        await one.register()
        assert await refused(one.register(checksum="other")) == "model_version_taken"
        assert (await one.show()).metadata.checksum == CHECKSUM


@on_virtual_time
async def test_registry_assigns_the_next_version() -> None:
    async with registry() as one:
        numbers = [
            (await one.register(V3, bump=bump)).version for bump in ("minor", "patch", "minor", "major", "patch")
        ]
        assert [str(number) for number in numbers] == ["0.1.0", "0.1.1", "0.2.0", "1.0.0", "1.0.1"]
        assert await refused(one.register(bump="huge")) == "model_argument_invalid"
        await one.register(ModelVersion(1, 0, 2**32 - 1))
        assert await refused(one.register(bump="patch")) == "model_argument_invalid"


@pytest.mark.parametrize(
    "changes",
    [
        {"state": PRODUCTION},
        {"model_id": "vision/"},
        {"model_id": "vision//a"},
        {"model_id": "vision/../a"},
        {"model_id": "vision/a "},
        {"model_id": "vision/a@1"},
        {"model_id": "vision/a:b"},
        {"model_id": "vision/a\n"},
        {"model_id": "vision/a\u202eb"},
        {"model_id": "vision/a\u200bb"},
        {"model_id": "vision/a\u034fb"},
        {"model_id": "vision/\u3164"},
        {"model_id": "vision/e\u0301"},
        {"model_id": "vision/\ue000"},
        {"model_id": "vision/\U000e0041"},
        {"model_id": "vision/\ufe0fa"},
        {"model_id": "vision/" + "x" * 200},
        {"name": "a\0b"},
        {"name": "x" * 300},
        {"framework": "x" * 101},
        {"checksum": ""},
        {"checksum": "x" * 201},
        {"input_shape": range(100)},
        {"tags": {"": "x"}},
        {"tags": {"x" * 251: "x"}},
        {"tags": {"x": "y" * 5001}},
        {"tags": {"x": "\x1b[2J"}},
        {"tags": {str(number): "" for number in range(1001)}},
    ],
    ids=lambda changes: ascii(changes)[:60],
)
@on_virtual_time
async def test_version_with_invalid_values_is_refused(changes: dict[str, Any]) -> None:
    async with registry() as one:
        assert await refused(one.register(**changes)) == "model_argument_invalid"
        assert not one.service.state.models


@on_virtual_time
async def test_names_of_every_script_are_taken() -> None:
    async with registry() as one:
        for name in ("vision/Größe 7.b_c-d", "vision/模型", "vision/मॉडल", "vision/نموذج", "vision"):
            await one.register(model_id=name)
        listed = await one.ask(ListModels())
        assert len(listed.models) == 5


@on_virtual_time
async def test_names_that_look_the_same_are_one() -> None:
    async with registry() as one:
        await one.register()
        for name in ("vision/ResNet", "vision/\uff52esnet", "vision/re\u017fnet"):
            text = await why_refused(one.register(model_id=name))
            assert repr(MODEL) in text
        assert [model.model_id for model in (await one.ask(ListModels())).models] == [MODEL]


@on_virtual_time
async def test_name_of_another_job_that_looks_the_same_is_not_told() -> None:
    async with registry() as one:
        other = Principal("a worker", Role.WORKER, frozenset({"Vision"}))
        await one.register()
        await one.register(model_id="Vision/resnet", by=other)
        assert await refused(one.register(model_id="VISION/resnet", by=OPERATOR)) == "model_name_taken"


@on_virtual_time
async def test_record_of_a_version_is_bounded() -> None:
    async with registry() as one:
        large = {str(number): "\u00e9" * 5000 for number in range(60)}
        assert await refused(one.register(tags=large)) == "model_too_large"
        await one.register(tags={str(number): "x" * 5000 for number in range(100)})
        grown = TagModel(MODEL, V1, {"more" + str(number): "x" * 5000 for number in range(5)})
        assert await refused(one.ask(grown)) == "model_too_large"
        assert one.service.state.shares.of(TENANT.holder) > RECORD_BYTES_MAX - 50_000


@on_virtual_time
async def test_ten_thousand_tags_are_refused_and_a_thousand_found() -> None:
    async with registry() as one:
        assert await refused(one.register(tags={str(n): "" for n in range(10_000)})) == "model_argument_invalid"
        await one.register(tags={str(n): "v" for n in range(1000)})
        wanted: tuple[dict[str, str | None], ...] = ({"999": "v"}, {"0": None, "500": "v"})
        for tags in wanted:
            assert len((await one.ask(FindModels(tags=tags))).versions) == 1
        assert (await one.ask(FindModels(tags={"999": "w"}))).versions == []


# Rights.


@on_virtual_time
async def test_principal_of_a_job_has_its_models_only() -> None:
    async with registry() as one:
        await one.register()
        await one.register(model_id="plain", by=OPERATOR)
        hidden = (
            RegisterModel(metadata(model_id="plain")),
            RegisterModel(metadata(model_id="vision-2/x")),
            ShowModel("plain"),
            ShowModel("unknown"),
            ListModelVersions("plain"),
            ReadModelJournal("plain"),
            FindServed("plain", 0.0),
            ListValidations("plain", V1),
            FindBestModel("plain"),
            CompareModels("plain", LATEST, LATEST),
            TagModel("plain", V1),
            ReportArtifact("plain", V1, ArtifactState.SOUND),
            ImportModels([ImportedVersion(metadata(model_id="plain"))], "mine"),
            DeleteModel("plain", V1),
            RollBackModel("plain"),
            SetModelPolicy("plain", ModelPolicy()),
            MoveAlias("plain", "a", V1),
            TransitionModel("plain", V1, VALIDATING),
        )
        for request in hidden:
            assert await refused(one.ask(request, JOB_OPERATOR)) == "forbidden", request
        assert [model.model_id for model in (await one.ask(ListModels(), TENANT)).models] == [MODEL]
        assert (await one.ask(ListModels(), STRANGER)).models == []
        assert [found.model_id for found in (await one.ask(FindModels(), TENANT)).versions] == [MODEL]
        assert (await one.ask(FindModels(state=REGISTERED), STRANGER)).versions == []


@on_virtual_time
async def test_roles_are_checked_within_the_job() -> None:
    async with registry() as one:
        await one.register()
        assert (await one.show(by=VIEWER)).metadata.version == V1
        assert await refused(one.ask(TagModel(MODEL, V1, {"a": "b"}), VIEWER)) == "forbidden"
        assert await refused(one.ask(TransitionModel(MODEL, V1, VALIDATING), TENANT)) == "forbidden"
        await one.ask(TransitionModel(MODEL, V1, VALIDATING), JOB_OPERATOR)


@on_virtual_time
async def test_listing_in_pages_has_each_model_of_the_caller_once() -> None:
    async with registry() as one:
        both = Principal("two jobs", Role.OPERATOR, frozenset({"a", "a-b"}))
        names = ["a", "a-b", "a-b/x", "a/x", "a/y", "a0", "b"]
        for name in names:
            await one.register(model_id=name, by=OPERATOR)
        for by, expected in ((OPERATOR, names), (both, ["a", "a-b", "a-b/x", "a/x", "a/y"])):
            listed: list[str] = []
            while True:
                page = await one.ask(ListModels(listed[-1] if listed else "", 2), by)
                listed += [model.model_id for model in page.models]
                if not page.more:
                    break
            assert listed == expected


# Artifacts and lineage.


def checkpoint(job: str = JOB, state: CheckpointState = CheckpointState.COMPLETE) -> CheckpointRecord:
    meta = checkpoint_meta("ckpt-7", training_run_id=job, step=100, epoch=3, state=state, storage_path=PATH)
    return CheckpointRecord(meta, PATH, SAVE, Holder("x", "x"))


@on_virtual_time
async def test_lineage_comes_from_the_catalogue_the_settings_and_the_audit() -> None:
    async with registry() as one:
        one.checkpoints[PATH] = checkpoint()
        one.audits[JOB, 3] = "epoch 3: all samples were used once"
        claimed = Lineage("somewhere", 9, 9, {}, {})
        await one.register(artifact=Artifact(PATH, SAVE, "ckpt-1", JOB), lineage=claimed)
        view = await one.show()
        assert view.artifact == Artifact(PATH, SAVE, "ckpt-7", JOB)
        assert view.lineage == Lineage(JOB, 3, 100, {}, {"min_workers": 2}, "epoch 3: all samples were used once", 0.0)
        await one.reload()
        assert await one.show() == view
        assert list(one.service.state.models_of(checkpoint())) == [f"model {MODEL}@1.0.0"]
        assert list(one.service.state.models_of(checkpoint("other"))) == []


@on_virtual_time
async def test_checkpoint_that_is_not_catalogued_has_the_callers_lineage() -> None:
    async with registry() as one:
        claimed = Lineage(JOB, 9, 9, {"loss": 0.5}, {"a": 1})
        await one.register(artifact=Artifact("s3://bucket/step-9", SAVE, "made-up"), lineage=claimed)
        view = await one.show()
        assert (view.artifact.checkpoint_id, view.lineage) == ("", claimed)


@pytest.mark.parametrize(
    "wrong",
    [
        Lineage(JOB, -1, 9, {}, {}),
        Lineage(JOB, 9, 1 << 63, {}, {}),
        Lineage(JOB, 9, 9, {"": 0.5}, {}),
        Lineage(JOB, 9, 9, {}, {}, saved_at=-1.0),
        Lineage("a job/", 9, 9, {}, {}),
    ],
    ids=str,
)
@on_virtual_time
async def test_lineage_that_no_checkpoint_has_is_refused(wrong: Lineage) -> None:
    async with registry() as one:
        assert await refused(one.register(lineage=wrong))
        assert not one.service.state.models


@on_virtual_time
async def test_artifact_has_no_more_files_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forged.registry.records.FILES_MAX", 2)
    async with registry() as one:
        files = [ArtifactFile(f"{number}", 1, CHECKSUM) for number in range(3)]
        assert await refused(one.register(artifact=Artifact("/models/a", files=files))) == "model_argument_invalid"
        await one.register(artifact=Artifact("/models/a", files=files[:2]))


@pytest.mark.parametrize("state", [CheckpointState.CREATING, CheckpointState.CORRUPTED, CheckpointState.DELETED])
@on_virtual_time
async def test_checkpoint_that_is_not_complete_is_refused(state: CheckpointState) -> None:
    async with registry() as one:
        one.checkpoints[PATH] = checkpoint(state=state)
        assert await refused(one.register(artifact=Artifact(PATH, SAVE))) == "model_checkpoint_unusable"


@on_virtual_time
async def test_checkpoint_of_another_job_tells_nothing() -> None:
    async with registry() as one:
        one.checkpoints[PATH] = checkpoint("other", CheckpointState.CORRUPTED)
        for version, job in ((V1, ""), (V2, "other")):
            await one.register(version, artifact=Artifact(PATH, SAVE, job=job))
            view = await one.show()
            assert (view.lineage, view.artifact.checkpoint_id, view.artifact.job) == (None, "", job)
            assert list(one.service.state.models_of(one.checkpoints[PATH])) == []


@on_virtual_time
async def test_files_are_stored_and_checked() -> None:
    async with registry() as one:
        file = ArtifactFile("model/a.safetensors", 10, CHECKSUM)
        await one.register(artifact=Artifact("/models/a", files=[file]))
        assert (await one.show()).artifact.files == [file]
        one.checkpoints["/models/a"] = checkpoint()
        beside = await one.register(V3, artifact=Artifact("/models/a", files=[file]))
        view = await one.show(str(beside.version))
        assert (view.artifact.checkpoint_id, view.lineage) == ("", None)
        for wrong in ({"path": "../a"}, {"path": "/a"}, {"path": "a\\b"}, {"checksum": "sha256:x"}, {"size_bytes": -1}):
            fields: dict[str, Any] = {"path": "a", "size_bytes": 1, "checksum": CHECKSUM} | wrong
            bad = Artifact("/models/a", files=[ArtifactFile(**fields)])
            assert await refused(one.register(V2, artifact=bad)) == "model_argument_invalid"
        twice = Artifact("/models/a", files=[file, file])
        assert await refused(one.register(V2, artifact=twice)) == "model_argument_invalid"
        assert await refused(one.register(V2, artifact=Artifact(save_id=SAVE))) == "model_argument_invalid"


@on_virtual_time
async def test_outcome_of_a_verification_is_kept_and_blocks_the_promotion() -> None:
    async with registry() as one:
        await one.make_canary(V1)
        for state in (ArtifactState.SOUND, ArtifactState.DAMAGED, ArtifactState.DAMAGED):
            await one.ask(ReportArtifact(MODEL, V1, state, "a.bin has another checksum"), TENANT)
        assert [fact.state for fact in one.kernel.facts(ModelArtifactChecked)] == ["sound", "damaged"]
        view = await one.show()
        assert (view.artifact_state, view.artifact_checked_at) == ("damaged", one.clock.wall())
        assert "a.bin has another checksum" in view.blocked_by
        text = await why_refused(one.promote(V1, PRODUCTION))
        assert "its files are damaged" in text
        await one.promote(V1, PRODUCTION, waiver="it is a false alarm")
        assert await refused(one.ask(ReportArtifact(MODEL, V1, ArtifactState.UNVERIFIED))) == "model_argument_invalid"


# Evidence and promotion.


@on_virtual_time
async def test_promotion_needs_evidence_and_names_it() -> None:
    async with registry() as one:
        await one.register()
        await one.promote(V1, VALIDATING)
        text = await why_refused(one.promote(V1, STAGING))
        assert "never validated" in text
        assert f"models validate {MODEL}@1.0.0" in text
        recorded = await one.validate()
        assert (recorded.number, recorded.by, recorded.checksum) == (1, TENANT.name, CHECKSUM)
        await one.promote(V1, STAGING, CANARY, PRODUCTION)
        assert one.serving == V1
        assert [entry.evidence for entry in await one.journal() if entry.kind == "transitioned"] == [1, 1, 1, 0]


@on_virtual_time
async def test_failed_validation_outweighs_an_older_one_that_passed() -> None:
    async with registry() as one:
        await one.register()
        await one.promote(V1, VALIDATING)
        await one.validate()
        await one.validate(passed=False)
        assert "validation 2 has failed" in await why_refused(one.promote(V1, STAGING))
        await one.validate()
        await one.promote(V1, STAGING)


@on_virtual_time
async def test_evidence_expires() -> None:
    async with registry() as one:
        await one.register()
        await one.set_policy(evidence_max_age_s=DAY_S)
        await one.validate()
        await one.promote(V1, VALIDATING, STAGING)
        one.clock.jump(2 * DAY_S)
        assert "2.0 days old; limit 1.0" in await why_refused(one.promote(V1, CANARY))
        await one.validate()
        await one.promote(V1, CANARY)


@pytest.mark.parametrize("by_transition", [False, True])
@on_virtual_time
async def test_canary_that_was_rolled_back_needs_a_new_validation(by_transition: bool) -> None:
    async with registry() as one:
        await one.make_canary(V1)
        await (one.promote(V1, STAGING) if by_transition else one.roll_back(V1))
        reason = "validation 1 is older than its rollback from canary"
        assert reason in await why_refused(one.promote(V1, CANARY))
        assert reason in (await one.show()).blocked_by
        await one.promote(V1, REGISTERED, VALIDATING)
        await one.reload()
        assert reason in await why_refused(one.promote(V1, STAGING))
        await one.promote(V1, STAGING, waiver="it is another way to be tried")
        assert reason in await why_refused(one.promote(V1, CANARY))
        await one.validate()
        await one.promote(V1, CANARY, PRODUCTION)


@on_virtual_time
async def test_canary_that_was_never_validated_is_rolled_back() -> None:
    async with registry() as one:
        await one.register()
        await one.promote(V1, *TO_CANARY, waiver="the lab is closed")
        await one.roll_back(V1)
        assert "never validated" in await why_refused(one.promote(V1, CANARY))
        await one.validate()
        await one.promote(V1, CANARY)


@on_virtual_time
async def test_clock_that_goes_back_renews_no_evidence() -> None:
    async with registry() as one:
        await one.register()
        await one.set_policy(evidence_max_age_s=DAY_S)
        await one.validate()
        one.clock.jump(2 * DAY_S)
        await one.promote(V1, VALIDATING)
        one.clock.jump(-2 * DAY_S)
        assert "days old" in await why_refused(one.promote(V1, STAGING))
        times = [entry.at for entry in await one.journal()]
        assert times == sorted(times, reverse=True)
        assert (await one.register(V2)).registered_at == times[0]


@on_virtual_time
async def test_evidence_for_other_files_is_refused() -> None:
    async with registry() as one:
        await one.register()
        assert await refused(one.validate(checksum="sha256:other")) == "model_checksum_differs"
        assert await refused(one.validate(V2)) == "model_version_unknown"
        assert await refused(one.validate(model_id="vision/other")) == "model_unknown"
        assert (await one.show()).validation is None


@pytest.mark.parametrize(
    ("policy", "measured", "why"),
    [
        ({"max_latency_p99_ms": 9.0}, {}, "p99 latency of 10 ms; limit 9"),
        ({"min_accuracy": 0.95}, {}, "accuracy of 0.9; required 0.95"),
        ({"max_latency_p99_ms": 9.0}, {"latency_p99_ms": float("nan")}, "p99 latency of nan"),
        ({"min_accuracy": -1.0}, {"accuracy_score": float("nan")}, "accuracy of nan"),
    ],
)
@on_virtual_time
async def test_evidence_must_be_within_the_policy(policy: dict[str, Any], measured: dict[str, Any], why: str) -> None:
    async with registry() as one:
        await one.register()
        await one.set_policy(**policy)
        await one.promote(V1, VALIDATING)
        await one.validate(**measured)
        assert why in await why_refused(one.promote(V1, STAGING))


@on_virtual_time
async def test_waiver_replaces_evidence_and_is_recorded() -> None:
    async with registry() as one:
        await one.register()
        await one.promote(V1, VALIDATING)
        assert await refused(one.promote(V1, STAGING, waiver="  ")) == "model_evidence_missing"
        await one.promote(V1, STAGING, waiver="the\nlab is closed", reason="urgent")
        entry = (await one.journal())[0]
        assert (entry.waiver, entry.evidence, entry.reason) == ("the lab is closed", 0, "urgent")
        assert one.kernel.facts(ModelTransitioned)[-1].waiver == "the lab is closed"
        await one.validate()
        await one.promote(V1, CANARY, waiver="not needed")
        assert ((await one.journal())[0].waiver, (await one.journal())[0].evidence) == ("", 1)


@on_virtual_time
async def test_policy_may_ask_for_no_evidence() -> None:
    async with registry() as one:
        await one.register()
        await one.set_policy(requires_validation=False)
        await one.promote(V1, *TO_CANARY)
        await one.validate(passed=False)
        await one.promote(V1, PRODUCTION)
        assert one.serving == V1
        assert {entry.evidence for entry in await one.journal() if entry.kind == "transitioned"} == {0}


@on_virtual_time
async def test_way_back_from_canary_needs_no_evidence() -> None:
    async with registry() as one:
        await one.make_canary(V1)
        await one.validate(passed=False)
        await one.promote(V1, STAGING)
        await one.promote(V1, REGISTERED)
        assert await one.state(V1) == "registered"


@on_virtual_time
async def test_refused_transition_names_the_present_state() -> None:
    async with registry() as one:
        await one.register()
        text = await why_refused(one.promote(V1, PRODUCTION))
        assert "is registered; it cannot become production" in text
        assert "it can become validating" in text


@on_virtual_time
async def test_of_two_promoters_one_wins_and_the_other_learns_why() -> None:
    async with registry() as one:
        await one.register()
        await one.validate()
        await one.promote(V1, VALIDATING)
        outcomes: list[str] = []

        async def promote(name: str) -> None:
            by = Principal(name, Role.OPERATOR)
            try:
                await one.ask(TransitionModel(MODEL, V1, STAGING, expected=VALIDATING), by)
            except ForgedError as error:
                outcomes.append(f"{error.code}: {error.message}")
            else:
                outcomes.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(promote, "first")
            tasks.start_soon(promote, "second")
        lost, won = sorted(outcomes, key=len, reverse=True)
        assert lost.startswith("model_state_changed")
        assert f"is staging by {won}" in lost
        assert len([entry for entry in await one.journal() if entry.now == "staging"]) == 1


@on_virtual_time
async def test_latency_is_computed_from_samples_by_nearest_rank() -> None:
    async with registry() as one:
        await one.register()
        recorded = await one.validate(samples_ms=[float(n) for n in range(1, 201)], environment={"gpu": "H100"})
        assert (recorded.result.latency_p50_ms, recorded.result.latency_p99_ms, recorded.samples) == (100.0, 198.0, 200)
        assert recorded.environment == {"gpu": "H100"}
        fact = one.kernel.facts(ValidationRecorded)[0]
        assert (fact.number, fact.latency_p99_ms, fact.passed) == (1, 198.0, True)
        for wrong in ([-1.0], [float("nan")], [float("inf")], [1.0] * 100_001):
            assert await refused(one.validate(samples_ms=wrong)) == "model_argument_invalid"
        many = await one.validate(errors=["\u00e9" * 10_000, *(str(number) for number in range(5000))])
        assert (len(many.result.errors), len(many.result.errors[0]), many.result.errors[99]) == (100, 500, "98")
        assert len((await one.validate(errors=["\u00e9" * 500] * 50)).result.errors) == 6
        assert await refused(one.validate(environment={"a": "x" * 9_000})) == "model_too_large"
        for environment in ({"a": "\x1b"}, {"": "a"}, {f"{number}": "" for number in range(65)}):
            assert await refused(one.validate(environment=environment)) == "model_argument_invalid"


@on_virtual_time
async def test_newest_validations_are_kept() -> None:
    async with registry() as one:
        await one.register()
        for number in range(VALIDATIONS_KEPT + 5):
            await one.validate(accuracy_score=float(number))
        kept = await one.ask(ListValidations(MODEL, V1))
        assert [validation.number for validation in kept] == list(range(VALIDATIONS_KEPT + 5, 5, -1))
        assert kept[0].result.accuracy_score == VALIDATIONS_KEPT + 4


# Serving and rollback.


@on_virtual_time
async def test_promotion_to_production_moves_serving() -> None:
    async with registry() as one:
        await one.serve(V1)
        first_at = one.clock.wall()
        one.clock.jump(100.0)
        await one.serve(V2)
        assert [(fact.was, fact.now) for fact in one.kernel.facts(AliasMoved)] == [(None, V1), (V1, V2)]
        assert (await one.state(V1), (await one.show(SERVING)).metadata.version) == ("production", V2)
        for at, expected in ((first_at - 1, None), (first_at, V1), (first_at + 99, V1), (first_at + 1e6, V2)):
            assert (await one.ask(FindServed(MODEL, at))).version == expected
        found = await one.ask(FindServed(MODEL, first_at))
        assert [entry.alias for entry in await one.journal() if entry.number == found.entry] == [SERVING]


@on_virtual_time
async def test_serving_version_is_not_deprecated() -> None:
    async with registry() as one:
        await one.serve(V1)
        assert (await one.show()).next_states == []
        assert await refused(one.promote(V1, DEPRECATED)) == "model_serving"
        await one.serve(V2)
        assert await refused(one.promote(V2, DEPRECATED, reason="the end")) == "model_serving"
        await one.promote(V1, DEPRECATED, ARCHIVED)


@on_virtual_time
async def test_refusal_for_the_serving_version_names_what_takes_it_out_of_service() -> None:
    async with registry() as one:
        await one.serve(V1, V2)
        with pytest.raises(ForgedError) as caught:
            await one.promote(V2, ARCHIVED)
        assert caught.value.code == "model_transition_refused"
        assert "`forgectl models rollback vision/resnet` returns to 1.0.0" in caught.value.fix
        with pytest.raises(ForgedError, match="is production; it cannot become archived") as caught:
            await one.promote(V1, ARCHIVED)
        assert caught.value.fix == "it can become deprecated"


@on_virtual_time
async def test_last_serving_version_is_deprecated_with_a_reason() -> None:
    async with registry() as one:
        await one.serve(V1)
        before = one.clock.wall()
        one.clock.jump(10.0)
        await one.promote(V1, DEPRECATED, reason="the service ends")
        assert (one.serving, await one.state(V1)) == (None, "deprecated")
        assert one.kernel.facts(AliasMoved)[-1] == AliasMoved(
            MODEL, SERVING, V1, None, OPERATOR.name, "the service ends"
        )
        assert (await one.ask(FindServed(MODEL, before))).version == V1
        assert (await one.ask(FindServed(MODEL, one.clock.wall()))).version is None
        await one.reload()
        assert one.serving is None
        await one.serve(V2)
        assert one.serving == V2


@on_virtual_time
async def test_rollback_returns_to_the_version_that_served_before() -> None:
    async with registry() as one:
        await one.serve(V1, V2, V3)
        done = await one.roll_back(reason="it fails")
        assert done == ModelRolledBack(MODEL, V3, V2, OPERATOR.name, "it fails")
        assert (one.serving, await one.state(V3)) == (V2, "deprecated")
        kinds = [(entry.kind, entry.was, entry.now) for entry in (await one.journal())[:3]]
        assert kinds == [
            ("transitioned", "production", "deprecated"),
            ("alias_moved", "3.0.0", "2.0.0"),
            ("rolled_back", "3.0.0", "2.0.0"),
        ]
        assert (await one.roll_back()).to == V1
        assert await refused(one.roll_back()) == "model_rollback_refused"
        assert one.serving == V1


@on_virtual_time
async def test_rollback_passes_over_what_is_deprecated_and_takes_what_is_named() -> None:
    async with registry() as one:
        await one.serve(V1, V2, V3)
        await one.promote(V2, DEPRECATED)
        for wrong in ({"to": V2}, {"to": V3}, {"version": V1}, {"version": V2}):
            assert await refused(one.roll_back(**wrong)) == "model_rollback_refused"
        assert await refused(one.roll_back(to=ModelVersion(9, 9, 9))) == "model_version_unknown"
        assert (await one.roll_back()).to == V1


@pytest.mark.parametrize("found", [ArtifactState.DAMAGED, ArtifactState.MISSING])
@on_virtual_time
async def test_rollback_passes_over_unsound_files_unless_the_version_is_named(found: ArtifactState) -> None:
    async with registry() as one:
        await one.serve(V1, V2, V3)
        await one.ask(ReportArtifact(MODEL, V2, found, "gone"))
        assert (await one.roll_back()).to == V1
        await one.serve(ModelVersion(4, 0, 0))
        await one.ask(ReportArtifact(MODEL, V1, found, "gone"))
        assert await refused(one.roll_back()) == "model_rollback_refused"
        assert (await one.roll_back(to=V2)).to == V2


@on_virtual_time
async def test_rollback_of_a_canary_returns_it_to_staging() -> None:
    async with registry() as one:
        await one.serve(V1)
        await one.make_canary(V2)
        assert await refused(one.roll_back(V2, to=V3)) == "model_rollback_refused"
        done = await one.roll_back(V2)
        assert (done.version, done.to, one.serving, await one.state(V2)) == (V2, V1, V1, "staging")
        assert await refused(one.roll_back(V2)) == "model_rollback_refused"


@on_virtual_time
async def test_rollback_without_a_serving_version_is_refused() -> None:
    async with registry() as one:
        await one.register()
        assert await refused(one.roll_back()) == "model_rollback_refused"
        assert await refused(one.ask(RollBackModel("vision/none"))) == "model_unknown"


# Canaries.


@on_virtual_time
async def test_canary_is_compared_with_what_the_serving_version_reports() -> None:
    async with registry() as one:
        await one.serve(V1)
        await one.make_canary(V2)
        measured = await one.report(V2, latency_p99_ms=15.0)
        assert (measured.baseline, measured.priority) == (V1, 0.5)
        assert "validation 1 of 1.0.0" in measured.reason
        as_baseline = await one.report(V1, latency_p99_ms=30.0)
        assert (as_baseline.version, as_baseline.priority, as_baseline.action) == (V1, 0.0, "off")
        assert (await one.report(V2, latency_p99_ms=15.0)).priority == 0.0
        assert len(one.kernel.facts(CanaryMeasured)) == 2


@on_virtual_time
async def test_canary_without_a_baseline_is_not_judged() -> None:
    async with registry() as one:
        await one.make_canary(V1)
        await one.set_policy(canary=CanaryAction.ACT, rollback_threshold=0.0)
        measured = await one.report(V1, latency_p99_ms=1e6)
        assert (measured.baseline, measured.priority, await one.state(V1)) == (None, 0.0, "canary")
        assert "no version serves" in measured.reason


@on_virtual_time
async def test_only_canaries_and_the_serving_version_report() -> None:
    async with registry() as one:
        await one.serve(V1, V2)
        await one.register(V3)
        for version in (V1, V3):
            with pytest.raises(ForgedError) as caught:
                await one.report(version)
            assert caught.value.code == "model_not_measurable"
            assert ("models promote" in caught.value.fix) is (version == V3)


@on_virtual_time
async def test_bad_canary_is_rolled_back_once() -> None:
    async with registry() as one:
        await one.watch_canary(CanaryAction.ACT)
        await one.report(V2, latency_p99_ms=19.0)
        assert await one.state(V2) == "canary"
        measured = await one.report(V2, latency_p99_ms=20.0)
        assert (measured.priority, await one.state(V2)) == (1.0, "staging")
        (done,) = one.kernel.facts(ModelRolledBack)
        assert (done.version, done.to, done.by) == (V2, V1, "daemon")
        assert "rollback priority 1" in done.reason


@on_virtual_time
async def test_canary_that_was_promoted_meanwhile_stays_in_service() -> None:
    def extend(one: Registry) -> None:
        async def wrapper(request: RollBackModel, call: Call, proceed: Proceed) -> ModelRolledBack:
            await one.promote(V2, PRODUCTION)
            done: ModelRolledBack = await proceed(request)
            return done

        one.kernel.bus.wrap(RollBackModel, wrapper, owner="a plugin")

    async with registry(extend=extend) as one:
        await one.watch_canary(CanaryAction.ACT)
        await one.report(V2, latency_p99_ms=20.0)
        assert (one.serving, await one.state(V2)) == (V2, "production")


@on_virtual_time
async def test_plugin_may_replace_the_rollback_of_a_bad_canary() -> None:
    asked: list[RollBackModel] = []

    async def wrapper(request: RollBackModel, call: Call, proceed: Proceed) -> ModelRolledBack:
        asked.append(request)
        return ModelRolledBack(request.model_id, V2, V1, "a plugin", "it has paged somebody instead")

    def extend(one: Registry) -> None:
        one.kernel.bus.wrap(RollBackModel, wrapper, owner="a plugin")

    async with registry(extend=extend) as one:
        await one.watch_canary(CanaryAction.ACT)
        await one.report(V2, latency_p99_ms=20.0)
        assert [request.version for request in asked] == [V2]
        assert await one.state(V2) == "canary"


@on_virtual_time
async def test_old_measurement_does_not_roll_back_a_new_canary() -> None:
    async with registry() as one:
        await one.watch_canary(CanaryAction.ACT)
        await one.report(V2, latency_p99_ms=20.0)
        await one.validate(V2)
        await one.promote(V2, CANARY)
        # As after a crash before the position of the judge was stored.
        one.kernel.bus.rewind("registry.canary", 0)
        await one.kernel.settle()
        assert await one.state(V2) == "canary"
        assert len(one.kernel.facts(ModelRolledBack)) == 1


@on_virtual_time
async def test_rollback_of_a_bad_canary_is_advised_once_for_each_time() -> None:
    async with registry() as one:
        await one.serve(V1)
        await one.make_canary(V2)
        for _ in range(3):
            await one.report(V2, latency_p99_ms=25.0)
        (advised,) = one.kernel.facts(RollbackAdvised)
        assert (advised.version, advised.priority, advised.threshold) == (V2, 1.5, 1.0)
        assert await one.state(V2) == "canary"
        await one.promote(V2, STAGING)
        await one.validate(V2)
        await one.promote(V2, CANARY)
        await one.report(V2, latency_p99_ms=25.0)
        assert len(one.kernel.facts(RollbackAdvised)) == 2


@on_virtual_time
async def test_policy_off_neither_acts_nor_advises() -> None:
    async with registry() as one:
        await one.watch_canary(CanaryAction.OFF)
        await one.report(V2, latency_p99_ms=1e6)
        assert await one.state(V2) == "canary"
        assert not one.kernel.facts(RollbackAdvised)


@on_virtual_time
async def test_metrics_of_a_promoted_canary_are_the_next_baseline() -> None:
    async with registry() as one:
        await one.serve(V1)
        await one.make_canary(V2)
        await one.report(V2, latency_p99_ms=12.0)
        await one.promote(V2, PRODUCTION)
        await one.make_canary(V3)
        measured = await one.report(V3, latency_p99_ms=24.0)
        assert (measured.baseline, measured.priority) == (V2, 1.0)
        assert "what 2.0.0 has reported" in measured.reason


@on_virtual_time
async def test_metrics_of_a_canary_that_was_rolled_back_are_no_baseline() -> None:
    async with registry() as one:
        await one.make_canary(V1)
        await one.report(V1, latency_p99_ms=500.0)
        await one.roll_back(V1)
        await one.validate(V1)
        await one.promote(V1, CANARY, PRODUCTION)
        await one.make_canary(V2)
        assert "validation 2 of 1.0.0" in (await one.report(V2)).reason


# Aliases, tags, policies, deletion.


@on_virtual_time
async def test_alias_names_a_version_from_a_time_on() -> None:
    async with registry() as one:
        await one.register(V1)
        await one.register(V2)
        await one.ask(MoveAlias(MODEL, "champion", V1, "best"))
        at = one.clock.wall()
        one.clock.jump(10.0)
        await one.ask(MoveAlias(MODEL, "champion", V2))
        await one.ask(MoveAlias(MODEL, "champion", V2))
        assert (await one.show("champion")).metadata.version == V2
        assert [found.version for found in (await one.ask(FindModels(alias="champion"))).versions] == [V2]
        one.clock.jump(10.0)
        await one.ask(MoveAlias(MODEL, "champion", None))
        assert await refused(one.show("champion")) == "model_reference_unknown"
        assert [(await one.ask(FindServed(MODEL, at + s, "champion"))).version for s in (-1, 0, 10, 20)] == [
            None,
            V1,
            V2,
            None,
        ]
        assert len([entry for entry in await one.journal() if entry.alias == "champion"]) == 3


@pytest.mark.parametrize("alias", ["", "latest", "serving", "1.2.3", "Upper", "a b", "x" * 65, "é"])
@on_virtual_time
async def test_alias_with_another_meaning_is_refused(alias: str) -> None:
    async with registry() as one:
        await one.register()
        assert await refused(one.ask(MoveAlias(MODEL, alias, V1))) == "model_argument_invalid"


@on_virtual_time
async def test_model_has_no_more_aliases_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forged.registry.book.lifecycle.ALIASES_MAX", 2)
    async with registry() as one:
        await one.register(V1)
        await one.register(V2)
        await one.ask(MoveAlias(MODEL, "a", V1))
        await one.ask(MoveAlias(MODEL, "b", V1))
        assert await refused(one.ask(MoveAlias(MODEL, "c", V1))) == "model_argument_invalid"
        await one.ask(MoveAlias(MODEL, "b", V2))
        await one.ask(MoveAlias(MODEL, "a", None))
        await one.ask(MoveAlias(MODEL, "c", V1))


@on_virtual_time
async def test_serving_is_removed_by_nobody() -> None:
    async with registry() as one:
        await one.serve(V1)
        assert await refused(one.ask(MoveAlias(MODEL, SERVING, None))) == "model_argument_invalid"


@on_virtual_time
async def test_tags_are_set_and_removed() -> None:
    async with registry() as one:
        await one.register(tags={"a": "1", "b": "2"})
        changed = await one.ask(TagModel(MODEL, V1, {"a": "1", "c": "3"}, ["b", "unknown"]), TENANT)
        assert changed.tags == {"a": "1", "c": "3"}
        assert one.kernel.facts(ModelTagged) == [ModelTagged(MODEL, V1, {"c": "3"}, ["b"], TENANT.name)]
        await one.ask(TagModel(MODEL, V1, {"a": "1"}))
        assert [entry.now for entry in await one.journal()] == ["c=3, -b", "registered"]
        wanted: tuple[tuple[dict[str, str | None], list[ModelVersion]], ...] = (
            ({"b": None}, []),
            ({"c": "3"}, [V1]),
            ({"a": None}, [V1]),
        )
        for tags, found in wanted:
            assert [one.version for one in (await one.ask(FindModels(tags=tags))).versions] == found


@pytest.mark.parametrize(
    "changes",
    [
        {"evidence_max_age_s": -1.0},
        {"evidence_max_age_s": float("nan")},
        {"max_latency_p99_ms": float("inf")},
        {"min_accuracy": float("nan")},
        {"rollback_threshold": -1.0},
        {"rollback_threshold": float("nan")},
    ],
    ids=repr,
)
@on_virtual_time
async def test_policy_without_meaning_is_refused(changes: dict[str, Any]) -> None:
    async with registry() as one:
        await one.register()
        assert await refused(one.set_policy(**changes)) == "model_argument_invalid"


@on_virtual_time
async def test_change_of_policy_is_in_the_journal() -> None:
    async with registry() as one:
        await one.register()
        await one.set_policy(canary=CanaryAction.ACT, min_accuracy=0.5)
        await one.set_policy(canary=CanaryAction.ACT, min_accuracy=0.5)
        (entry, _) = await one.journal()
        assert (entry.was, entry.now) == (
            "min_accuracy=None, canary=advise",
            "min_accuracy=0.5, canary=act",
        )


@on_virtual_time
async def test_version_is_deleted_when_archived_and_unnamed() -> None:
    async with registry() as one:
        await one.serve(V1, V2)
        await one.ask(MoveAlias(MODEL, "old", V1))
        assert await refused(one.ask(DeleteModel(MODEL, V1))) == "model_version_in_use"
        await one.promote(V1, DEPRECATED, ARCHIVED)
        assert await refused(one.ask(DeleteModel(MODEL, V1))) == "model_version_in_use"
        await one.ask(MoveAlias(MODEL, "old", None))
        before = len(await one.journal())
        await one.ask(DeleteModel(MODEL, V1, "space"))
        assert await refused(one.show("1.0.0")) == "model_version_unknown"
        journal = await one.journal()
        assert (len(journal), journal[0].kind, journal[0].reason) == (before + 1, "deleted", "space")
        assert await refused(one.register(V1)) == "model_version_taken"
        entries = await read_all(one.kernel.store, "model")
        assert len([entry.key for entry in entries if "/1.0.0" in entry.key]) == 1
        await one.reload()
        assert await refused(one.register(V1)) == "model_version_taken"
        assert [entry.kind for entry in await one.journal(version=V1)][:2] == ["deleted", "transitioned"]


@on_virtual_time
async def test_registered_version_is_deleted_with_a_reason_only() -> None:
    async with registry() as one:
        await one.register()
        await one.validate()
        for reason in ("", " \n"):
            with pytest.raises(ForgedError) as caught:
                await one.ask(DeleteModel(MODEL, V1, reason))
            assert (caught.value.code, "--reason" in caught.value.fix) == ("model_version_in_use", True)
        await one.ask(MoveAlias(MODEL, "old", V1))
        assert await refused(one.ask(DeleteModel(MODEL, V1, "a mistake"))) == "model_version_in_use"
        await one.ask(MoveAlias(MODEL, "old", None))
        await one.ask(DeleteModel(MODEL, V1, "a mistake"))
        deleted = (await one.journal())[0]
        assert (deleted.kind, deleted.was, deleted.reason) == ("deleted", "registered", "a mistake")
        assert await refused(one.register(V1)) == "model_version_taken"


@on_virtual_time
async def test_version_on_its_way_is_not_deleted() -> None:
    async with registry() as one:
        await one.register()
        await one.validate()
        for state in TO_CANARY:
            await one.promote(V1, state)
            assert await refused(one.ask(DeleteModel(MODEL, V1, "a mistake"))) == "model_version_in_use"
        await one.roll_back(V1)
        await one.promote(V1, REGISTERED)
        await one.ask(DeleteModel(MODEL, V1, "it has failed"))


@on_virtual_time
async def test_number_of_a_deleted_version_is_not_given_again() -> None:
    async with registry() as one:
        await one.register()
        await one.set_policy(requires_validation=False)
        await one.register(V2)
        await one.promote(V2, *TO_CANARY, PRODUCTION)
        await one.register(V3)
        await one.promote(V3, *TO_CANARY, PRODUCTION)
        await one.roll_back()
        await one.promote(V3, ARCHIVED)
        await one.ask(DeleteModel(MODEL, V3))
        assert (await one.show()).metadata.version == V2
        assert (await one.register(bump="patch")).version == ModelVersion(3, 0, 1)


@on_virtual_time
async def test_version_with_all_its_validations_is_deleted_in_one_transaction() -> None:
    async with registry() as one:
        await one.ask(ImportModels([ImportedVersion(metadata(state=ARCHIVED))], "x"))
        for _ in range(VALIDATIONS_KEPT + 1):
            await one.validate()
        await one.ask(DeleteModel(MODEL, V1))
        await one.kernel.settle()
        assert not await one.kernel.store.list("model-validation/")


# Import.


@on_virtual_time
async def test_imported_versions_have_their_states_aliases_and_evidence() -> None:
    async with registry() as one:
        versions = [
            ImportedVersion(metadata(V1, state=PRODUCTION, registered_at=5.0), [SERVING, "champion"]),
            ImportedVersion(metadata(V2, state=STAGING), validation=result(V2)),
        ]
        reply = await one.ask(ImportModels(versions, "from elsewhere", dry_run=True))
        assert (reply.imported, reply.known, reply.refused) == ([f"{MODEL}@1.0.0", f"{MODEL}@2.0.0"], [], [])
        assert not one.service.state.models
        assert await one.ask(ImportModels(versions, "from elsewhere")) == reply
        assert (one.serving, await one.state(V2)) == (V1, "staging")
        assert (await one.show("champion")).metadata.registered_at == 5.0
        assert (await one.show("2.0.0")).metadata.registered_at == one.clock.wall()
        await one.promote(V2, CANARY)
        again = await one.ask(ImportModels(versions, "again"))
        assert (again.imported, again.known) == ([], reply.imported)
        assert [fact.is_import for fact in one.kernel.facts(ModelRegistered)] == [True, True]
        assert [entry.kind for entry in await one.journal()][-1] == "imported"


@pytest.mark.parametrize(
    ("served", "told"), [(True, f"{MODEL}@3.0.0 instead of 1.0.0"), (False, f"{MODEL}@3.0.0 instead of none")]
)
@on_virtual_time
async def test_import_tells_which_version_serves_instead_of_another(served: bool, told: str) -> None:
    async with registry() as one:
        await (one.serve(V1) if served else one.register(V1))
        versions = [
            ImportedVersion(metadata(V2, state=PRODUCTION), [SERVING]),
            ImportedVersion(metadata(V3, state=PRODUCTION), [SERVING, "champion"]),
            ImportedVersion(metadata(V1, model_id="vision/new", state=PRODUCTION), [SERVING]),
        ]
        planned = await one.ask(ImportModels(versions, "moving", dry_run=True))
        assert (planned.serving, one.serving) == ([told], V1 if served else None)
        assert (await one.ask(ImportModels(versions, "moving"))).serving == [told]
        assert one.serving == V3
        assert (await one.ask(ImportModels(versions, "moving"))).serving == []


@on_virtual_time
async def test_import_gives_a_model_no_more_aliases_than_it_may_have() -> None:
    async with registry() as one:
        await one.register()
        await one.ask(MoveAlias(MODEL, "a0", V1))
        names = [f"a{number}" for number in range(ALIASES_MAX + 1)]
        parts = [names[first : first + 16] for first in range(0, len(names), 16)]
        versions = [
            ImportedVersion(metadata(ModelVersion(number, 0, 0)), aliases)
            for number, aliases in enumerate(parts, start=10)
        ]
        done = await one.ask(ImportModels(versions, "moving"))
        [refusal] = done.refused
        assert "at most 1000 aliases" in refusal
        aliases = one.service.state.model(MODEL).aliases
        assert len(aliases) == 16 * (len(parts) - 1)
        again = await one.ask(ImportModels([replace(versions[-1], aliases=parts[0])], "moving"))
        assert (len(again.imported), len(aliases)) == (1, 16 * (len(parts) - 1))


@on_virtual_time
async def test_import_refuses_each_version_for_its_own_reason() -> None:
    async with registry() as one:
        await one.register()
        versions = [
            ImportedVersion(metadata(V1, checksum="other")),
            ImportedVersion(metadata(V2, state=STAGING), [SERVING]),
            ImportedVersion(metadata(V3), validation=result(V2)),
            ImportedVersion(metadata(V3, model_id="vision/a\0")),
            ImportedVersion(metadata(V3, model_id="vision/new")),
            ImportedVersion(metadata(V3, model_id="vision/NEW")),
            ImportedVersion(metadata(V3, model_id="vision/new")),
            ImportedVersion(metadata(V2), ["latest"]),
        ]
        reply = await one.ask(ImportModels(versions, "x"))
        assert (reply.imported, reply.known) == (["vision/new@3.0.0"], ["vision/new@3.0.0"])
        assert len(reply.refused) == 6


@on_virtual_time
async def test_large_import_is_whole_and_repeatable() -> None:
    async with registry() as one:
        versions = [
            ImportedVersion(
                metadata(ModelVersion(1, 0, number), model_id=f"{job}/{number % 7}", state=PRODUCTION),
                [f"a{number}", "serving"],
                validation=result(ModelVersion(1, 0, number), model_id=f"{job}/{number % 7}"),
            )
            for number in range(125)
            for job in (JOB, "other")
        ]
        reply = await one.ask(ImportModels(versions, "x"))
        assert (len(reply.imported), reply.refused) == (250, [])
        before = sorted(one.service.state.models)
        await one.reload()
        assert sorted(one.service.state.models) == before
        assert len((await one.ask(ImportModels(versions, "x"))).known) == 250
        assert await refused(one.ask(ImportModels(versions * 3, "x"))) == "model_argument_invalid"


# Questions.


@on_virtual_time
async def test_versions_are_listed_in_pages_the_highest_first() -> None:
    async with registry() as one:
        numbers = [ModelVersion(0, 0, 9), ModelVersion(0, 0, 10), ModelVersion(0, 2, 0), V1, V2]
        for number in numbers:
            await one.register(number)
        first = await one.ask(ListModelVersions(MODEL, limit=3))
        rest = await one.ask(ListModelVersions(MODEL, first.versions[-1].version, 3))
        assert (first.more, rest.more) == (True, False)
        assert [found.version for found in first.versions + rest.versions] == numbers[::-1]
        assert await refused(one.ask(ListModelVersions("vision/none"))) == "model_unknown"


@on_virtual_time
async def test_search_combines_what_is_wanted_in_pages() -> None:
    async with registry() as one:
        for number in range(10):
            name = f"vision/{'even' if number % 2 == 0 else 'odd'}"
            tags = {"third": str(number % 3)}
            version = ModelVersion(0, number, 0)
            await one.register(version, model_id=name, name=f"Net {number}", tags=tags, checksum=f"c{number % 5}")
        for wanted, expected in (
            ({}, "0 2 4 6 8 1 3 5 7 9"),
            ({"tags": {"third": "0"}}, "0 6 3 9"),
            ({"tags": {"third": "0"}, "text": "EVEN"}, "0 6"),
            ({"checksum": "c1"}, "6 1"),
            ({"checksum": "c1", "tags": {"third": "1"}}, "1"),
            ({"state": REGISTERED, "text": "net 7"}, "7"),
            ({"state": STAGING}, ""),
            ({"alias": "champion"}, ""),
        ):
            found: list[str] = []
            after = ""
            while True:
                page = await one.ask(FindModels(**wanted, after=after, limit=2), TENANT)
                found += [str(version.version.minor) for version in page.versions]
                if not page.more:
                    break
                after = f"{page.versions[-1].model_id}@{page.versions[-1].version}"
            assert " ".join(found) == expected, wanted
        for after in ("vision", "vision/odd@x", "@1.2.3"):
            assert await refused(one.ask(FindModels(after=after))) == "model_argument_invalid"


@on_virtual_time
async def test_long_search_lets_other_requests_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forged.registry.service.LOOKED_AT_MAX", 3)
    async with registry() as one:
        for number in range(40):
            name = "rare" if number in (7, 39) else "common"
            await one.register(ModelVersion(0, number, 0), name=name)
        search = one.kernel.bus.submit(FindModels(text="rare", limit=1), Call(TENANT, "a test"))
        other = one.kernel.bus.submit(ShowModel(MODEL), Call(TENANT, "a test"))
        assert not search.done
        assert other.done
        page = await search.wait()
        assert ([found.version.minor for found in page.versions], page.more) == ([7], True)
        page = await one.ask(FindModels(text="rare", after=f"{MODEL}@0.7.0", limit=1))
        assert ([found.version.minor for found in page.versions], page.more) == ([39], False)


@on_virtual_time
async def test_long_search_for_the_best_lets_other_requests_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forged.registry.service.LOOKED_AT_MAX", 3)
    async with registry() as one:
        production = [metadata(ModelVersion(0, number, 0), state=PRODUCTION) for number in range(20)]
        await one.ask(ImportModels([ImportedVersion(found) for found in production], "moving"))
        for number in range(20):
            await one.validate(ModelVersion(0, number, 0), accuracy_score=number, latency_p99_ms=number)
        search = one.kernel.bus.submit(FindBestModel(max_latency_ms=2.0), Call(TENANT, "a test"))
        nothing = one.kernel.bus.submit(FindBestModel(max_latency_ms=-1.0), Call(TENANT, "a test"))
        of_no_interest = one.kernel.bus.submit(FindBestModel(max_latency_ms=2.0), Call(STRANGER, "a test"))
        assert not search.done
        assert of_no_interest.done
        assert (await search.wait()).metadata.version == ModelVersion(0, 2, 0)
        assert "within the limits" in (await nothing.wait()).reason
        assert (await of_no_interest.wait()).reason == "no canary or production version was validated"


@on_virtual_time
async def test_best_version_is_within_the_limits() -> None:
    async with registry() as one:
        best = FindBestModel(MODEL)
        await one.register()
        assert (await one.ask(best)).metadata is None
        for version, accuracy, latency in ((V2, 0.9, 10.0), (V3, 0.95, 50.0)):
            await one.register(version)
            await one.validate(version, accuracy_score=accuracy, latency_p99_ms=latency)
            await one.promote(version, *TO_CANARY, PRODUCTION)
        of_all, of_few = await one.ask(best), await one.ask(FindBestModel(max_latency_ms=20.0))
        assert (of_all.metadata.version, of_few.metadata.version) == (V3, V2)
        assert of_all.reason == "the highest accuracy (0.95) of the canary and production versions"
        assert of_few.reason == "the highest accuracy (0.9) of the canary and production versions within the limits"
        none = await one.ask(FindBestModel(min_accuracy=0.99))
        assert none.metadata is None
        assert none.reason == "no validated canary or production version is within the limits"
        assert (await one.ask(FindBestModel(), STRANGER)).metadata is None
        await one.validate(V3, accuracy_score=float("nan"))
        assert (await one.ask(best)).metadata.version == V2


@on_virtual_time
async def test_comparison_suggests_the_step_of_the_version() -> None:
    async with registry() as one:
        await one.register(V1, tags={"a": "1", "b": "2"})
        await one.validate(V1)
        await one.register(V2, output_shape=(10,), tags={"a": "1", "b": "3"})
        found = await one.ask(CompareModels(MODEL, "1.0.0", LATEST))
        assert (found.suggested, found.changed_tags) == ("major", {"b": ("2", "3")})
        assert (found.latency_p99_ms, found.accuracy) == ((10.0, None), (0.9, None))
        assert 0.0 < found.shape_compatibility < 1.0


@on_virtual_time
async def test_journal_of_one_version_is_read_in_pages() -> None:
    async with registry() as one:
        await one.serve(V1, V2)
        of_v1 = [entry for entry in await one.journal() if entry.version == V1]
        assert await one.journal(version=V1) == of_v1
        assert await one.journal(version=V1, limit=2) == of_v1
        for before in range(1, 15):
            expected = [entry for entry in of_v1 if entry.number < before]
            page = await one.ask(ReadModelJournal(MODEL, V1, before))
            assert page.entries == expected
        assert await refused(one.journal(version=V3)) == "model_version_unknown"
        assert await refused(one.journal(limit=0)) == "page_invalid"


# Durability.


@on_virtual_time
async def test_reloaded_registry_answers_the_same() -> None:
    async with registry() as one:
        await one.serve(V1)
        await one.make_canary(V2)
        await one.report(V2, latency_p99_ms=11.0)
        await one.ask(MoveAlias(MODEL, "champion", V2))
        await one.set_policy(min_accuracy=0.1)
        used = one.service.state.shares.used
        views = [await one.show(ref) for ref in ("1.0.0", "champion", SERVING)]
        listed = await one.ask(ListModels())
        await one.reload()
        assert [await one.show(ref) for ref in ("1.0.0", "champion", SERVING)] == views
        assert await one.ask(ListModels()) == listed
        assert one.service.state.shares.used == used
        assert (await one.report(V2, latency_p99_ms=11.0)).priority == pytest.approx(0.1)


@on_virtual_time
async def test_failed_commit_leaves_no_trace() -> None:
    store = FaultyStore()
    async with registry(store) as one:
        await one.make_canary(V1)
        before = await one.journal()
        store.commit_error = full()
        with pytest.raises(Unavailable):
            await one.promote(V1, PRODUCTION)
        with pytest.raises(Unavailable):
            await one.register(V2)
        store.commit_error = None
        await one.kernel.ledger.writable()
        assert (await one.journal(), one.serving, await one.state(V1)) == (before, None, "canary")
        await one.promote(V1, PRODUCTION)
        assert one.serving == V1
        assert [entry.number for entry in await one.journal()] == list(range(len(before) + 2, 0, -1))


class DyingStore(FaultyStore):
    """A store whose daemon dies before or after a certain commit."""

    dies_at = 0
    how = ""

    async def commit(self, batch: Sequence[Transaction]) -> Sequence[Conflict | None]:
        if self.attempts + 1 == self.dies_at:
            self.dies = self.how
        return await super().commit(batch)


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("later", range(1, 5))
@on_virtual_time
async def test_rollback_survives_a_daemon_that_dies_at_any_commit(how: str, later: int) -> None:
    store = DyingStore()
    async with registry(store) as one:
        await one.watch_canary(CanaryAction.ACT)
        store.dies_at, store.how = store.attempts + later, how
        one.kernel.bus.submit(ReportCanary(result(V2, latency_p99_ms=20.0)), Call(TENANT, "a test"))
        await anyio.sleep(5.0)
    async with registry(FaultyStore(store.memory)) as one:
        await one.kernel.settle()
        was_reported = bool(one.kernel.facts(CanaryMeasured))
        assert was_reported == (later > 1 or how == "after")
        assert await one.state(V2) == ("staging" if was_reported else "canary")
        assert len([entry for entry in await one.journal() if entry.kind == "rolled_back"]) == was_reported
        assert len(one.kernel.facts(ModelRolledBack)) == was_reported


# Limits.


@on_virtual_time
async def test_full_registry_refuses_a_tenant_and_serves_operators() -> None:
    async with registry(bytes_max=100_000) as one:
        number = 0
        while one.service.state.shares.fits(TENANT.holder, 3000):
            await one.register(ModelVersion(0, 0, number), tags={"x": "y" * 500})
            number += 1
        assert await refused(one.register(V1, tags={"x": "y" * 3000})) == "registry_full"
        assert 10 < number < 50
        other = Principal("another", Role.WORKER, frozenset({"other"}))
        await one.register(model_id="other/a", by=other)
        await one.register(model_id="operators", by=OPERATOR)
        used = one.service.state.shares.of(TENANT.holder)
        await one.reload()
        assert one.service.state.shares.of(TENANT.holder) == used


@on_virtual_time
async def test_import_takes_in_what_has_room_together() -> None:
    async with registry(bytes_max=100_000) as one:
        tags = {"x": "y" * 3000}
        versions = [ImportedVersion(metadata(ModelVersion(0, 0, number), tags=tags)) for number in range(40)]
        done = await one.ask(ImportModels(versions, "moving"), JOB_OPERATOR)
        assert len(done.imported) > 5
        assert len(done.imported) + len(done.refused) == 40
        assert one.service.state.shares.used <= 100_000


@on_virtual_time
async def test_full_registry_rolls_back() -> None:
    async with registry() as one:
        await one.serve(V1, V2)
        one.service.state.set_bytes_max(1000)
        assert await refused(one.ask(SetModelPolicy(MODEL, ModelPolicy(min_accuracy=0.5)))) == "registry_full"
        assert await refused(one.promote(V1, DEPRECATED)) == "registry_full"
        assert await refused(one.validate(V2)) == "registry_full"
        assert await refused(one.report(V2, errors=["it fails"])) == "registry_full"
        assert await refused(one.ask(TagModel(MODEL, V1, {"a": "b"}))) == "registry_full"
        assert await refused(one.ask(MoveAlias(MODEL, "a", V1))) == "registry_full"
        assert (await one.roll_back()).to == V1


@on_virtual_time
async def test_journal_that_grows_without_end_is_charged_and_refused() -> None:
    async with registry(bytes_max=200_000) as one:
        await one.register()
        number = 0
        while one.service.state.shares.fits(TENANT.holder, ENTRIES_BYTES_MAX):
            await one.ask(TagModel(MODEL, V1, {"a": f"{number} {'x' * 400}"}), TENANT)
            number += 1
        assert await refused(one.ask(TagModel(MODEL, V1, {"a": "x"}), TENANT)) == "registry_full"
        assert number > 10
