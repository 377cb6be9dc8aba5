"""Misbehaving plugins, and the external receiver of a follower's facts.

At any moment a plugin may raise, be slow, hang, ignore cancellation or publish too much; every draw comes from the
seed. After `behave` all plugins and the receiver are correct.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random
from types import ModuleType
from typing import Any

import anyio

from forged.daemon import Daemon
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.jobs.model import AddNote, JobCreated, NoteAdded, ShowJob
from forged.kernel.bus.requests import Proceed
from forged.kernel.messages import Call, Fact, Gap, Record
from forged.plugins.context import PluginContext
from forged.plugins.host.plugin import PluginLimits
from forged.plugins.host.plugin_host import PluginSource
from forged.plugins.model import API_VERSION
from tests.simulation.daemon.plugin_oracle import Lifetime, PluginOracle, Receiver
from tests.simulation.environment.links import Range

STORM_TRIES = 12
STORM_FACTS = 16
DEADLINE_S: Range = (1.0, 5.0)
STUBBORN_S: Range = (0.5, 8.0)
SWALLOWED_MAX = 20
HUGE = 100_000


class Announced(Fact, frozen=True):
    """A fact that the plugin `publisher` publishes."""

    text: str
    more: Any = None


class DaemonRun:
    """One daemon run as its plugins see it; after its end their actions are ignored."""

    def __init__(self, daemon: Daemon, seen: Lifetime) -> None:
        self.daemon = daemon
        self.seen = seen
        self.alive = True

    @property
    def durable(self) -> int:
        """The store's revision."""
        return self.daemon.store.revision


