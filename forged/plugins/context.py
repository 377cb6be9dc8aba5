"""What a plugin is given to register with, and to work with later.

Law: registering changes nothing. What a plugin asks for is collected, and taken in as a whole or refused as a whole
when `register` has returned. Later on everything a plugin does passes through here and has a limit.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import iscoroutinefunction
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from forged.auth.model import Role
from forged.clock import Clock
from forged.errors import ConfigError, Problem
from forged.kernel.messages import FACTS, Fact, Gap, Record, Request, Signal
from forged.log import Log
from forged.plugins.model import NAME

if TYPE_CHECKING:
    # Only their shapes are needed here, and clients that import this package do without the bus.
    from forged.kernel.bus.follower import Follower, TellGap
    from forged.kernel.bus.requests import RequestHandler, Wrapper
    from forged.kernel.bus.signals import SignalHandler

R = TypeVar("R")
S = TypeVar("S", bound=msgspec.Struct)

DEADLINE_S = 5.0
"""How long a plugin may take over one message."""
DELIVERY_DEADLINE_S = 60.0
MAILBOX_MAX = 10_000
INTERVAL_MIN_S = 0.01
PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""What parts are called: the positions of those that follow are stored under their names."""

Observer = Callable[[Record], Awaitable[None] | None]
Delivery = Callable[[Sequence[Record]], Awaitable[None] | None]
Action = Callable[[], Awaitable[None] | None]
CommandAction = Callable[[dict[str, Any]], Any]
OnGap = Callable[[Gap], None]
FactTypes = type[Fact] | str | Iterable[type[Fact] | str]


class Feed:
    """How far a `follow` has come, for who wants to show it."""

    def __init__(self) -> None:
        self._follower: Follower | None = None

    def attach(self, follower: Follower) -> None:
        """Show this one."""
        self._follower = follower

    @property
    def position(self) -> int:
        """The id up to which everything was delivered, or was not asked for."""
        return 0 if self._follower is None else self._follower.position

    @property
    def behind(self) -> int:
        """How many facts come behind that, those that were not asked for included."""
        return 0 if self._follower is None else self._follower.behind

    @property
    def waiting_for(self) -> str | None:
        """Why what is next could not be delivered; None while all is well."""
        return None if self._follower is None else self._follower.waiting_for

    @property
    def again_at(self) -> float | None:
        """When it is tried again, by the monotonic clock; None where nothing failed."""
        return None if self._follower is None else self._follower.retry_at


@dataclass(frozen=True, slots=True)
class Observing:
    name: str
    types: frozenset[type[Fact]]
    handler: Observer
    deadline_s: float
    mailbox_max: int
    on_gap: OnGap | None


@dataclass(frozen=True, slots=True)
class Delivering:
    name: str
    types: frozenset[type[Fact]]
    names: frozenset[str]
    """What of these is wanted, where that cannot be said by types; empty for all."""
    jobs: frozenset[str]
    deliver: Delivery
    deadline_s: float
    batch_max: int
    on_gap: TellGap | None
    feed: Feed


@dataclass(frozen=True, slots=True)
class Listening:
    name: str
    signal: type[Signal]
    handler: SignalHandler
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Serving:
    request: type[Request[Any]]
    handler: RequestHandler
    replaces: bool
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Wrapping:
    request: type[Request[Any]]
    wrapper: Wrapper
    required: bool
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Recurring:
    name: str
    interval_s: float
    action: Action
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    action: CommandAction
    help: str
    needs: Role


@dataclass(slots=True)
class Registration:
    """All that a plugin has asked for."""

    observing: list[Observing] = field(default_factory=list)
    delivering: list[Delivering] = field(default_factory=list)
    listening: list[Listening] = field(default_factory=list)
    serving: list[Serving] = field(default_factory=list)
    wrapping: list[Wrapping] = field(default_factory=list)
    recurring: list[Recurring] = field(default_factory=list)
    commands: dict[str, Command] = field(default_factory=dict)
    stopping: list[Action] = field(default_factory=list)


class Host(Protocol):
    """What the context needs of the daemon, on behalf of one plugin."""

    @property
    def history(self) -> str: ...

    async def publish(self, plugin: str, facts: Sequence[Fact], job: str, cause: int) -> None: ...

    async def ask(self, plugin: str, request: Request[R], timeout_s: float | None, cause: int) -> R: ...


