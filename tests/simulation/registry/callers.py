"""Callers of the registry: trainers, promoters, readers, and a hostile tenant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import anyio

from forged.client import ForgedClient
from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Request
from forged.registry.messages import (
    SERVING,
    ArtifactState,
    CanaryAction,
    DeleteModel,
    FindModels,
    FindServed,
    ImportedVersion,
    ImportModels,
    JournalKind,
    ListModels,
    ListModelVersions,
    ListValidations,
    ModelPolicy,
    MoveAlias,
    ReadModelJournal,
    RecordValidation,
    RegisterModel,
    ReportArtifact,
    ReportCanary,
    RollBackModel,
    SetModelPolicy,
    ShowModel,
    TagModel,
    TransitionModel,
)
from forged.registry.model import TRANSITIONS, DeploymentState, ModelMetadata, ModelVersion
from tests.registry.registry_fixture import CHECKSUM, metadata, result
from tests.simulation.registry.oracle import Promise

if TYPE_CHECKING:
    from tests.simulation.registry.simulation import RegistrySimulation

JOB, HOSTILE = "vision", "hostile"
MODELS = ("vision/a", "vision/b")
FORWARD = (
    DeploymentState.VALIDATING,
    DeploymentState.STAGING,
    DeploymentState.CANARY,
    DeploymentState.PRODUCTION,
)
PROMOTED = (DeploymentState.REGISTERED, *FORWARD[:-1])
PERSISTENCE = 0.7
"""How often a promoter does the next step towards production."""
OTHERS_CODES = frozenset({"forbidden"})
Operation = Callable[[ForgedClient, str], Awaitable[Any]]


class Caller:
    """Somebody who does something again and again, until the faults end."""

    pause_s = (0.05, 0.8)

    def __init__(self, simulation: RegistrySimulation, name: str) -> None:
        self.simulation = simulation
        self.oracle = simulation.oracle
        self.name = name
        self.random = Random(f"{name} {simulation.seed}")

    def operations(self) -> tuple[Operation, ...]:
        raise NotImplementedError

    async def run(self) -> None:
        operations = self.operations()
        async with self.simulation.client(self.name) as client:
            while self.simulation.faults_active:
                await anyio.sleep(self.random.uniform(*self.pause_s))
                with self.excused():
                    await self.random.choice(operations)(client, self.random.choice(MODELS))

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Note refusals and errors, which are expected."""
        try:
            yield
        except RequestRefused as error:
            self.simulation.note(f"{self.name} was refused: {error.code}")
            self.simulation.meet(f"refused: {error.code}")
        except Unavailable as error:
            self.simulation.note(f"{self.name} got error {error.code}")

    async def change(
        self,
        client: ForgedClient,
        request: Request[Any],
        model_id: str,
        kind: JournalKind,
        version: ModelVersion | None,
    ) -> Any:
        """Send a request that adds an entry to a journal; check that it is there when the reply is."""
        before = self.oracle.entries(model_id)
        reply = await client.request(request)
        by = self.simulation.principal(self.name)
        self.oracle.acknowledged(model_id, kind, reply.version if version is None else version, by, before)
        return reply

    async def any_version(self, client: ForgedClient, model_id: str, *states: DeploymentState) -> ModelMetadata | None:
        page = await client.request(ListModelVersions(model_id))
        found = [one for one in page.versions if not states or one.state in states]
        return self.random.choice(found) if found else None