class PluginSet:
    """The plugins of one seed."""

    def __init__(self, random: Random, oracle: PluginOracle, note: Callable[[str], None]) -> None:
        self.calm = False
        self._random = random
        self._oracle = oracle
        self._note = note
        self._announced = 0
        self._receives = self._take
        available = {
            "forwarder": self._forwarder,
            "gate": self._gate,
            "publisher": self._publisher,
            "incompatible": self._incompatible,
            "watcher": self._watcher,
        }
        self._plugins = {name: plugin for name, plugin in available.items() if random.random() < 0.5}
        self._gate_required = random.random() < 0.5
        if "forwarder" in self._plugins:
            oracle.receivers |= {
                "all": Receiver(),
                "notes": Receiver(types=frozenset({"NoteAdded"}), jobs=frozenset({"job0", "job1"})),
                "rare": Receiver(types=frozenset({"JobCreated"})),
            }

    @property
    def names(self) -> list[str]:
        """The names of the plugins."""
        return list(self._plugins)

    def sources(self, life: Callable[[], DaemonRun]) -> list[PluginSource]:
        """The plugins for one daemon; `life` is called when they are loaded."""
        return [PluginSource(name, "the simulation", partial(self._module, name, life)) for name in self._plugins]

    def limits(self) -> PluginLimits:
        """Random limits."""
        return PluginLimits(
            failures_max=self._random.choice((1, 2, 5)), facts_per_s_max=self._random.choice((1.0, 5.0, 20.0))
        )

    def check_taken_in(self, daemon: Daemon) -> None:
        """Check that all loadable plugins are loaded."""
        refused = [plugin.name for plugin in daemon.plugins.refused]
        self._oracle.taken_in(refused, [name for name in self._plugins if name == "incompatible"])

    def all_active(self, daemon: Daemon) -> bool:
        """Whether all loadable plugins are active and all followers idle."""
        plugins = daemon.plugins.plugins.values()
        delivered = all(follower.idle for follower in daemon.bus.followers.values())
        return delivered and all(plugin.active for plugin in plugins if plugin.name != "incompatible")

    def change_the_receiver(self) -> None:
        """Change the receiver's behaviour."""
        self._receives = self._random.choice((self._take, self._take, self._be_down, self._be_slow, self._break_off))

    def behave(self) -> None:
        """Stop all misbehaviour."""
        self.calm = True
        self._receives = self._take

    def _module(self, name: str, life: Callable[[], DaemonRun]) -> ModuleType:
        module = ModuleType(name)
        plugin = partial(self._plugins[name], life())
        module.__dict__.update(API_VERSION=API_VERSION, register=plugin)
        return module

    def _called(self, life: DaemonRun, plugin: str, part: str) -> None:
        """Report the call of a plugin's part to the oracle."""
        if life.alive:
            self._oracle.called(plugin, part, life.daemon.plugins.plugins[plugin].state)

    async def _misbehave(self) -> None:
        """Misbehave with a small probability."""
        if self.calm or self._random.random() < 0.85:
            return
        choices: Sequence[Callable[[], Awaitable[None]]] = (
            self._sleep,
            self._raise,
            anyio.sleep_forever,
            self._ignore_cancellation,
        )
        await self._random.choice(choices)()

    async def _sleep(self) -> None:
        await anyio.sleep(self._random.uniform(0, 1.5))

    async def _raise(self) -> None:
        raise self._random.choice((RuntimeError("bug"), SystemExit(1), Unavailable("misbehaviour", "not now", "")))

    async def _ignore_cancellation(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self._random.uniform(*STUBBORN_S))

    # The forwarder follows facts and delivers them to the receiver.

    def _forwarder(self, life: DaemonRun, context: PluginContext) -> None:
        for name, types, jobs in (("all", Fact, ()), ("notes", NoteAdded, ("job0", "job1")), ("rare", JobCreated, ())):
            context.follow(
                types,
                partial(self._deliver, life, name),
                name=name,
                jobs=jobs,
                batch_max=self._random.choice((1, 5, 100)),
                deadline_s=self._random.uniform(*DEADLINE_S),
                on_gap=partial(self._deliver_gap, life, name),
            )

    async def _deliver(self, life: DaemonRun, name: str, records: Sequence[Record]) -> None:
        self._called(life, "forwarder", name)
        await self._receives(life, name, records)

    def _deliver_gap(self, life: DaemonRun, name: str, gap: Gap) -> None:
        self._called(life, "forwarder", name)
        if life.alive:
            self._note(f"{name} gets the gap {gap.first} to {gap.last}")
            self._oracle.misses(name, gap)
        if not self.calm and self._random.random() < 0.5:
            raise RuntimeError("gap handler failed")

    async def _take(self, life: DaemonRun, name: str, records: Sequence[Record]) -> None:
        if life.alive:
            self._note(f"{name} gets {records[0].id} to {records[-1].id}")
            self._oracle.delivered(name, records, life.durable)

    async def _be_down(self, life: DaemonRun, name: str, records: Sequence[Record]) -> None:
        raise Unavailable("receiver_down", "the receiver is down", "")

    async def _be_slow(self, life: DaemonRun, name: str, records: Sequence[Record]) -> None:
        await anyio.sleep(self._random.uniform(0, 3.0))
        await self._take(life, name, records)
        await anyio.sleep(self._random.uniform(0, 3.0))

    async def _break_off(self, life: DaemonRun, name: str, records: Sequence[Record]) -> None:
        taken = records[: self._random.randint(0, len(records))]
        if taken:
            await self._take(life, name, taken)
        await self._random.choice((self._ignore_cancellation, self._sleep, anyio.sleep_forever))()
        await self._raise()

    # The watcher observes facts.

    def _watcher(self, life: DaemonRun, context: PluginContext) -> None:
        context.on(
            Fact,
            partial(self._watch, life),
            name="watch",
            deadline_s=self._random.uniform(*DEADLINE_S),
            mailbox_max=self._random.choice((5, 1000)),
            on_gap=partial(self._watch_gap, life),
        )

    async def _watch(self, life: DaemonRun, record: Record) -> None:
        self._called(life, "watcher", "watch")
        if life.alive:
            self._oracle.observed("the watcher", life.seen, record, life.durable)
        if not self.calm and self._random.random() < 0.01:
            await self._swallow_cancellations(life)
        await self._misbehave()

    async def _swallow_cancellations(self, life: DaemonRun) -> None:
        for _ in range(self._random.randint(1, SWALLOWED_MAX)):
            try:
                # Bounded: a stuck handler is not cancelled any more.
                await anyio.sleep(self._random.uniform(*STUBBORN_S))
            except anyio.get_cancelled_exc_class():
                if not life.alive:
                    raise

    def _watch_gap(self, life: DaemonRun, gap: Gap) -> None:
        self._called(life, "watcher", "watch")
        if life.alive:
            life.seen.watched.gaps.append(gap)
        if not self.calm and self._random.random() < 0.2:
            raise RuntimeError("gap handler failed")

    # The gate wraps requests.

    def _gate(self, life: DaemonRun, context: PluginContext) -> None:
        deadline_s = self._random.uniform(*DEADLINE_S)
        context.wrap(AddNote, partial(self._let_pass, life), required=self._gate_required, deadline_s=deadline_s)
        context.wrap(ShowJob, partial(self._let_pass, life), deadline_s=deadline_s)

    async def _let_pass(self, life: DaemonRun, request: Any, call: Call, proceed: Proceed) -> Any:
        self._called(life, "gate", type(request).__name__)
        await self._misbehave()
        if not self.calm and self._random.random() < 0.03:
            raise RequestRefused("gate_closed", "the gate is closed", "")
        reply = await proceed(request)
        await self._misbehave()
        return reply

    # The publisher publishes facts and serves a command.

    def _publisher(self, life: DaemonRun, context: PluginContext) -> None:
        interval_s = self._random.uniform(1.0, 5.0)
        context.on(
            NoteAdded, partial(self._echo, life, context), name="echo", deadline_s=self._random.uniform(2.0, 5.0)
        )
        context.every(interval_s, partial(self._repeat, life, context), name="repeat", deadline_s=5.0)
        context.command("tell", partial(self._tell, life), help="say something")

    async def _echo(self, life: DaemonRun, context: PluginContext, record: Record) -> None:
        self._called(life, "publisher", "echo")
        if self._random.random() < 0.3:
            try:
                await self._announce(life, context, record.job, record.id)
            except Unavailable as error:
                self._note(f"the publisher got error {error.code}")

    async def _tell(self, life: DaemonRun, arguments: dict[str, Any]) -> str:
        self._called(life, "publisher", "tell")
        await self._misbehave()
        return "said"

    async def _repeat(self, life: DaemonRun, context: PluginContext) -> None:
        self._called(life, "publisher", "repeat")
        if self.calm or not life.alive:
            return
        self._oracle.began(life.seen, "repeat")
        try:
            deeds = (self._publish_too_much, self._publish_invalid, self._ask, self._say)
            await self._random.choice(deeds)(life, context)
            await self._misbehave()
        finally:
            life.seen.doing.discard("repeat")

    async def _say(self, life: DaemonRun, context: PluginContext) -> None:
        await self._announce(life, context, "", 0)

    async def _announce(self, life: DaemonRun, context: PluginContext, job: str, cause: int) -> None:
        self._announced += 1
        text = f"announcement {self._announced}"
        await context.publish(Announced(text), job=job, cause=cause)
        if life.alive:
            self._note(f"the publisher published {text}")
            self._oracle.published.add(text)

    async def _publish_too_much(self, life: DaemonRun, context: PluginContext) -> None:
        for _ in range(STORM_TRIES):
            self._announced += STORM_FACTS
            facts = [Announced(f"announcement {self._announced - index}") for index in range(STORM_FACTS)]
            try:
                await context.publish(*facts)
            except ForgedError as error:
                self._note(f"publishing too much: {error.code}")

    async def _publish_invalid(self, life: DaemonRun, context: PluginContext) -> None:
        fact = self._random.choice(
            (NoteAdded("forged"), Announced("unfit", object()), Announced("huge", b"x" * HUGE), Announced("effect"))
        )
        cause = 1 << 40 if fact.text == "effect" else 0
        await context.publish(fact, cause=cause)

    async def _ask(self, life: DaemonRun, context: PluginContext) -> None:
        job = await context.ask(ShowJob("job0"), timeout_s=5.0)
        self._note(f"the publisher is told of {job.name} at {job.version}")

    # The incompatible plugin cannot be loaded.

    def _incompatible(self, life: DaemonRun, context: PluginContext) -> None:
        context.on(Fact, partial(self._run_refused, life), name="run")
        context.every(1.0, partial(self._run_refused, life, None), name="tick")
        if self._random.random() < 0.5:
            raise RuntimeError("registration failed")
        context.serve(AddNote, lambda *_: None)

    def _run_refused(self, life: DaemonRun, record: Record | None) -> None:
        self._called(life, "incompatible", "run")
