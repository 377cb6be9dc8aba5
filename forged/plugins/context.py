"""The API that a plugin receives.

Invariants:
- Registering only collects: the parts are installed as a whole, or refused as a whole, when `register` has returned.
- Everything that a plugin does afterwards passes through its context and is limited.
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
    # Types only, so that importing this package does not import the bus.
    from forged.kernel.bus.follower import Follower, TellGap
    from forged.kernel.bus.requests import RequestHandler, Wrapper
    from forged.kernel.bus.signals import SignalHandler

R = TypeVar("R")
S = TypeVar("S", bound=msgspec.Struct)

DEADLINE_S = 5.0
"""Seconds for one message."""
DELIVERY_DEADLINE_S = 60.0
MAILBOX_MAX = 10_000
INTERVAL_MIN_S = 0.01
PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""Names of parts; the position of a `follow` is stored under its name."""

Observer = Callable[[Record], Awaitable[None] | None]
Delivery = Callable[[Sequence[Record]], Awaitable[None] | None]
Action = Callable[[], Awaitable[None] | None]
CommandAction = Callable[[dict[str, Any]], Any]
OnGap = Callable[[Gap], None]
FactTypes = type[Fact] | str | Iterable[type[Fact] | str]


class Feed:
    """The progress of a `follow`."""

    def __init__(self) -> None:
        self._follower: Follower | None = None

    def attach(self, follower: Follower) -> None:
        self._follower = follower

    @property
    def position(self) -> int:
        """The id of the last fact that was delivered or skipped."""
        return 0 if self._follower is None else self._follower.position

    @property
    def behind(self) -> int:
        """The number of facts after `position`, of all types."""
        return 0 if self._follower is None else self._follower.behind

    @property
    def waiting_for(self) -> str | None:
        """Why the next delivery failed; None if it has not."""
        return None if self._follower is None else self._follower.waiting_for

    @property
    def again_at(self) -> float | None:
        """When the delivery is retried, by the monotonic clock; None if none failed."""
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
    """The type names to deliver, if some have no class yet; empty for all of `types`."""
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
class PluginRegistration:
    """The parts that a plugin has registered."""

    observing: list[Observing] = field(default_factory=list)
    delivering: list[Delivering] = field(default_factory=list)
    listening: list[Listening] = field(default_factory=list)
    serving: list[Serving] = field(default_factory=list)
    wrapping: list[Wrapping] = field(default_factory=list)
    recurring: list[Recurring] = field(default_factory=list)
    commands: dict[str, Command] = field(default_factory=dict)
    stopping: list[Action] = field(default_factory=list)


class Host(Protocol):
    """The port through which a context calls the daemon."""

    @property
    def history(self) -> str: ...

    async def publish(self, plugin: str, facts: Sequence[Fact], job: str, cause: int) -> None: ...

    async def ask(self, plugin: str, request: Request[R], timeout_s: float | None, cause: int) -> R: ...


