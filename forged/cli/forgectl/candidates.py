"""Candidates for the completion of a `forgectl` command line.

They follow from the parsers alone, so every command is completed without further code. The `metavar` of an argument
says which values it takes; values that the daemon knows are requested with a short timeout.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from forged.cli.catalog.ls import state
from forged.cli.catalog.names import LATEST, STEP, listed
from forged.cli.ckpt import candidates as offers
from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.commands import plugins, workers
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.parser import Options, Parser
from forged.cli.memory.devices import listed as devices
from forged.cli.models.names import SEPARATOR, summary, versions
from forged.cli.process import EXIT_OK
from forged.errors import ForgedError
from forged.plain_client.connection import PlainConnection

DAEMON_TIMEOUT_S = 0.3
PAGES_MAX = 4
JOBS_FROM_DAEMON_MAX = 64
"""Workers of at most this many jobs are offered if no job is named."""
RECENT_FACTS = 500
"""Fact types are taken from this many latest facts."""
FILES = frozenset({"FILE", "PATH", "TARGET"})

Candidate = tuple[str, str]
"""A word and its meaning. A word that ends with `=`, `/` or `@` can be continued."""
ValuesFromDaemon = Callable[[PlainConnection, Options, str], Iterable[Candidate]]


def print_candidates(parser: Parser, words: Sequence[str]) -> int:
    """Print the candidates for the last word, one per line with its meaning."""
    for text, meaning in candidates(parser, words[1:] if words[:1] == ["--"] else words):
        print(f"{text}\t{meaning}")
    return EXIT_OK


def candidates(parser: Parser, words: Sequence[str]) -> list[Candidate]:
    """The shell completions for the last word of a command line."""
    *finished, begun = words or [""]
    line = _Line(parser)
    for word in finished:
        line.take(word)
    return [one for one in line.next(begun) if one[0].startswith(begun) and "".join(one).isprintable()]


class _Line:
    """The finished words of a command line."""

    def __init__(self, parser: Parser) -> None:
        self._options = Options(socket=None, endpoint=None, token=None, timeout=DAEMON_TIMEOUT_S)
        self._waiting: argparse.Action | None = None
        """An option whose value is missing."""
        self._only_positionals = False
        self._enter(parser)

    def take(self, word: str) -> None:
        """Add a finished word."""
        if self._waiting is not None:
            self._store(self._waiting, word)
            self._waiting = None
        elif word == "--" and not self._only_positionals:
            self._only_positionals = True
        elif self._is_option(word):
            self._take_option(word)
        elif self._positionals:
            self._take_positional(word)

    def next(self, begun: str) -> Iterable[Candidate]:
        """The candidates for the next word, of which `begun` is already typed."""
        if self._waiting is not None:
            return self._values(self._waiting, begun)
        if self._is_option(begun):
            name, has_value, value = begun.partition("=")
            option = self._named.get(name)
            if has_value and option is not None:
                return ((f"{name}={text}", what) for text, what in self._values(option, value))
            return self._names()
        return self._values(self._positionals[0], begun) if self._positionals else ()

    def _enter(self, parser: Parser) -> None:
        actions = parser.whole()._actions
        self._positionals = [action for action in actions if not action.option_strings]
        self._named = {name: action for action in actions for name in action.option_strings}

    def _is_option(self, word: str) -> bool:
        return word.startswith("-") and not self._only_positionals

    def _take_option(self, word: str) -> None:
        name, has_value, value = word.partition("=")
        option = self._named.get(name)
        if option is None or option.nargs == 0:
            return
        if has_value:
            self._store(option, value)
        else:
            self._waiting = option

    def _take_positional(self, word: str) -> None:
        action = self._positionals[0]
        if isinstance(action, argparse._SubParsersAction):
            self._enter(action.choices.get(word) or Parser(add_help=False))
            return
        self._store(action, word)
        if action.nargs not in ("*", "+"):
            del self._positionals[0]

    def _store(self, action: argparse.Action, word: str) -> None:
        if action.dest != "timeout":
            setattr(self._options, action.dest, word)

    def _names(self) -> Iterator[Candidate]:
        for action in dict.fromkeys(self._named.values()):
            yield max(action.option_strings, key=len), action.help or ""

    def _values(self, action: argparse.Action, begun: str) -> Iterable[Candidate]:
        if isinstance(action, argparse._SubParsersAction):
            return ((one.dest, one.help or "") for one in action._choices_actions)
        if action.choices is not None:
            return ((f"{choice}", "") for choice in action.choices)
        if action.metavar in FILES:
            return _files(begun)
        kind = f"{action.metavar}"
        if kind == "WHERE" and getattr(self._options, "job", None):
            kind = "CHECKPOINT"
        if kind in _FROM_FILES:
            return ((text, "") for text in _FROM_FILES[kind](self._options, begun))
        source = _FROM_DAEMON.get(kind)
        return () if source is None else _from_daemon(source, self._options, begun)


def _from_daemon(source: ValuesFromDaemon, options: Options, begun: str) -> list[Candidate]:
    with contextlib.suppress(ForgedError), DaemonConnection(options) as daemon:
        return [(f"{text}", f"{what}") for text, what in source(daemon, options, begun) if text]
    return []


def _jobs(daemon: PlainConnection, options: Options, begun: str) -> Iterator[Candidate]:
    # All names that begin with `begun` sort after `begun` without its last character.
    jobs = answers.pages(daemon, "ListJobs", field="jobs", key="name", after=begun[:-1], pages_max=PAGES_MAX)
    return ((job.get("name", ""), "") for job in jobs)


def _workers(daemon: PlainConnection, options: Options, begun: str) -> Iterator[Candidate]:
    named = getattr(options, "job", None) or getattr(options, "jobs", None)
    jobs = [named] if named else [job for job, _ in _jobs(daemon, options, "")][:JOBS_FROM_DAEMON_MAX]
    found = workers.listed(daemon, jobs, after=begun[:-1])
    return ((one.get("id", ""), f"{one.get('job', '')}, {one.get('status', '')}") for one in found)


def _tokens(daemon: PlainConnection, options: Options, begun: str) -> Iterator[Candidate]:
    tokens = answers.pages(daemon, "ListTokens", field="tokens", key="token_id", pages_max=PAGES_MAX)
    alive = (token for token in tokens if not token.get("revoked_at"))
    return ((token.get("token_id", ""), token.get("name", "")) for token in alive)


def _handlers(daemon: PlainConnection, options: Options, begun: str) -> Iterator[Candidate]:
    handlers = answers.several(daemon, "ListHandlers", field="handlers", key="name")
    return ((one.get("name", ""), "") for one in handlers if one.get("quarantined"))


def _types(daemon: PlainConnection, options: Options, begun: str) -> Iterator[Candidate]:
    recent = daemon.facts(max(-1, daemon.latest - RECENT_FACTS), [], [], until=daemon.latest)
    types = {event.get("type", "") for _, event in recent if event}
    return ((one, "") for one in sorted(types))


def _plugins(daemon: PlainConnection, options: Options, begun: str) -> Iterator[Candidate]:
    return ((one.get("name", ""), one.get("state", "")) for one in plugins.listed(daemon))


def _commands(daemon: PlainConnection, options: Options, begun: str) -> Iterator[Candidate]:
    for plugin in plugins.listed(daemon):
        if plugin.get("name") == getattr(options, "plugin", None):
            yield from ((one.get("name", ""), one.get("help", "")) for one in plugins.commands_of(plugin))


def _catalogued(daemon: PlainConnection, options: Options, begun: str) -> Iterator[Candidate]:
    yield LATEST, "what the job would be restored from"
    listing = listed(daemon, options.job, pages_max=PAGES_MAX)
    for meta in answers.rows_in(listing, "checkpoints"):
        about = f"step {meta.get('step', '')}, {state(meta)}"
        yield f"{STEP}{meta.get('step', '')}" if begun.startswith(STEP) else meta.get("checkpoint_id", ""), about


def _models(daemon: PlainConnection, options: Options, begun: str) -> Iterator[Candidate]:
    models = answers.pages(daemon, "ListModels", field="models", key="model_id", after=begun[:-1], pages_max=PAGES_MAX)
    for one in models:
        yield one.get("model_id", ""), tables.counted(answers.count_in(one, "versions"), "version")


def _versions(daemon: PlainConnection, options: Options, begun: str) -> Iterator[Candidate]:
    model, separator, _ = begun.partition(SEPARATOR)
    if not separator:
        yield from ((f"{one}{SEPARATOR}", what) for one, what in _models(daemon, options, begun))
        return
    yield f"{model}{SEPARATOR}{LATEST}", "the highest version"
    aliases = answers.map_in(summary(daemon, model), "aliases")
    yield from ((f"{model}{SEPARATOR}{alias}", aliases[alias]) for alias in aliases)
    for metadata in versions(daemon, model, pages_max=PAGES_MAX)[0]:
        yield f"{model}{SEPARATOR}{metadata.get('version', '')}", metadata.get("state", "")


def _devices(daemon: PlainConnection, options: Options, begun: str) -> Iterator[Candidate]:
    for view in devices(daemon, getattr(options, "job", None), after=begun[:-1], pages_max=PAGES_MAX):
        yield view.get("name", ""), f"{view.get('job', '')}"


_FROM_DAEMON: Mapping[str, ValuesFromDaemon] = {
    "JOB": _jobs, "TOKEN": _tokens, "HANDLER": _handlers, "TYPE": _types, "PLUGIN": _plugins, "COMMAND": _commands,
    "WORKER": _workers, "CHECKPOINT": _catalogued, "MODEL": _models, "MODEL@REF": _versions,
    "DEVICE": _devices,
}  # fmt: skip


def _checkpoints(options: Options, begun: str) -> Iterator[str]:
    return offers.checkpoints(begun)


def _sources(options: Options, begun: str) -> Iterator[str]:
    return offers.sources(begun)


def _tensors(options: Options, begun: str) -> Iterator[str]:
    return offers.tensors(options.where)


_FROM_FILES: Mapping[str, Callable[[Options, str], Iterable[str]]] = {
    "WHERE": _checkpoints, "A": _checkpoints, "B": _checkpoints, "SOURCE": _sources, "TENSOR": _tensors,
}  # fmt: skip


def _files(begun: str) -> Iterator[Candidate]:
    directory, slash, _ = begun.rpartition("/")
    where = os.path.expanduser(directory + slash) or "."  # noqa: PTH111 - the typed path is kept as it is
    with contextlib.suppress(OSError), os.scandir(where) as entries:
        for entry in sorted(entries, key=_name):
            if begun.rpartition("/")[2] or not entry.name.startswith("."):
                yield f"{directory}{slash}{entry.name}{'/' if entry.is_dir() else ''}", ""


def _name(entry: Any) -> str:
    return str(entry.name)