class PluginContext:
    """The daemon, as far as a plugin has to do with it."""

    def __init__(
        self, name: str, config: Mapping[str, Any], directory: Path, host: Host, clock: Clock, log: Log
    ) -> None:
        self.name = name
        self.config = config
        """The plugin's table in the daemon's settings, as it was written; see `settings`."""
        self.clock = clock
        self.log = log
        self.registration = Registration()
        self._directory = directory
        self._host = host
        self._names: set[str] = set()
        self._registered = False

    def settings(self, kind: type[S]) -> S:
        """The plugin's table in the daemon's settings as a struct, or `ConfigError` with all that is wrong in it."""
        problems: list[Problem] = []
        known = {one.name: one for one in msgspec.structs.fields(kind)}
        values: dict[str, Any] = {}
        for key, value in self.config.items():
            if key not in known:
                nearest = get_close_matches(key, known, 1)
                problems.append(Problem.unknown(self._key(key), value, known, nearest[0] if nearest else None))
                continue
            try:
                values[key] = msgspec.convert(value, known[key].type)
            except msgspec.ValidationError as error:
                problems.append(Problem(self._key(key), value, text=f"{self._key(key)}: {error}"))
        for key, one in known.items():
            if one.required and key not in self.config:
                problems.append(Problem(self._key(key), None, text=f"{self._key(key)} must be set; it has no default"))
        if problems:
            raise ConfigError("plugin_settings_invalid", f"the settings of {self.name} are not valid", "", problems)
        return kind(**values)

    @property
    def history(self) -> str:
        """Which history the ids of facts belong to: another one after a backup was restored. Known once registered."""
        return self._host.history if self._registered else ""

    def directory(self) -> Path:
        """A directory for what the plugin wants to keep, made when it is first asked for."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._directory

    # While registering.

    def on(
        self,
        types: type[Fact] | Iterable[type[Fact]],
        handler: Observer,
        *,
        name: str = "",
        deadline_s: float = DEADLINE_S,
        mailbox_max: int = MAILBOX_MAX,
        on_gap: OnGap | None = None,
    ) -> None:
        """Observe facts of these types (`Fact` for all) as they come; who falls far behind misses the oldest."""
        if mailbox_max < 1:
            raise ValueError(f"mailbox_max is {mailbox_max}; it is at least 1")
        if iscoroutinefunction(on_gap):
            raise TypeError("on_gap is to be a plain function")
        _check_deadline(deadline_s)
        observing = Observing(self._part(name, handler), _facts(types), handler, deadline_s, mailbox_max, on_gap)
        self.registration.observing.append(observing)

    def follow(
        self,
        types: FactTypes,
        deliver: Delivery,
        *,
        jobs: Iterable[str] = (),
        name: str = "",
        batch_max: int = 100,
        deadline_s: float = DELIVERY_DEADLINE_S,
        on_gap: TellGap | None = None,
    ) -> Feed:
        """Have facts delivered in batches, each at least once, over restarts too.

        `deliver` is called again from the same fact on, after a pause, until it returns. It raises `Unavailable` where
        that is the world's fault, which is no failure of the plugin's. The same holds for `on_gap`, which is called
        where the journal has forgotten what comes next. The position is kept under the name. Types may be given by
        name: a settings file says it so, and facts of plugins that are loaded later have no class yet.
        """
        if batch_max < 1:
            raise ValueError(f"batch_max is {batch_max}; it is at least 1")
        if isinstance(jobs, str):
            raise TypeError(f"jobs is {jobs!r}; it is a list of names")
        _check_deadline(deadline_s)
        classes, names = self._named(types)
        part, feed = self._part(name, deliver), Feed()
        self.registration.delivering.append(
            Delivering(part, classes, names, frozenset(jobs), deliver, deadline_s, batch_max, on_gap, feed)
        )
        return feed

    def on_signal(
        self, signal: type[Signal], handler: SignalHandler, *, name: str = "", deadline_s: float = DEADLINE_S
    ) -> None:
        """See the latest signals of a type."""
        _check_type(signal, Signal)
        _check_deadline(deadline_s)
        self.registration.listening.append(Listening(self._part(name, handler), signal, handler, deadline_s))

    def serve(self, request: type[Request[Any]], handler: RequestHandler, *, deadline_s: float = DEADLINE_S) -> None:
        """Answer a type of request of the plugin's own."""
        self._serve(Serving(request, handler, replaces=False, deadline_s=deadline_s))

    def replace(self, request: type[Request[Any]], handler: RequestHandler, *, deadline_s: float = DEADLINE_S) -> None:
        """Answer a type of request in the place of the daemon's handler, which does again if the plugin is left out."""
        self._serve(Serving(request, handler, replaces=True, deadline_s=deadline_s))

    def wrap(
        self, request: type[Request[Any]], wrapper: Wrapper, *, required: bool = False, deadline_s: float = DEADLINE_S
    ) -> None:
        """Run around a handler: `await proceed(request)` has it done. `deadline_s` is for the wrapper's own part.

        Where the plugin is left out, requests go past the wrapper; where it is `required` they are not done then.
        """
        self._open()
        _check_type(request, Request)
        _check_callable(wrapper)
        _check_deadline(deadline_s)
        self.registration.wrapping.append(Wrapping(request, wrapper, required, deadline_s))

    def every(
        self, interval_s: float, action: Action, *, name: str = "", deadline_s: float = DELIVERY_DEADLINE_S
    ) -> None:
        """Do something again and again, with that long a rest in between."""
        if not INTERVAL_MIN_S <= interval_s < inf:
            raise ValueError(f"interval_s is {interval_s}; it is at least {INTERVAL_MIN_S}, and finite")
        _check_deadline(deadline_s)
        self.registration.recurring.append(Recurring(self._part(name, action), interval_s, action, deadline_s))

    def command(self, name: str, action: CommandAction, *, help: str = "", needs: Role = Role.OPERATOR) -> None:  # noqa: A002
        """Do something for `forgectl plugins run PLUGIN NAME KEY=VALUE...`; what it returns is shown."""
        self._open()
        _check_callable(action)
        if not (isinstance(help, str) and help.isprintable()):
            raise ValueError(f"the help for {name} is {help!r}; it is one line of text")
        if not isinstance(needs, Role):
            raise TypeError(f"needs is {needs!r}; it is a Role")
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a command: {NAME.pattern}")
        if name in self.registration.commands:
            raise ValueError(f"there is a command {name} already")
        self.registration.commands[name] = Command(name, action, help, needs)

    def on_stop(self, action: Action) -> None:
        """Do something before the daemon ends, in a second or two; also where the plugin takes no part any more."""
        self._open()
        _check_callable(action)
        self.registration.stopping.append(action)

    def close(self) -> None:
        """Nothing can be registered any more."""
        self._registered = True

    # Later on.

    async def publish(self, *facts: Fact, job: str = "", cause: int = 0) -> None:
        """Put facts of the plugin's own types on record; done when they are durable. `cause` is a fact's id."""
        await self._host.publish(self.name, facts, job, cause)

    async def ask(self, request: Request[R], *, timeout_s: float | None = None, cause: int = 0) -> R:
        """Have a request done by the daemon, with the rights of an operator; `cause` is the id of a fact."""
        return await self._host.ask(self.name, request, timeout_s, cause)

    def _named(self, types: FactTypes) -> tuple[frozenset[type[Fact]], frozenset[str]]:
        """The classes of facts that are asked for; or all, and the names of those that are."""
        asked = [types] if isinstance(types, (type, str)) else list(types)
        unknown = {one for one in asked if isinstance(one, str) and one not in FACTS}
        known = [FACTS[one] if isinstance(one, str) else one for one in asked if one not in unknown]
        if not unknown:
            return _facts(known), frozenset()
        self.log.warning("no fact types of these names", names=sorted(unknown))
        classes = _facts(known) if known else frozenset()
        names = frozenset([*unknown, *(one.__name__ for one in classes)])
        return frozenset({Fact}), frozenset() if Fact in classes else names

    def _serve(self, serving: Serving) -> None:
        self._open()
        _check_type(serving.request, Request)
        _check_callable(serving.handler)
        _check_deadline(serving.deadline_s)
        # Raises where it does not say what it answers, which whoever asks over the network has to know.
        serving.request.reply_type()
        self.registration.serving.append(serving)

    def _part(self, name: str, function: Callable[..., Any]) -> str:
        """A name of a part, unique in the plugin: the function's where none is given."""
        self._open()
        _check_callable(function)
        name = name or getattr(function, "__name__", "").strip("_")
        if not PART.fullmatch(name):
            raise ValueError(f"{function!r} needs a name: name=..., {PART.pattern}")
        if name in self._names:
            raise ValueError(f"{self.name} has a part named {name} already; give one of them another: name=...")
        self._names.add(name)
        return name

    def _open(self) -> None:
        if self._registered:
            raise RuntimeError(f"{self.name} may register only while it is asked to")

    def _key(self, key: str) -> str:
        return f"plugins.{self.name}.{key}"


def _facts(types: type[Fact] | Iterable[type[Fact]]) -> frozenset[type[Fact]]:
    wanted = frozenset([types] if isinstance(types, type) else types)
    strange = [one for one in wanted if not (isinstance(one, type) and issubclass(one, Fact))]
    if strange or not wanted:
        raise TypeError(f"types are classes of facts, at least one (Fact means all): not {strange or types}")
    return wanted


def _check_type(kind: object, base: type[Any]) -> None:
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise TypeError(f"{kind!r} is no class of {base.__name__.lower()}s")


def _check_callable(function: object) -> None:
    if not callable(function):
        raise TypeError(f"{function!r} cannot be called")


def _check_deadline(deadline_s: float) -> None:
    if not 0.0 < deadline_s < inf:
        raise ValueError(f"deadline_s is {deadline_s}; it is more than 0, and finite")
