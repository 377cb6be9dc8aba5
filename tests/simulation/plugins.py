"""Plugins of every temper, and somebody outside to whom facts are brought.

Law: at any moment a plugin may do what a bad plugin can: raise, dawdle, hang, go on although it was cancelled, say too
much. Every draw comes from the world's seed. From the moment that the cast is `calm` all of them behave, and so does
the receiver.
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
from tests.simulation.links import Range
from tests.simulation.plugin_oracle import Lifetime, PluginOracle, Receiver

STORM_TRIES = 12
STORM_FACTS = 16
DEADLINE_S: Range = (1.0, 5.0)
STUBBORN_S: Range = (0.5, 8.0)
SWALLOWED_MAX = 20
HUGE = 100_000


class Announced(Fact, frozen=True):
    """The herald says something."""

    text: str
    more: Any = None


class Life:
    """One daemon, as its plugins know it. When it is dead, what its plugins still do reaches nobody."""

    def __init__(self, daemon: Daemon, seen: Lifetime) -> None:
        self.daemon = daemon
        self.seen = seen
        self.alive = True

    @property
    def durable(self) -> int:
        """What the store holds by now."""
        return self.daemon.store.revision


class Cast:
    """The plugins of one world."""

    def __init__(self, random: Random, oracle: PluginOracle, note: Callable[[str], None]) -> None:
        self.calm = False
        self._random = random
        self._oracle = oracle
        self._note = note
        self._announced = 0
        self._receives = self._take
        everyone = {
            "courier": self._courier,
            "gate": self._gate,
            "herald": self._herald,
            "stranger": self._stranger,
            "watcher": self._watcher,
        }
        self._plugins = {name: plugin for name, plugin in everyone.items() if random.random() < 0.5}
        self._gate_required = random.random() < 0.5
        if "courier" in self._plugins:
            oracle.receivers |= {
                "all": Receiver(),
                "notes": Receiver(types=frozenset({"NoteAdded"}), jobs=frozenset({"job0", "job1"})),
                "rare": Receiver(types=frozenset({"JobCreated"})),
            }

    @property
    def names(self) -> list[str]:
        """Who is there."""
        return list(self._plugins)

    def sources(self, life: Callable[[], Life]) -> list[PluginSource]:
        """The plugins for one daemon; `life` is asked when they are loaded."""
        return [PluginSource(name, "the simulation", partial(self._module, name, life)) for name in self._plugins]

    def limits(self) -> PluginLimits:
        """Some limits or other."""
        return PluginLimits(
            failures_max=self._random.choice((1, 2, 5)), facts_per_s_max=self._random.choice((1.0, 5.0, 20.0))
        )

    def check_taken_in(self, daemon: Daemon) -> None:
        """A daemon that runs has taken in all but those that cannot be."""
        refused = [plugin.name for plugin in daemon.plugins.refused]
        self._oracle.taken_in(refused, [name for name in self._plugins if name == "stranger"])

    def all_active(self, daemon: Daemon) -> bool:
        """Whether everybody who can takes part, and nothing is left for the followers to do."""
        plugins = daemon.plugins.plugins.values()
        delivered = all(follower.idle for follower in daemon.bus.followers.values())
        return delivered and all(plugin.active for plugin in plugins if plugin.name != "stranger")

    def change_the_receiver(self) -> None:
        """From now on it takes what it is brought in another way."""
        self._receives = self._random.choice((self._take, self._take, self._be_down, self._be_slow, self._break_off))

    def behave(self) -> None:
        """Do no more harm."""
        self.calm = True
        self._receives = self._take

    def _module(self, name: str, life: Callable[[], Life]) -> ModuleType:
        module = ModuleType(name)
        plugin = partial(self._plugins[name], life())
        module.__dict__.update(API_VERSION=API_VERSION, register=plugin)
        return module

    def _called(self, life: Life, plugin: str, part: str) -> None:
        """Every call of a plugin begins here."""
        if life.alive:
            self._oracle.called(plugin, part, life.daemon.plugins.plugins[plugin].state)

    async def _whim(self) -> None:
        """Nothing most of the time, or what no plugin should do."""
        if self.calm or self._random.random() < 0.85:
            return
        whims: Sequence[Callable[[], Awaitable[None]]] = (self._dawdle, self._raise, anyio.sleep_forever, self._go_on)
        await self._random.choice(whims)()

    async def _dawdle(self) -> None:
        await anyio.sleep(self._random.uniform(0, 1.5))

    async def _raise(self) -> None:
        raise self._random.choice((RuntimeError("a whim"), SystemExit(1), Unavailable("whim", "a whim", "")))

    async def _go_on(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self._random.uniform(*STUBBORN_S))

    # The courier follows, and brings facts to somebody outside.

    def _courier(self, life: Life, context: PluginContext) -> None:
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

    async def _deliver(self, life: Life, name: str, records: Sequence[Record]) -> None:
        self._called(life, "courier", name)
        await self._receives(life, name, records)

    def _deliver_gap(self, life: Life, name: str, gap: Gap) -> None:
        self._called(life, "courier", name)
        if life.alive:
            self._note(f"{name} misses {gap.first} to {gap.last}")
            self._oracle.misses(name, gap)
        if not self.calm and self._random.random() < 0.5:
            raise RuntimeError("what a gap")

    async def _take(self, life: Life, name: str, records: Sequence[Record]) -> None:
        if life.alive:
            self._note(f"{name} is brought {records[0].id} to {records[-1].id}")
            self._oracle.delivered(name, records, life.durable)

    async def _be_down(self, life: Life, name: str, records: Sequence[Record]) -> None:
        raise Unavailable("receiver_down", "nobody is there", "")

    async def _be_slow(self, life: Life, name: str, records: Sequence[Record]) -> None:
        await anyio.sleep(self._random.uniform(0, 3.0))
        await self._take(life, name, records)
        await anyio.sleep(self._random.uniform(0, 3.0))

    async def _break_off(self, life: Life, name: str, records: Sequence[Record]) -> None:
        taken = records[: self._random.randint(0, len(records))]
        if taken:
            await self._take(life, name, taken)
        await self._random.choice((self._go_on, self._dawdle, anyio.sleep_forever))()
        await self._raise()

    # The watcher observes.

    def _watcher(self, life: Life, context: PluginContext) -> None:
        context.on(
            Fact,
            partial(self._watch, life),
            name="watch",
            deadline_s=self._random.uniform(*DEADLINE_S),
            mailbox_max=self._random.choice((5, 1000)),
            on_gap=partial(self._watch_gap, life),
        )

    async def _watch(self, life: Life, record: Record) -> None:
        self._called(life, "watcher", "watch")
        if life.alive:
            self._oracle.observed("the watcher", life.seen, record, life.durable)
        if not self.calm and self._random.random() < 0.01:
            await self._swallow_cancellations(life)
        await self._whim()

    async def _swallow_cancellations(self, life: Life) -> None:
        for _ in range(self._random.randint(1, SWALLOWED_MAX)):
            try:
                # Not for ever: one that was given up is not cancelled any more.
                await anyio.sleep(self._random.uniform(*STUBBORN_S))
            except anyio.get_cancelled_exc_class():
                if not life.alive:
                    raise

    def _watch_gap(self, life: Life, gap: Gap) -> None:
        self._called(life, "watcher", "watch")
        if life.alive:
            life.seen.watched.gaps.append(gap)
        if not self.calm and self._random.random() < 0.2:
            raise RuntimeError("what a gap")

    # The gate stands before requests.

    def _gate(self, life: Life, context: PluginContext) -> None:
        deadline_s = self._random.uniform(*DEADLINE_S)
        context.wrap(AddNote, partial(self._let_pass, life), required=self._gate_required, deadline_s=deadline_s)
        context.wrap(ShowJob, partial(self._let_pass, life), deadline_s=deadline_s)

    async def _let_pass(self, life: Life, request: Any, call: Call, proceed: Proceed) -> Any:
        self._called(life, "gate", type(request).__name__)
        await self._whim()
        if not self.calm and self._random.random() < 0.03:
            raise RequestRefused("gate_closed", "the gate is closed", "")
        reply = await proceed(request)
        await self._whim()
        return reply

    # The herald says things of its own.

    def _herald(self, life: Life, context: PluginContext) -> None:
        interval_s = self._random.uniform(1.0, 5.0)
        context.on(
            NoteAdded, partial(self._echo, life, context), name="echo", deadline_s=self._random.uniform(2.0, 5.0)
        )
        context.every(interval_s, partial(self._chatter, life, context), name="chatter", deadline_s=5.0)
        context.command("recite", partial(self._recite, life), help="say something")

    async def _echo(self, life: Life, context: PluginContext, record: Record) -> None:
        self._called(life, "herald", "echo")
        if self._random.random() < 0.3:
            try:
                await self._announce(life, context, record.job, record.id)
            except Unavailable as error:
                self._note(f"the herald was told {error.code}")

    async def _recite(self, life: Life, arguments: dict[str, Any]) -> str:
        self._called(life, "herald", "recite")
        await self._whim()
        return "said"

    async def _chatter(self, life: Life, context: PluginContext) -> None:
        self._called(life, "herald", "chatter")
        if self.calm or not life.alive:
            return
        self._oracle.began(life.seen, "chatter")
        try:
            deeds = (self._storm, self._say_what_cannot_be_said, self._ask, self._say)
            await self._random.choice(deeds)(life, context)
            await self._whim()
        finally:
            life.seen.doing.discard("chatter")

    async def _say(self, life: Life, context: PluginContext) -> None:
        await self._announce(life, context, "", 0)

    async def _announce(self, life: Life, context: PluginContext, job: str, cause: int) -> None:
        self._announced += 1
        text = f"announcement {self._announced}"
        await context.publish(Announced(text), job=job, cause=cause)
        if life.alive:
            self._note(f"the herald said {text}")
            self._oracle.published.add(text)

    async def _storm(self, life: Life, context: PluginContext) -> None:
        for _ in range(STORM_TRIES):
            self._announced += STORM_FACTS
            facts = [Announced(f"announcement {self._announced - index}") for index in range(STORM_FACTS)]
            try:
                await context.publish(*facts)
            except ForgedError as error:
                self._note(f"the storm is told {error.code}")

    async def _say_what_cannot_be_said(self, life: Life, context: PluginContext) -> None:
        fact = self._random.choice(
            (NoteAdded("forged"), Announced("unfit", object()), Announced("huge", b"x" * HUGE), Announced("effect"))
        )
        cause = 1 << 40 if fact.text == "effect" else 0
        await context.publish(fact, cause=cause)

    async def _ask(self, life: Life, context: PluginContext) -> None:
        job = await context.ask(ShowJob("job0"), timeout_s=5.0)
        self._note(f"the herald is told of {job.name} at {job.version}")

    # The stranger cannot be taken in.

    def _stranger(self, life: Life, context: PluginContext) -> None:
        context.on(Fact, partial(self._trespass, life), name="trespass")
        context.every(1.0, partial(self._trespass, life, None), name="prowl")
        if self._random.random() < 0.5:
            raise RuntimeError("no registration today")
        context.serve(AddNote, lambda *_: None)

    def _trespass(self, life: Life, record: Record | None) -> None:
        self._called(life, "stranger", "trespass")
