"""The model registry on the bus: answers requests, and judges canaries.

Invariants:
- The rights of the caller are checked before anything is looked up.
- A bad canary is rolled back by `RollBackModel`, which the daemon asks of itself, so that a plugin can replace it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from forged.clock import Clock
from forged.errors import RequestRefused
from forged.kernel.bus import DAEMON, Bus
from forged.kernel.ledger import read_all
from forged.kernel.messages import Call, Decision, Record, Request
from forged.kernel.store.port import Entry, Store
from forged.log import SILENT, Log
from forged.pagination import PAGE_ENTRIES_MAX, take_page
from forged.registry.book.evidence import Evidence
from forged.registry.book.lifecycle import Lifecycle
from forged.registry.book.questions import LOOKED_AT_MAX, Questions, no_best, parsed_key
from forged.registry.book.registration import Registration
from forged.registry.book.state import REGISTRY_BYTES_MAX, RegistryState
from forged.registry.book.version_index import Key
from forged.registry.journal import StoredJournal
from forged.registry.messages import (
    BestVersion,
    CanaryMeasured,
    CompareModels,
    DeleteModel,
    FindBestModel,
    FindModels,
    FindServed,
    ImportedModels,
    ImportModels,
    ListModels,
    ListModelVersions,
    ListValidations,
    ModelPage,
    ModelView,
    MoveAlias,
    ReadModelJournal,
    RecordedValidation,
    RecordValidation,
    RegisterModel,
    ReportArtifact,
    ReportCanary,
    RollBackModel,
    SetModelPolicy,
    ShowModel,
    TagModel,
    TransitionModel,
    VersionPage,
)
from forged.registry.names import require_access
from forged.registry.ports import OriginsPort
from forged.registry.records import DELETED, HEADS, MOVES, RECORDS, VersionDetails

OWNER = "registry"
JUDGE = "registry.canary"

NO_DETAILS = VersionDetails()


class RegistryService:
    """The models of all jobs."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        origins: OriginsPort,
        *,
        bytes_max: int = REGISTRY_BYTES_MAX,
        log: Log = SILENT,
    ) -> None:
        self.state = RegistryState(lambda job: origins.settings(job) is not None, bytes_max)
        self.registration = Registration(self.state, origins)
        self.evidence = Evidence(self.state)
        self.lifecycle = Lifecycle(self.state)
        self.questions = Questions(self.state)
        self._bus = bus
        self._clock = clock
        self._log = log
        self._subscribe()

    def _subscribe(self) -> None:
        self._decide(RegisterModel, self.registration.register, lambda request: request.metadata.model_id)
        self._decide(RecordValidation, self.evidence.validate, lambda request: request.result.model_id)
        self._decide(ReportCanary, self.evidence.measure, lambda request: request.result.model_id)
        self._decide(ReportArtifact, self.evidence.check_files)
        self._decide(TagModel, self.lifecycle.tag)
        self._decide(TransitionModel, self.lifecycle.transition)
        self._decide(RollBackModel, self.lifecycle.roll_back)
        self._decide(MoveAlias, self.lifecycle.move_alias)
        self._decide(SetModelPolicy, self.lifecycle.set_policy)
        self._decide(DeleteModel, self.lifecycle.delete)
        self._bus.serve(ImportModels, self._import, owner=OWNER)
        self._answer(ShowModel, self._show)
        self._answer(ListModelVersions, lambda request, call: self.questions.versions(request))
        self._answer(ReadModelJournal, self._read_journal)
        self._answer(FindServed, lambda request, call: self.questions.served(request))
        self._answer(ListValidations, self._list_validations)
        self._answer(CompareModels, lambda request, call: self.questions.compare(request))
        self._bus.serve(ListModels, self._list, owner=OWNER)
        self._bus.serve(FindModels, self._find, owner=OWNER)
        self._bus.serve(FindBestModel, self._best, owner=OWNER)
        self._bus.on(CanaryMeasured, self._judge, name=JUDGE, durable=True)

    def _decide(
        self,
        kind: type[Request[Any]],
        decide: Callable[[Any, Any, float], Decision[Any]],
        model_id_of: Callable[[Any], str] = lambda request: request.model_id,
    ) -> None:
        """Serve requests that change one model."""

        def handle(request: Any, call: Call) -> Decision[Any]:
            require_access(call.principal, kind.needs, model_id_of(request))
            return decide(request, call.principal, self._clock.wall())

        self._bus.serve(kind, handle, owner=OWNER)

    def _answer(self, kind: type[Request[Any]], answer: Callable[[Any, Call], Any]) -> None:
        """Serve questions about one model."""

        def handle(request: Any, call: Call) -> Any:
            require_access(call.principal, kind.needs, request.model_id)
            return answer(request, call)

        self._bus.serve(kind, handle, owner=OWNER)

    async def load(self, store: Store) -> None:
        """Become what the store holds."""
        heads, records = await read_all(store, HEADS), await read_all(store, RECORDS)
        moves, deleted = await read_all(store, MOVES), await read_all(store, DELETED)
        self.state.load(_values(heads), _values(records), _by_key(moves), _by_key(deleted))

    def _import(self, request: ImportModels, call: Call) -> Decision[ImportedModels]:
        for one in request.versions:
            require_access(call.principal, request.needs, one.metadata.model_id)
        decisions = self.registration.import_models(request, call.principal, self._clock.wall())
        # The last one carries the reply.
        for decision in decisions[:-1]:
            self._bus.ledger.append(decision, cause=call.cause, origin=call.origin)
        return decisions[-1]

    # Questions.

    def _show(self, request: ShowModel, call: Call) -> ModelView | Awaitable[ModelView]:
        model = self.state.model(request.model_id)
        record = model.resolve(request.ref)

        async def read() -> ModelView:
            details = await self._stored.details(model, record)
            return self.questions.view(model, record, details, self._clock.wall())

        # Most versions are shown without a look into the store.
        return read() if record.details_bytes else self.questions.view(model, record, NO_DETAILS, self._clock.wall())

    @property
    def _stored(self) -> StoredJournal:
        return StoredJournal(self._bus.ledger)

    def _read_journal(self, request: ReadModelJournal, call: Call) -> Awaitable[Any]:
        return self._stored.page(self.state.model(request.model_id), request)

    def _list_validations(self, request: ListValidations, call: Call) -> Awaitable[list[RecordedValidation]]:
        model = self.state.model(request.model_id)
        return self._stored.validations(model, model.record(request.version).version)

    def _list(self, request: ListModels, call: Call) -> ModelPage:
        return self.questions.models(request, call.principal)

    def _find(self, request: FindModels, call: Call) -> VersionPage | Awaitable[VersionPage]:
        # One more than the page has, so that it is known whether there are more; most searches find them at once.
        wanted = min(max(request.limit, 1), PAGE_ENTRIES_MAX) + 1
        found, position = self.questions.find(request, call.principal, parsed_key(request.after), wanted)
        if position is None or len(found) == wanted:
            return VersionPage(*take_page(iter(found), request.limit))

        async def search() -> VersionPage:
            after: Key | None = position
            while after is not None and len(found) < wanted:
                await anyio.lowlevel.checkpoint()
                more, after = self.questions.find(request, call.principal, after, LOOKED_AT_MAX)
                found.extend(more)
            return VersionPage(*take_page(iter(found), request.limit))

        return search()

    def _best(self, request: FindBestModel, call: Call) -> BestVersion | Awaitable[BestVersion]:
        if request.model_id:
            require_access(call.principal, request.needs, request.model_id)
        ranking = self.questions.ranking(request, call.principal)
        found = self.questions.best(request, ranking[:LOOKED_AT_MAX])
        if found is not None or len(ranking) <= LOOKED_AT_MAX:
            return found or no_best(ranking)
        left = ranking[LOOKED_AT_MAX:]

        async def search() -> BestVersion:
            for start in range(0, len(left), LOOKED_AT_MAX):
                await anyio.lowlevel.checkpoint()
                found = self.questions.best(request, left[start : start + LOOKED_AT_MAX])
                if found is not None:
                    return found
            return no_best(left)

        return search()

    # Canaries.

    async def _judge(self, record: Record) -> Decision[None] | None:
        """Roll a bad canary back, or advise it. Repeated after a crash: what was done once is not done again."""
        fact = record.fact
        if not isinstance(fact, CanaryMeasured):
            return None
        wanted = self.lifecycle.to_roll_back(fact)
        if wanted is None:
            return self.lifecycle.advice(fact, DAEMON, self._clock.wall())
        try:
            await self._bus.ask(wanted, Call(DAEMON, JUDGE, cause=record.id))
        except RequestRefused as error:
            self._log.warning("a canary was not rolled back", model=fact.model_id, reason=error.message)
        return None


def _values(entries: Sequence[Entry]) -> Sequence[bytes]:
    return [entry.value for entry in entries]


def _by_key(entries: Sequence[Entry]) -> dict[str, bytes]:
    return {entry.key: entry.value for entry in entries}