class PluginContext:
    """What `register` receives: registration, settings, publishing and requests."""

    def __init__(
        self, name: str, config: Mapping[str, Any], directory: Path, host: Host, clock: Clock, log: Log
    ) -> None:
        self.name = name
        self.config = config
        """The plugin's table in the daemon's settings; see `settings`."""
        self.clock = clock
        self.log = log
        self.registration = PluginRegistration()
        self._directory = directory
        self._host = host
        self._names: set[str] = set()
        self._registered = False

    def settings(self, kind: type[S]) -> S:
        """The plugin's table in the daemon's settings as a struct, or `ConfigError` with all problems."""
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
        """The id of the history that fact ids belong to; a restored backup has another. Empty while registering."""
        return self._host.history if self._registered else ""

    def directory(self) -> Path:
        """The plugin's own directory, created at the first call."""
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
        """Observe facts of these types (`Fact` for all). A full mailbox drops its oldest facts and calls `on_gap`."""
        if mailbox_max < 1:
            raise ValueError(f"mailbox_max must be >= 1, got {mailbox_max}")
        if iscoroutinefunction(on_gap):
            raise TypeError("on_gap must be a plain function, not a coroutine function")
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
        """Deliver facts in batches, each at least once, also over restarts.

        Until `deliver` returns, it is called again with the same facts after a pause; raising `Unavailable` is not
        counted as a failure. The same holds for `on_gap`, which is called when the journal no longer has the next
        facts. The position is stored under the part's name. Types may be names, because facts of plugins that are
        loaded later have no class yet.
        """
        if batch_max < 1:
            raise ValueError(f"batch_max must be >= 1, got {batch_max}")
        if isinstance(jobs, str):
            raise TypeError(f"jobs must be a list of names, got {jobs!r}")
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
        """Receive the latest signals of a type."""
        _check_type(signal, Signal)
        _check_deadline(deadline_s)
        self.registration.listening.append(Listening(self._part(name, handler), signal, handler, deadline_s))

    def serve(self, request: type[Request[Any]], handler: RequestHandler, *, deadline_s: float = DEADLINE_S) -> None:
        """Serve a request type of the plugin."""
        self._serve(Serving(request, handler, replaces=False, deadline_s=deadline_s))

    def replace(self, request: type[Request[Any]], handler: RequestHandler, *, deadline_s: float = DEADLINE_S) -> None:
        """Replace the daemon's handler of a request type while the plugin is active."""
        self._serve(Serving(request, handler, replaces=True, deadline_s=deadline_s))

    def wrap(
        self, request: type[Request[Any]], wrapper: Wrapper, *, required: bool = False, deadline_s: float = DEADLINE_S
    ) -> None:
        """Wrap a handler: `await proceed(request)` calls it. `deadline_s` limits the wrapper's own time.

        While the plugin is inactive, requests bypass the wrapper; with `required` they are refused.
        """
        self._open()
        _check_type(request, Request)
        _check_callable(wrapper)
        _check_deadline(deadline_s)
        self.registration.wrapping.append(Wrapping(request, wrapper, required, deadline_s))

    def every(
        self, interval_s: float, action: Action, *, name: str = "", deadline_s: float = DELIVERY_DEADLINE_S
    ) -> None:
        """Call an action repeatedly, with `interval_s` between the calls."""
        if not INTERVAL_MIN_S <= interval_s < inf:
            raise ValueError(f"interval_s must be finite and >= {INTERVAL_MIN_S}, got {interval_s}")
        _check_deadline(deadline_s)
        self.registration.recurring.append(Recurring(self._part(name, action), interval_s, action, deadline_s))

    def command(self, name: str, action: CommandAction, *, help: str = "", needs: Role = Role.OPERATOR) -> None:  # noqa: A002
        """Add a command: `forgectl plugins run PLUGIN NAME KEY=VALUE...` prints what `action` returns."""
        self._open()
        _check_callable(action)
        if not (isinstance(help, str) and help.isprintable()):
            raise ValueError(f"the help of {name} must be one line of text, got {help!r}")
        if not isinstance(needs, Role):
            raise TypeError(f"needs must be a Role, got {needs!r}")
        if not NAME.fullmatch(name):
            raise ValueError(f"command name must match {NAME.pattern}, got {name!r}")
        if name in self.registration.commands:
            raise ValueError(f"the command {name} is registered already")
        self.registration.commands[name] = Command(name, action, help, needs)

    def on_stop(self, action: Action) -> None:
        """Call an action when the daemon stops, for two seconds at most, also if the plugin is inactive."""
        self._open()
        _check_callable(action)
        self.registration.stopping.append(action)

    def close(self) -> None:
        """End the registration."""
        self._registered = True

    # After registration.

    async def publish(self, *facts: Fact, job: str = "", cause: int = 0) -> None:
        """Publish facts of the plugin's own types; returns when they are durable. `cause` is the id of a fact."""
        await self._host.publish(self.name, facts, job, cause)

    async def ask(self, request: Request[R], *, timeout_s: float | None = None, cause: int = 0) -> R:
        """Make a request with operator rights; `cause` is the id of a fact."""
        return await self._host.ask(self.name, request, timeout_s, cause)

    def _named(self, types: FactTypes) -> tuple[frozenset[type[Fact]], frozenset[str]]:
        """The fact classes to follow; if some names are unknown, all classes and the names to filter by."""
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
        # Raises if the request declares no reply type, which remote callers need.
        serving.request.reply_type()
        self.registration.serving.append(serving)

    def _part(self, name: str, function: Callable[..., Any]) -> str:
        """The name of a part, by default the function's; unique in the plugin."""
        self._open()
        _check_callable(function)
        name = name or getattr(function, "__name__", "").strip("_")
        if not PART.fullmatch(name):
            raise ValueError(f"{function!r} needs a name: name=..., {PART.pattern}")
        if name in self._names:
            raise ValueError(f"{self.name} has two parts named {name}; pass name=... for one of them")
        self._names.add(name)
        return name

    def _open(self) -> None:
        if self._registered:
            raise RuntimeError(f"{self.name} may register parts only in register()")

    def _key(self, key: str) -> str:
        return f"plugins.{self.name}.{key}"


def _facts(types: type[Fact] | Iterable[type[Fact]]) -> frozenset[type[Fact]]:
    wanted = frozenset([types] if isinstance(types, type) else types)
    strange = [one for one in wanted if not (isinstance(one, type) and issubclass(one, Fact))]
    if strange or not wanted:
        raise TypeError(f"types must be one or more Fact classes (Fact for all), got {strange or types}")
    return wanted


def _check_type(kind: object, base: type[Any]) -> None:
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise TypeError(f"must be a {base.__name__} class, got {kind!r}")


def _check_callable(function: object) -> None:
    if not callable(function):
        raise TypeError(f"must be callable, got {function!r}")


def _check_deadline(deadline_s: float) -> None:
    if not 0.0 < deadline_s < inf:
        raise ValueError(f"deadline_s must be finite and > 0, got {deadline_s}")
