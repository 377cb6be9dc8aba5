"""`forgectl events` and `forgectl story`: facts.

`events --follow` shows each fact once and in order over restarts of the daemon, and a gap where a fact is missing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.connection import PROGRAM, DaemonConnection
from forged.cli.forgectl.output import answer, print_json
from forged.cli.forgectl.parser import Options, Parser, positional
from forged.cli.forgectl.values import fact_id
from forged.cli.process import EXIT_OK, remark, stop_without_reader
from forged.errors import Unavailable
from forged.plain_client.connection import Event, PlainConnection

T = TypeVar("T")

RECONNECT_PAUSE_S = 0.2
RECONNECT_PAUSE_MAX_S = 3.0
EARLIEST = -1


def fill_events(events: Parser) -> None:
    """Add the arguments of `events`."""
    events.set_defaults(act=_events)
    events.add_argument("--follow", "-f", action="store_true", help="wait for new facts, also across daemon restarts")
    events.add_argument("--since", type=fact_id, metavar="ID", help="only facts with a greater id")
    events.add_argument("--job", action="append", default=[], metavar="JOB", help="only this job; repeatable")
    events.add_argument("--type", action="append", default=[], metavar="TYPE", help="only this type; repeatable")


def fill_story(story: Parser) -> None:
    """Add the arguments of `story`."""
    story.set_defaults(act=_story)
    positional(story, "id", "ID", type=fact_id)


def _events(options: Options) -> int:
    from forged.cli.forgectl.fact_sentences import in_words

    for event in _follow(options) if options.follow else _past(options):
        print_json(event) if options.json else tables.event(event, in_words)
        if options.follow:
            sys.stdout.flush()
    return EXIT_OK


def _story(options: Options) -> int:
    from forged.cli.forgectl.fact_sentences import in_words

    with DaemonConnection(options) as daemon:
        records = answers.story(daemon, options.id)
        answer(options, {"story": records}, lambda: tables.story(records, options.id, in_words))
    return EXIT_OK


def _past(options: Options) -> Iterator[Event]:
    since = EARLIEST if options.since is None else options.since
    with DaemonConnection(options) as daemon:
        for _, event in daemon.facts(since, options.type, options.job, until=daemon.latest):
            if event is not None:
                yield event


def _follow(options: Options) -> Iterator[Event]:
    position, history = options.since, ""

    def read(daemon: PlainConnection) -> Iterator[Event]:
        nonlocal position, history
        position = daemon.latest if position is None else position
        history = history or daemon.history
        for reached, event in daemon.facts(position, options.type, options.job, history=history):
            position, history = reached, daemon.history
            if event is not None:
                yield event

    return over_restarts(options, read)


def over_restarts(options: Options, read: Callable[[PlainConnection], Iterator[T]]) -> Iterator[T]:
    """Yield what `read` yields, without end: reconnect when the daemon stops."""
    pause_s = 0.0
    while True:
        try:
            with DaemonConnection(options) as daemon:
                if pause_s > RECONNECT_PAUSE_S:
                    _remark("the daemon is back")
                daemon.while_quiet = stop_without_reader
                pause_s = RECONNECT_PAUSE_S
                yield from read(daemon)
        except Unavailable as error:
            if not pause_s:
                raise  # no daemon at the start
            if pause_s == RECONNECT_PAUSE_S:
                _remark(f"{error.message}; waiting for the daemon")
            stop_without_reader()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_PAUSE_MAX_S)


def _remark(text: str) -> None:
    remark(f"{PROGRAM}: {text}")