class Trainer(Caller):
    """A worker of a job that registers versions and tells what they show."""

    pause_s = (0.02, 0.4)

    def operations(self) -> tuple[Operation, ...]:
        return (
            self._register,
            *[self._validate] * 4,
            *[self._report] * 4,
            self._tag,
            self._check,
        )

    async def _register(self, client: ForgedClient, model_id: str) -> None:
        bump = self.random.choice(("major", "minor", "patch", ""))
        version = ModelVersion(0, self.random.randrange(12), 0)
        above = max(self.oracle.model(model_id).ever, default=None) if bump else None
        request = RegisterModel(metadata(version, model_id=model_id), bump)
        reply = await self.change(client, request, model_id, JournalKind.REGISTERED, None if bump else version)
        if above is not None and reply.version <= above:
            self.oracle.broken(Promise.ORDER, f"the next version of {model_id} is {reply.version}, after {above}")

    async def _validate(self, client: ForgedClient, model_id: str) -> None:
        one = await self.any_version(client, model_id)
        if one is None:
            return
        checksum = CHECKSUM if self.random.random() < 0.9 else "sha256:of other files"
        measured = result(
            one.version,
            model_id=model_id,
            passed=self.random.random() < 0.8,
            latency_p99_ms=self.random.uniform(5.0, 20.0),
            accuracy_score=self.random.choice((0.8, 0.9, float("nan"))),
        )
        await self.change(client, RecordValidation(measured, checksum), model_id, JournalKind.VALIDATED, one.version)

    async def _report(self, client: ForgedClient, model_id: str) -> None:
        """Tell what canaries show: far worse than any baseline, or well."""
        page = await client.request(FindModels(state=DeploymentState.CANARY))
        canaries = [one for one in page.versions if one.model_id == model_id]
        is_bad = self.random.random() < 0.4
        for one in canaries:
            errors = [f"error {number}" for number in range(50)] if is_bad else []
            shown = result(one.version, model_id=model_id, latency_p99_ms=500.0 if is_bad else 5.0, errors=errors)
            await client.request(ReportCanary(shown))
        serving = (await client.request(FindServed(model_id, 1e12))).version
        if serving is not None and self.random.random() < 0.3:
            await client.request(ReportCanary(result(serving, model_id=model_id)))

    async def _tag(self, client: ForgedClient, model_id: str) -> None:
        if (one := await self.any_version(client, model_id)) is not None:
            tags = {"note": f"{self.random.random()}"}
            await self.change(client, TagModel(model_id, one.version, tags), model_id, JournalKind.TAGGED, one.version)

    async def _check(self, client: ForgedClient, model_id: str) -> None:
        if (one := await self.any_version(client, model_id)) is not None:
            state = self.random.choice((ArtifactState.SOUND, ArtifactState.SOUND, ArtifactState.DAMAGED))
            await client.request(ReportArtifact(model_id, one.version, state))


class Promoter(Caller):
    """An operator who promotes, rolls back, moves aliases, changes policies, deletes and imports."""

    pause_s = (0.02, 0.4)

    def operations(self) -> tuple[Operation, ...]:
        return (
            *[self._promote] * 12,
            self._roll_back,
            self._alias,
            self._policy,
            self._retire,
            self._delete,
            self._import,
        )

    async def _promote(self, client: ForgedClient, model_id: str) -> None:
        one = await self.any_version(client, model_id, *PROMOTED)
        if one is None:
            return
        following = sorted(TRANSITIONS[one.state])
        forward = [state for state in following if state in FORWARD and (state, one.state) != (FORWARD[1], FORWARD[2])]
        to = self.random.choice(forward if forward and self.random.random() < PERSISTENCE else following or FORWARD)
        request = TransitionModel(
            model_id,
            one.version,
            to,
            reason=f"by {self.name}",
            expected=one.state if self.random.random() < 0.7 else None,
            waiver="for once" if self.random.random() < 0.3 else "",
        )
        await self.change(client, request, model_id, JournalKind.TRANSITIONED, one.version)

    async def _roll_back(self, client: ForgedClient, model_id: str) -> None:
        one = await self.any_version(client, model_id, DeploymentState.CANARY)
        version = one.version if one is not None and self.random.random() < 0.3 else None
        await self.change(client, RollBackModel(model_id, version), model_id, JournalKind.ROLLED_BACK, version)

    async def _alias(self, client: ForgedClient, model_id: str) -> None:
        one = await self.any_version(client, model_id)
        alias = self.random.choice(("champion", "stable", SERVING))
        if one is not None:
            version = one.version if self.random.random() < 0.8 else None
            await client.request(MoveAlias(model_id, alias, version))

    async def _policy(self, client: ForgedClient, model_id: str) -> None:
        policy = ModelPolicy(
            requires_validation=self.random.random() < 0.85,
            evidence_max_age_s=self.random.choice((5.0, 15.0, 1e6)),
            max_latency_p99_ms=self.random.choice((None, 15.0)),
            min_accuracy=self.random.choice((None, None, 0.85)),
            canary=self.random.choice((CanaryAction.ACT, CanaryAction.ACT, CanaryAction.ADVISE, CanaryAction.OFF)),
        )
        await client.request(SetModelPolicy(model_id, policy))

    async def _retire(self, client: ForgedClient, model_id: str) -> None:
        """Deprecate and archive a version, the serving one too if that is possible."""
        one = await self.any_version(client, model_id, DeploymentState.PRODUCTION, DeploymentState.DEPRECATED)
        if one is not None:
            (to,) = TRANSITIONS[one.state]
            reason = self.random.choice(("", "the end"))
            request = TransitionModel(model_id, one.version, to, reason)
            await self.change(client, request, model_id, JournalKind.TRANSITIONED, one.version)

    async def _delete(self, client: ForgedClient, model_id: str) -> None:
        one = await self.any_version(client, model_id, DeploymentState.ARCHIVED, DeploymentState.REGISTERED)
        if one is None:
            return
        request = DeleteModel(model_id, one.version, self.random.choice(("", "a mistake")))
        await self.change(client, request, model_id, JournalKind.DELETED, one.version)
        # Its number is never given again, neither by name nor as the next one.
        try:
            await client.request(RegisterModel(metadata(one.version, model_id=model_id)))
        except RequestRefused:
            return
        self.oracle.broken(Promise.ORDER, f"{model_id}@{one.version} was deleted, and is registered again")

    async def _import(self, client: ForgedClient, model_id: str) -> None:
        versions = []
        for _ in range(self.random.randint(1, 3)):
            version = ModelVersion(9, self.random.randrange(8), self.random.randrange(8))
            state = self.random.choice(list(DeploymentState))
            aliases = ["champion"] if self.random.random() < 0.3 else []
            aliases += [SERVING] if self.random.random() < 0.1 else []
            versions.append(ImportedVersion(metadata(version, model_id=model_id, state=state), aliases))
        reply = await client.request(ImportModels(versions, "from elsewhere"))
        ever = {f"{model_id}@{version}" for version in self.oracle.model(model_id).ever}
        if missing := sorted({*reply.imported, *reply.known} - ever):
            self.oracle.broken(Promise.KEPT, f"{missing} were imported, and are not there")


