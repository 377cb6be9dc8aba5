"""`forgectl`: what operators ask the daemon.

Law: people get tables, programs get JSON (one object; one per line where it streams), and the exit code says which
kind of thing went wrong. Imports are few and late, because somebody waits for each of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from io import TextIOWrapper
from typing import Any

from forged.cli import show
from forged.cli.connection import PROGRAM, Connection, Options
from forged.cli.events import follow, past
from forged.cli.process import EXIT_INTERRUPTED, EXIT_OK, complain, stop_writing
from forged.cli.values import fact_id, lifetime, seconds, setting
from forged.cli.wire import RECORD_FIELDS, Wire
from forged.errors import ForgedError
from forged.version import VERSION

TIMEOUT_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = _options(arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that cannot show a character is shown its number.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _act(options)
        sys.stdout.flush()
    except BrokenPipeError:
        stop_writing()
        return EXIT_OK
    except OSError as error:
        stop_writing()
        failure = ForgedError("output_failed", f"the output cannot be written: {error.strerror}")
        return complain(PROGRAM, failure, json=options.json)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _act(options: Options) -> int:
    try:
        code: int = options.act(options)
    except ForgedError as error:
        sys.stdout.flush()
        return complain(PROGRAM, error, json=options.json)
    return code


def _options(arguments: Sequence[str] | None) -> Options:
    # The parsers give no defaults of their own: that of a verb would undo what stands before it.
    parser = _parser()
    options = Options(json=False, socket=None, endpoint=None, token=None, timeout=TIMEOUT_S)
    parser.parse_args(arguments, options)
    if options.socket and options.endpoint:
        parser.error("argument --endpoint: not allowed with argument --socket")
    return options


@cache
def _everywhere() -> argparse.ArgumentParser:
    """What may stand before the command and behind it."""
    parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--socket", metavar="PATH", help="the daemon's Unix socket (default: $FORGED_SOCKET)")
    parser.add_argument("--endpoint", metavar="URL", help="unix:///path, tcp://host:port or tls://host:port")
    parser.add_argument("--token", help="who you are (default: $FORGED_TOKEN)")
    waiting = f"seconds to wait for an answer (default: {TIMEOUT_S:g})"
    parser.add_argument("--timeout", type=seconds, metavar="S", help=waiting)
    parser.add_argument("--json", action="store_true", help="for programs, errors too")
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Ask a forged daemon.", parents=[_everywhere()])
    parser.add_argument("--version", action="version", version=f"forgectl {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _simple_commands(commands)
    _event_commands(commands)
    _job_commands(commands)
    _token_commands(commands)
    return parser


def _command(
    commands: Any, name: str, act: Callable[[Options], int], text: str, aliases: Sequence[str] = ()
) -> argparse.ArgumentParser:
    command = _group(commands, name, text, aliases)
    command.set_defaults(act=act)
    return command


def _group(commands: Any, name: str, text: str, aliases: Sequence[str] = ()) -> argparse.ArgumentParser:
    group: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, aliases=aliases, parents=[_everywhere()]
    )
    return group


def _simple_commands(commands: Any) -> None:
    _command(commands, "ping", _ping, "see how long the daemon's bus takes to answer")
    _command(commands, "status", _status, "the daemon in one look")
    handlers = _command(commands, "handlers", _handlers, "who handles what on the bus, in numbers")
    verbs = handlers.add_subparsers(metavar="VERB")
    _command(verbs, "readmit", _readmit, "give a quarantined handler facts again").add_argument("name")
    backup = _command(commands, "backup", _backup, "fetch a consistent copy of the daemon's state while it works")
    backup.add_argument("file")


def _event_commands(commands: Any) -> None:
    events = _command(commands, "events", _events, "the facts, oldest first")
    events.add_argument("--follow", "-f", action="store_true", help="go on with new ones, over restarts of the daemon")
    events.add_argument("--since", type=fact_id, metavar="ID", help="only facts behind this id")
    events.add_argument("--job", action="append", default=[], help="only facts of this job; may be repeated")
    events.add_argument("--type", action="append", default=[], help="only facts of this type; may be repeated")
    story = _command(commands, "story", _story, "why a fact happened, and what followed")
    story.add_argument("id", type=int)
    note = _command(commands, "note", _note, "put a remark on a job's record")
    note.add_argument("job")
    note.add_argument("text")


def _job_commands(commands: Any) -> None:
    jobs = _group(commands, "jobs", "create, list, show, change and remove jobs")
    verbs = jobs.add_subparsers(required=True, metavar="VERB")
    create = _command(verbs, "create", _create_job, "create a job, or see that it exists with these settings")
    create.add_argument("name")
    create.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    _command(verbs, "ls", _list_jobs, "all jobs", aliases=["list"])
    change = _command(verbs, "change", _change_job, "replace a job's settings: those that are not named here are gone")
    change.add_argument("name")
    change.add_argument("settings", nargs="+", metavar="KEY=VALUE")
    change.add_argument("--version", type=int, metavar="N", help="only if it is at this version (default: the present)")
    _command(verbs, "show", _show_job, "one job").add_argument("name")
    _command(verbs, "rm", _remove_job, "remove a job", aliases=["remove"]).add_argument("name")


def _token_commands(commands: Any) -> None:
    tokens = _group(commands, "tokens", "create, list and revoke tokens")
    verbs = tokens.add_subparsers(required=True, metavar="VERB")
    create = _command(verbs, "create", _create_token, "create a token and show its text, this once")
    create.add_argument("name")
    create.add_argument("--role", required=True, choices=("viewer", "worker", "operator"))
    create.add_argument("--job", action="append", help="only for this job; may be repeated")
    create.add_argument("--ttl", type=lifetime, metavar="S", help="seconds until it expires")
    _command(verbs, "ls", _list_tokens, "all tokens", aliases=["list"])
    _command(verbs, "revoke", _revoke_token, "accept a token no more").add_argument("token_id")


# Commands.


def _ping(options: Options) -> int:
    with Connection(options) as wire:
        started = time.perf_counter()
        wire.request("PingDaemon")
        took_s = time.perf_counter() - started
        _show(options, {"seconds": took_s}, lambda: print(f"{wire.endpoint} answered in {show.duration(took_s)}"))
    return EXIT_OK


def _status(options: Options) -> int:
    with Connection(options) as wire:
        status = wire.request("ReadStatus")
        _show(options, status, lambda: show.pairs(status))
    return EXIT_OK


def _handlers(options: Options) -> int:
    columns = ("name", "kind", "messages", "queued", "handled", "failed", "dropped", "p50_s", "p99_s", "quarantined")
    with Connection(options) as wire:
        handlers = wire.request("ListHandlers")
        _show(options, {"handlers": handlers}, lambda: show.table(handlers, columns, "no handlers"))
    return EXIT_OK


def _readmit(options: Options) -> int:
    with Connection(options) as wire:
        wire.request("ReadmitHandler", handler=options.name)
        _show(options, {}, lambda: print(f"{options.name} gets facts again"))
    return EXIT_OK


def _backup(options: Options) -> int:
    from forged.cli.backup import write_whole

    with Connection(options) as wire:
        ticket = wire.request("BackUp")
        write_whole(options.file, wire.fetch(ticket["ticket"], ticket["size"]))
        _show(
            options,
            {"file": options.file, "size_bytes": ticket["size"]},
            lambda: print(f"{options.file} holds the daemon's state, {ticket['size']} bytes"),
        )
    return EXIT_OK


def _events(options: Options) -> int:
    for event in follow(options) if options.follow else past(options):
        _print_json(event) if options.json else show.event(event)
        if options.follow:
            sys.stdout.flush()
    return EXIT_OK


def _story(options: Options) -> int:
    with Connection(options) as wire:
        records = [
            dict(zip(RECORD_FIELDS, record, strict=False)) for record in wire.request("TellStory", fact_id=options.id)
        ]
        _show(options, {"story": records}, lambda: show.story(records, options.id))
    return EXIT_OK


def _note(options: Options) -> int:
    with Connection(options) as wire:
        wire.request("AddNote", job=options.job, text=options.text)
        _show(options, {}, lambda: print("noted"))
    return EXIT_OK


def _create_job(options: Options) -> int:
    settings = dict(setting(text) for text in options.settings)
    with Connection(options) as wire:
        job = wire.request("CreateJob", job=options.name, settings=settings)
        _show(options, job, lambda: show.pairs(job))
    return EXIT_OK


def _list_jobs(options: Options) -> int:
    columns = ("name", "version", "created_at", "created_by", "settings")
    with Connection(options) as wire:
        jobs = _pages(wire, "ListJobs", "jobs", "name")
        _show(options, {"jobs": jobs}, lambda: show.table(jobs, columns, "no jobs"))
    return EXIT_OK


def _show_job(options: Options) -> int:
    with Connection(options) as wire:
        job = wire.request("ShowJob", job=options.name)
        _show(options, job, lambda: show.pairs(job))
    return EXIT_OK


def _change_job(options: Options) -> int:
    settings = dict(setting(text) for text in options.settings)
    with Connection(options) as wire:
        version = options.version
        if version is None:
            version = wire.request("ShowJob", job=options.name)["version"]
        job = wire.request("ChangeJob", job=options.name, settings=settings, version=version)
        _show(options, job, lambda: show.pairs(job))
    return EXIT_OK


def _remove_job(options: Options) -> int:
    with Connection(options) as wire:
        wire.request("RemoveJob", job=options.name)
        _show(options, {}, lambda: print(f"{options.name} is removed"))
    return EXIT_OK


def _create_token(options: Options) -> int:
    from forged.auth.tokens import SECRET_BYTES_MIN, spell

    secret = os.urandom(SECRET_BYTES_MIN)
    fields = {"name": options.name, "role": options.role, "secret": secret, "jobs": options.job, "ttl_s": options.ttl}
    with Connection(options) as wire:
        token = wire.request("CreateToken", **fields) | {"token": spell(secret)[1]}
        _show(options, token, lambda: print(token["token"]))
    return EXIT_OK


def _list_tokens(options: Options) -> int:
    columns = ("token_id", "name", "role", "jobs", "created_at", "expires_at", "revoked_at")
    with Connection(options) as wire:
        tokens = _pages(wire, "ListTokens", "tokens", "token_id")
        tokens.sort(key=lambda token: token["created_at"])
        _show(options, {"tokens": tokens}, lambda: show.table(tokens, columns, "no tokens"))
    return EXIT_OK


def _revoke_token(options: Options) -> int:
    with Connection(options) as wire:
        token = wire.request("RevokeToken", token_id=options.token_id)
        _show(options, token, lambda: print(f"{token['token_id']} ({token['name']}) is revoked"))
    return EXIT_OK


# How it reads long lists, and prints.


def _pages(wire: Wire, method: str, field: str, key: str) -> list[dict[str, Any]]:
    """A whole list; each page begins behind the last entry of the one before."""
    entries: list[dict[str, Any]] = []
    more = True
    while more:
        page = wire.request(method, after=entries[-1][key] if entries else "")
        entries += page[field]
        more = page["more"]
    return entries


def _show(options: Options, value: Any, show: Callable[[], Any]) -> None:
    _print_json(value) if options.json else show()


def _print_json(value: Any) -> None:
    import json

    def say(value: Any) -> str:
        return json.dumps(value, allow_nan=False, default=lambda one: one.hex() if isinstance(one, bytes) else str(one))

    try:
        text = say(value)
    except ValueError:
        text = say(_finite(value))
    print(text)


def _finite(value: Any) -> Any:
    """What JSON can say of it: a number that is none, from a plugin's fact, is null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return value if not isinstance(value, float) or abs(value) < float("inf") else None


if __name__ == "__main__":
    sys.exit(main())
