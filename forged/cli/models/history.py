"""`forgectl models history` and `at`: the journal of a model, and what was serving at a time."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.commands.events import over_restarts
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer, print_json
from forged.cli.forgectl.parser import Options
from forged.cli.models import names, words
from forged.cli.models.names import SERVING
from forged.cli.process import EXIT_FAILED, EXIT_OK
from forged.errors import ConfigError
from forged.plain_client.connection import Event, PlainConnection

FACTS = (
    "ModelRegistered", "ModelTransitioned", "ValidationRecorded", "AliasMoved", "CanaryMeasured", "RollbackAdvised",
    "ModelRolledBack", "ModelPolicyChanged", "ModelTagged", "ModelDeleted", "ModelArtifactChecked",
)  # fmt: skip
SHOWN_MAX = 40
"""The longest history on a terminal without `--all`."""
VERSION_WIDTH = 8
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])", re.ASCII)
_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?", re.ASCII)


def show_history(options: Options) -> int:
    """Print the changes of a model, the oldest first, as a log is read."""
    found = names.named(options.model)
    is_cut = sys.stdout.isatty() and not (options.all or options.json)
    with DaemonConnection(options) as daemon:
        position, history = daemon.latest, daemon.history
        version = names.exact(daemon, found) if found.ref else None
        entries, more = _entries(daemon, found.model, version, SHOWN_MAX if is_cut else None)
    reply = {"model_id": found.model, "entries": entries}
    answer(options, reply, lambda: _show(entries, is_whole=not more))
    if options.follow:
        sys.stdout.flush()
        _follow(options, found.model, position, history)
    return EXIT_OK


def _entries(
    daemon: PlainConnection, model: str, version: list[int] | None, limit: int | None
) -> tuple[list[Row], bool]:
    """The entries of the journal, the newest first, and whether there are older ones."""
    found: list[Row] = []
    before, more = 0, True
    while more and (limit is None or len(found) < limit):
        wanted = {} if limit is None else {"limit": limit - len(found)}
        page = answers.one(daemon, "ReadModelJournal", model_id=model, version=version, before=before, **wanted)
        rows = answers.rows_in(page, "entries")
        found += rows
        before = answers.count_in(rows[-1], "number") if rows else 0
        more = bool(page.get("more") and rows)
    return words.as_text(found), more


def _show(entries: list[Row], *, is_whole: bool) -> None:
    if not is_whole:
        print("older entries: --all shows them")
    for one in reversed(entries):
        number, version = (tables.field("", one.get(key)) for key in ("number", "version"))
        place = f"{number:>5}  {tables.field('at_at', one.get('at'))}  {version:<{VERSION_WIDTH}}"
        tables.print_wrapped(f"{place}  {words.entry(one)}  {tables.paint(f'({_grounds(one)})', tables.DIM)}")


def _grounds(one: Row) -> str:
    """Who has made a change, and why."""
    by, reason = (tables.field("", one.get(key)) for key in ("by", "reason"))
    return f"{by}: {reason}" if one.get("reason") else by


def _follow(options: Options, model: str, position: int, history: str) -> None:
    from forged.cli.forgectl.fact_sentences import in_words

    def read(daemon: PlainConnection) -> Iterator[Event]:
        nonlocal position, history
        for reached, event in daemon.facts(position, list(FACTS), [], history=history):
            position, history = reached, daemon.history
            if event is not None and _is_about(event, model):
                yield event

    for event in over_restarts(options, read):
        print_json(event) if options.json else tables.event(event, in_words)
        sys.stdout.flush()


def _is_about(event: Event, model: str) -> bool:
    fact = event.get("fact")
    return "gap" in event or (isinstance(fact, dict) and fact.get("model_id") == model)


# A point in time.


def show_served(options: Options) -> int:
    model, alias = names.alone(options.model), options.alias or SERVING
    at = moment(options.time, time.time())
    with DaemonConnection(options) as daemon:
        reply = words.as_text(answers.one(daemon, "FindServed", model_id=model, at=at, alias=alias))
    answer(
        options, reply | {"model_id": model, "alias": alias, "at": at}, lambda: _show_served(reply, model, alias, at)
    )
    return EXIT_OK if reply.get("version") else EXIT_FAILED


def _show_served(reply: Row, model: str, alias: str, at: float) -> None:
    when = tables.moment(at)
    since = f", since {tables.moment(reply['since'])}" if isinstance(reply.get("since"), (int, float)) else ""
    if reply.get("version"):
        what = f"{model}@{tables.field('', reply['version'])} was {alias}"
    else:
        what = f"no version of {model} was {alias}"
    entry = f" (entry {tables.field('', reply['entry'])} of its history)" if reply.get("entry") else ""
    print(f"{what} at {when}{since}{entry}")


def moment(text: str, now: float) -> float:
    """A time on the command line: seconds since 1970, an ISO time, or an age such as 2h."""
    age = _AGE.fullmatch(text)
    if age is not None:
        return now - float(age[1]) * UNITS_S[age[2]]
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            "usage_wrong", f"{text!r} is not a time", "give 2026-11-20T08:00, seconds since 1970, or an age such as 2h"
        ) from None