class Reader(Caller):
    """A viewer who compares answers with the journals."""

    def operations(self) -> tuple[Operation, ...]:
        return (self._served, self._served, self._list, self._read_journal, self._look)

    async def _served(self, client: ForgedClient, model_id: str) -> None:
        model = self.oracle.model(model_id)
        if not model.moves:
            return
        # Before the last entry: no later move can be there.
        times = [move.at for move in model.moves if move.at < model.told.at]
        if not times:
            return
        at = self.random.choice(times) + self.random.choice((0.0, -1e-3))
        alias = self.random.choice((SERVING, "champion"))
        expected = model.served_at(at, alias)
        found = await client.request(FindServed(model_id, at, alias))
        if found != expected:
            self.oracle.broken(
                Promise.ANSWERS, f"{alias} of {model_id} named {expected} at {at}, and is told as {found}"
            )
        self.simulation.meet("a reader asks what served")

    async def _list(self, client: ForgedClient, model_id: str) -> None:
        known = set(self.oracle.model(model_id).told.states)
        page = await client.request(ListModelVersions(model_id))
        found = [one.version for one in page.versions]
        if found != sorted(set(found), reverse=True):
            self.oracle.broken(Promise.ORDER, f"{model_id} lists {found}")
        left = known - set(self.oracle.model(model_id).told.deleted)
        if not left <= set(found):
            self.oracle.broken(Promise.KEPT, f"{model_id} lists {found}, and had {sorted(left)}")

    async def _read_journal(self, client: ForgedClient, model_id: str) -> None:
        expected = list(self.oracle.model(model_id).journal)
        page = await client.request(ReadModelJournal(model_id, before=len(expected) + 1, limit=20))
        if page.entries != expected[::-1][:20]:
            self.oracle.broken(Promise.ANSWERS, f"{model_id} tells another journal: {page.entries}")

    async def _look(self, client: ForgedClient, model_id: str) -> None:
        await client.request(ShowModel(model_id))
        if (one := await self.any_version(client, model_id)) is not None:
            await client.request(ListValidations(model_id, one.version))


class HostileTenant(Caller):
    """An operator of another job that wants to see and to change models."""

    def operations(self) -> tuple[Operation, ...]:
        return (self._name, self._list)

    async def _name(self, client: ForgedClient, model_id: str) -> None:
        """Name a model of another job in a request: it is refused whether there is such a model or not."""
        name = self.random.choice((model_id, "vision/none", "vision", "none"))
        version = ModelVersion(0, self.random.randrange(12), 0)
        requests: tuple[Request[Any], ...] = (
            ShowModel(name),
            FindServed(name, 0.0),
            ReadModelJournal(name),
            RegisterModel(metadata(version, model_id=name)),
            RecordValidation(result(version, model_id=name), CHECKSUM),
            TransitionModel(name, version, DeploymentState.VALIDATING),
            RollBackModel(name),
            MoveAlias(name, "champion", version),
            ImportModels([ImportedVersion(metadata(version, model_id=name))], "mine"),
        )
        request = self.random.choice(requests)
        try:
            await client.request(request)
        except RequestRefused as error:
            self.simulation.meet("a hostile tenant is refused")
            if error.code not in OTHERS_CODES:
                self.oracle.broken(Promise.REFUSED, f"a hostile tenant learns {error.code} by {request}")
        else:
            self.oracle.broken(Promise.REFUSED, f"a hostile tenant may send {request}")

    async def _list(self, client: ForgedClient, model_id: str) -> None:
        found = [one.model_id for one in (await client.request(ListModels())).models]
        found += [one.model_id for one in (await client.request(FindModels())).versions]
        state = self.random.choice(list(DeploymentState))
        found += [one.model_id for one in (await client.request(FindModels(state=state))).versions]
        if found:
            self.oracle.broken(Promise.REFUSED, f"a hostile tenant is told of {found}")
