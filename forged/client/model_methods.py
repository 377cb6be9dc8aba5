"""The requests of the model registry as typed methods.

Each method is one request, one per page of a list, or the work on files and the request that reports it. Types of the
registry are imported only by the methods that use them, so that clients start faster.

Invariants:
- A version is a `ModelVersion` or a text such as `1.2.3`. A `ref` may also be an alias or `latest`; it is resolved
  before the request, which then names an exact version.
- Files are read in threads; a cancelled caller stops them.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from forged.client.methods import DaemonMethods
from forged.errors import RequestRefused
from forged.pagination import in_batches

if TYPE_CHECKING:
    from forged.checkpoint.ports import CancelToken
    from forged.checkpoint.progress import Progress
    from forged.client.model_files.plain_files import FilesVerdict
    from forged.client.model_files.pulling import Pulled
    from forged.registry.messages import (
        ArtifactState,
        BestVersion,
        CanaryMeasured,
        ImportedModels,
        ImportedVersion,
        JournalEntry,
        ModelDifference,
        ModelPolicy,
        ModelRolledBack,
        ModelSummary,
        ModelView,
        RecordedValidation,
        ServedVersion,
    )
    from forged.registry.model import DeploymentState, ModelMetadata, ModelVersion

T = TypeVar("T")
LATEST = "latest"
SERVING = "serving"
NAN = float("nan")
"""A metric that was not measured."""
NOT_PERMITTED = "forbidden"

Path = str | os.PathLike[str]


class ModelMethods(DaemonMethods):
    """The requests of the model registry; a subclass sends them."""

    # Registration.

    async def register_model(
        self,
        model_id: str,
        *,
        version: ModelVersion | str | None = None,
        bump: str = "",
        checkpoint: Path | None = None,
        job: str = "",
        files: Path | None = None,
        name: str = "",
        framework: str = "",
        input_shape: Sequence[int] = (),
        output_shape: Sequence[int] = (),
        size_bytes: int = 0,
        checksum: str = "",
        tags: Mapping[str, str] | None = None,
        reason: str = "",
        verify: bool = True,
        progress: Progress | None = None,
    ) -> ModelMetadata:
        """Register a version of a model; returns its record with the version that it has.

        Without `version`, the registry assigns the next one: `bump` is `major`, `minor` (default) or `patch`. The
        checksum and the size are those of the `checkpoint` or of the `files` (a file or a folder) on this host; a
        `checksum` that is given as well must be equal. With `verify`, every byte of the checkpoint is compared first.
        `job` is the one whose catalogue has the checkpoint; default: the one that saved it.
        """
        from forged.client.model_files.description import ModelFiles, describing
        from forged.registry.messages import Artifact, RegisterModel
        from forged.registry.model import ModelMetadata, ModelVersion

        if version is not None and bump:
            raise RequestRefused(
                "model_version_ambiguous", f"both version {version} and bump {bump} are given", "give one"
            )
        describe = describing(files, checkpoint, verify=verify)
        described = ModelFiles(Artifact(), checksum, size_bytes)
        if describe is not None:
            described = (await _in_thread(lambda token: describe(token, progress))).of_job(job)
        if checksum not in ("", described.checksum):
            raise RequestRefused(
                "model_checksum_differs",
                f"the files of {model_id} have the checksum {described.checksum}, given is {checksum}",
                "register the files that were meant",
            )
        metadata = ModelMetadata(
            model_id=model_id,
            name=name or model_id,
            version=ModelVersion(0, 0, 0) if version is None else _exact(version),
            framework=framework,
            input_shape=tuple(input_shape),
            output_shape=tuple(output_shape),
            size_bytes=size_bytes or described.size_bytes,
            checksum=described.checksum,
            tags=dict(tags or {}),
        )
        step = "" if version is not None else bump or "minor"
        return await self.request(
            RegisterModel(metadata, step, described.artifact, described.lineage, reason),
        )

    async def import_models(
        self, versions: Sequence[ImportedVersion], reason: str, *, dry_run: bool = False
    ) -> ImportedModels:
        """Take in versions that serve elsewhere, in the states that they have there.

        `serving` of the reply names those that serve instead of other versions from now on.
        """
        from msgspec import msgpack

        from forged.registry.messages import IMPORTED_MAX, ImportedModels, ImportModels

        outcomes: list[list[str]] = [[], [], [], []]
        for batch in in_batches(versions, msgpack.encode, IMPORTED_MAX):
            done = await self.request(ImportModels(batch, reason, dry_run))
            for outcome, more in zip(outcomes, (done.imported, done.known, done.refused, done.serving), strict=True):
                outcome += more
        return ImportedModels(*outcomes)

    # Evidence.

    async def validate_model(
        self,
        model_id: str,
        ref: ModelVersion | str,
        *,
        passed: bool,
        accuracy: float = NAN,
        samples_ms: Iterable[float] = (),
        latency_p50_ms: float = NAN,
        latency_p99_ms: float = NAN,
        errors: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        files: Path | None = None,
        checkpoint: Path | None = None,
        checksum: str = "",
        progress: Progress | None = None,
    ) -> RecordedValidation:
        """Record a validation. From `samples_ms`, latencies of single requests, the registry computes p50 and p99.

        `files`, `checkpoint` or `checksum` tell what was measured; it is refused if that is not the version. By
        default the caller is trusted to have measured the version.
        """
        from forged.client.model_files.description import describing
        from forged.registry.messages import RecordValidation
        from forged.registry.model import ValidationResult

        describe = describing(files, checkpoint, verify=False)
        if describe is not None:
            checksum = (await _in_thread(lambda token: describe(token, progress))).checksum
        found = (await self.model(model_id, f"{ref}")).metadata
        result = ValidationResult(
            model_id, found.version, passed, latency_p50_ms, latency_p99_ms, accuracy, tuple(errors)
        )
        measured = list(map(float, samples_ms))
        return await self.request(
            RecordValidation(result, checksum or found.checksum, measured, dict(environment or {}))
        )

    async def report_canary(
        self,
        model_id: str,
        ref: ModelVersion | str,
        *,
        passed: bool = True,
        accuracy: float = NAN,
        samples_ms: Iterable[float] = (),
        latency_p50_ms: float = NAN,
        latency_p99_ms: float = NAN,
        errors: Sequence[str] = (),
    ) -> CanaryMeasured:
        """Report what a canary shows in service, or the serving version: that is the baseline of the comparison.

        `errors` are those since the last report. The reply has the priority of a rollback, and the threshold.
        """
        from forged.registry.messages import ReportCanary
        from forged.registry.model import ValidationResult

        version = await self._version(model_id, ref)
        result = ValidationResult(model_id, version, passed, latency_p50_ms, latency_p99_ms, accuracy, tuple(errors))
        return await self.request(ReportCanary(result, list(map(float, samples_ms))))

    async def model_validations(self, model_id: str, ref: ModelVersion | str = LATEST) -> list[RecordedValidation]:
        """The validations of a version, the newest first; at most 100 are kept."""
        from forged.registry.messages import ListValidations

        return await self.request(ListValidations(model_id, await self._version(model_id, ref)))

    # Lifecycle.

    async def promote_model(
        self,
        model_id: str,
        ref: ModelVersion | str,
        *,
        to: DeploymentState | str | None = None,
        reason: str = "",
        waiver: str = "",
    ) -> ModelMetadata:
        """Promote a version by one step, or to the state `to`; refused if its state changes meanwhile.

        `waiver` says why no evidence is needed this time, and is recorded.
        """
        from forged.registry.messages import TransitionModel
        from forged.registry.model import DeploymentState

        found = (await self.model(model_id, f"{ref}")).metadata
        state = next_state(found) if to is None else DeploymentState(to)
        return await self.request(
            TransitionModel(model_id, found.version, state, reason, expected=found.state, waiver=waiver)
        )

    async def transition_model(
        self,
        model_id: str,
        version: ModelVersion | str,
        to: DeploymentState | str,
        *,
        reason: str = "",
        expected: DeploymentState | str | None = None,
        waiver: str = "",
    ) -> ModelMetadata:
        """Give a version another state of the table; with `expected`, refused if it has another state before."""
        from forged.registry.messages import TransitionModel
        from forged.registry.model import DeploymentState

        before = None if expected is None else DeploymentState(expected)
        return await self.request(
            TransitionModel(model_id, _exact(version), DeploymentState(to), reason, before, waiver)
        )

    async def roll_back_model(
        self,
        model_id: str,
        version: ModelVersion | str | None = None,
        *,
        to: ModelVersion | str | None = None,
        reason: str = "",
    ) -> ModelRolledBack:
        """Take a version out of service; default: the serving one, and the version that served before serves again."""
        from forged.registry.messages import RollBackModel

        return await self.request(
            RollBackModel(
                model_id,
                None if version is None else _exact(version),
                None if to is None else _exact(to),
                reason,
            )
        )

    async def move_alias(
        self, model_id: str, alias: str, version: ModelVersion | str | None, *, reason: str = ""
    ) -> None:
        """Let an alias name a version; None removes the alias. `serving` moves by promotion and rollback only."""
        from forged.registry.messages import MoveAlias

        await self.request(MoveAlias(model_id, alias, None if version is None else _exact(version), reason))

    async def tag_model(
        self,
        model_id: str,
        version: ModelVersion | str,
        tags: Mapping[str, str] | None = None,
        *,
        remove: Sequence[str] = (),
    ) -> ModelMetadata:
        """Set and remove tags of a version."""
        from forged.registry.messages import TagModel

        return await self.request(TagModel(model_id, _exact(version), dict(tags or {}), list(remove)))

    async def set_model_policy(self, model_id: str, policy: ModelPolicy, *, reason: str = "") -> ModelPolicy:
        """Replace the policy of a model."""
        from forged.registry.messages import SetModelPolicy

        return await self.request(SetModelPolicy(model_id, policy, reason))

    async def delete_model(self, model_id: str, version: ModelVersion | str, *, reason: str = "") -> None:
        """Delete a version that no alias names: an archived one, or with a reason a registered one; its files stay."""
        from forged.registry.messages import DeleteModel

        await self.request(DeleteModel(model_id, _exact(version), reason))

    # Questions.

    async def model(self, model_id: str, ref: ModelVersion | str = LATEST) -> ModelView:
        """One version with what the registry knows of it; `ref` is a version, an alias, or `latest`."""
        from forged.registry.messages import ShowModel

        return await self.request(ShowModel(model_id, f"{ref}"))

    async def models(self) -> AsyncIterator[ModelSummary]:
        """All models that this client may see, by id."""
        from forged.registry.messages import ListModels

        after, more = "", True
        while more:
            page = await self.request(ListModels(after))
            for one in page.models:
                yield one
                after = one.model_id
            more = page.more

    async def model_versions(self, model_id: str) -> AsyncIterator[ModelMetadata]:
        """All versions of a model, the highest first."""
        from forged.registry.messages import ListModelVersions

        before: ModelVersion | None = None
        more = True
        while more:
            page = await self.request(ListModelVersions(model_id, before))
            for one in page.versions:
                yield one
                before = one.version
            more = page.more

    async def find_models(
        self,
        *,
        state: DeploymentState | str | None = None,
        tags: Mapping[str, str | None] | None = None,
        checksum: str = "",
        alias: str = "",
        text: str = "",
    ) -> AsyncIterator[ModelMetadata]:
        """Versions that match all that is given; the value None of a tag stands for any value."""
        from forged.registry.messages import FindModels
        from forged.registry.model import DeploymentState

        wanted = None if state is None else DeploymentState(state)
        after, more = "", True
        while more:
            page = await self.request(FindModels(wanted, dict(tags or {}), checksum, alias, text, after))
            for one in page.versions:
                yield one
                after = f"{one.model_id}@{one.version}"
            more = page.more

    async def model_journal(
        self, model_id: str, version: ModelVersion | str | None = None
    ) -> AsyncIterator[JournalEntry]:
        """The changes of a model, or of one version of it, the newest first."""
        from forged.registry.messages import ReadModelJournal

        exact = None if version is None else _exact(version)
        before, more = 0, True
        while more:
            page = await self.request(ReadModelJournal(model_id, exact, before))
            for one in page.entries:
                yield one
                before = one.number
            more = page.more

    async def served_model(self, model_id: str, at: float, alias: str = SERVING) -> ServedVersion:
        """What an alias of a model named at a time, by default what was serving."""
        from forged.registry.messages import FindServed

        return await self.request(FindServed(model_id, at, alias))

    async def best_model(
        self, model_id: str = "", *, max_latency_ms: float | None = None, min_accuracy: float | None = None
    ) -> BestVersion:
        """The best version in canary or production, of a model or of all; with limits, of those that meet them."""
        from forged.registry.messages import FindBestModel

        return await self.request(FindBestModel(model_id, max_latency_ms, min_accuracy))

    async def compare_models(
        self, model_id: str, first: ModelVersion | str, second: ModelVersion | str
    ) -> ModelDifference:
        """How two versions of a model differ."""
        from forged.registry.messages import CompareModels

        return await self.request(CompareModels(model_id, f"{first}", f"{second}"))

    # Files.

    async def verify_model(
        self,
        model_id: str,
        ref: ModelVersion | str = LATEST,
        *,
        location: Path = "",
        progress: Progress | None = None,
    ) -> FilesVerdict:
        """Compare every byte of a version's files with its checksum, and report the outcome to the registry.

        `location` is where the files lie on this host if that is not where they were registered.
        """
        from forged.client.model_files.comparison import compare

        view = await self.model(model_id, ref)
        where = os.fspath(location)
        found = await _in_thread(lambda token: compare(view.metadata, view.artifact, token, progress, where))
        if not where:
            await self._report(view, found.state, found.problem)
        return found

    async def pull_model(
        self,
        model_id: str,
        ref: ModelVersion | str = LATEST,
        target: Path | None = None,
        *,
        location: Path = "",
        progress: Progress | None = None,
    ) -> Pulled:
        """Copy the files of a version, verified, to a new `target`, or into it if it is a folder.

        A checkpoint becomes a safetensors file.
        """
        from forged.client.model_files.comparison import is_damage
        from forged.client.model_files.pulling import pull
        from forged.errors import ForgedError
        from forged.registry.messages import ArtifactState

        view = await self.model(model_id, ref)
        where = os.fspath(location)
        try:
            pulled = await _in_thread(lambda token: pull(view.metadata, view.artifact, target, token, progress, where))
        except ForgedError as error:
            if is_damage(error) and not where:
                await self._report(view, ArtifactState.DAMAGED, error.message)
            raise
        if not where:
            await self._report(view, ArtifactState.SOUND, "")
        return pulled

    async def _report(self, view: ModelView, state: ArtifactState, problem: str) -> None:
        """Tell the registry about the files, if this client may."""
        from forged.registry.messages import ReportArtifact

        metadata = view.metadata
        try:
            await self.request(ReportArtifact(metadata.model_id, metadata.version, state, problem))
        except RequestRefused as refusal:
            if refusal.code != NOT_PERMITTED:
                raise

    async def _version(self, model_id: str, ref: ModelVersion | str) -> ModelVersion:
        """The version that a reference stands for."""
        from forged.registry.versions import parse_version

        exact = parse_version(ref) if isinstance(ref, str) else ref
        return exact or (await self.model(model_id, ref)).metadata.version


def next_state(metadata: ModelMetadata) -> DeploymentState:
    """The next state towards production."""
    from forged.registry.model import PROMOTIONS, DeploymentState

    following = PROMOTIONS.get(metadata.state)
    if following is None:
        raise RequestRefused(
            "model_transition_refused",
            f"{metadata.model_id}@{metadata.version} is {metadata.state}; no promotion leads on from there",
            "promote another version" if metadata.state is DeploymentState.PRODUCTION else "register a new version",
        )
    return following


def _exact(version: ModelVersion | str) -> ModelVersion:
    """The version; refuses an alias, because what decides takes exact versions."""
    from forged.registry.versions import parse_version

    found = parse_version(version) if isinstance(version, str) else version
    if found is None:
        raise RequestRefused(
            "model_version_invalid", f"{version!r} is not a version", "give three numbers, such as 1.2.3"
        )
    return found


async def _in_thread(act: Callable[[CancelToken], T]) -> T:
    """Run work on files in a thread; a cancelled caller stops it and waits for it."""
    from forged.checkpoint.ports import CancelToken
    from forged.checkpoint.thread_calls import run_in_thread

    token = CancelToken()
    return await run_in_thread(lambda: act(token), token)
