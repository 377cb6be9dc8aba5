"""`forgectl`: what operators ask the daemon.

Law: people get tables, programs get JSON (one object; one per line where it streams), and the exit code says which
kind of thing went wrong. Imports are few and late, because somebody waits for each of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.connection import PROGRAM, Connection
from forged.cli.forgectl.events import follow, past
from forged.cli.forgectl.output import answer, print_json
from forged.cli.forgectl.parser import (
    Options,
    Parser,
    command,
    everywhere,
    positional,
    understood,
    verb,
    verbs_of,
    without_daemon,
)
from forged.cli.forgectl.values import fact_id, lifetime, settings, version
from forged.cli.process import EXIT_OK, run
from forged.version import VERSION

ASKED_BY_SHELLS = "complete"
EPILOG = """\
exit codes:
  0    done; also when whoever reads the output has stopped
  1    failed: a mistake in the daemon, something that is no daemon, output that cannot be written;
       or an audit that found something wrong; of checkpoints: damage, or a difference
  2    wrong usage, or something on this side that has to be mended first
  3    refused by the daemon; the message says why; of checkpoints: not there, or there already
  4    unavailable: no daemon or storage, or none that answers in time; try again
  130  interrupted

environment:
  FORGED_SOCKET, FORGED_TOKEN   in place of --socket and --token
  FORGED_CA, FORGED_CERTIFICATE, FORGED_KEY   PEM files for tls:// endpoints
  NO_COLOR   no colours

Your shell can complete what you type: see "forgectl completion --help"."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that cannot show a character is shown its number.
        sys.stdout.reconfigure(errors="backslashreplace")
    return run(PROGRAM, lambda: _act(words), json="--json" in words)


def _act(words: Sequence[str]) -> int:
    if words[:1] == [ASKED_BY_SHELLS]:
        from forged.cli.forgectl.candidates import print_candidates

        return print_candidates(_parser(), words[1:])
    options = understood(words, _parsed)
    code: int = options.act(options)
    return code


def _parsed(words: Sequence[str]) -> Options:
    # The parsers give no defaults of their own: that of a verb would undo what stands before it.
    parser = _parser()
    options = Options(json=False, socket=None, endpoint=None, token=None, timeout=None)
    _, behind = parser.parse_known_args(words, options)
    if behind and hasattr(options, "settings") and not any(word.startswith("-") for word in behind):
        # argparse takes what may be repeated for complete at the first option behind it.
        options.settings += behind
    elif behind:
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    if options.socket and options.endpoint:
        parser.error("argument --endpoint: not allowed with argument --socket")
    return options


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="Ask a forged daemon.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[everywhere()],
    )
    parser.add_argument("--version", action="version", version=f"forgectl {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text, fill in _COMMANDS:
        command(commands, name, text, fill, without_daemon() if name in _WITHOUT_DAEMON else everywhere())
    return parser


def _ping_command(ping: Parser) -> None:
    ping.set_defaults(act=_ping)


def _status_command(status: Parser) -> None:
    status.set_defaults(act=_status)


def _handlers_command(handlers: Parser) -> None:
    verbs = verbs_of(handlers, _handlers)
    verb(verbs, "ls", _handlers, "all handlers", aliases=["list"])
    positional(verb(verbs, "readmit", _readmit, "give a quarantined handler facts again"), "name", "HANDLER")


def _backup_command(backup: Parser) -> None:
    backup.set_defaults(act=_backup)
    positional(backup, "file", "FILE")


def _events_command(events: Parser) -> None:
    events.set_defaults(act=_events)
    events.add_argument("--follow", "-f", action="store_true", help="go on with new ones, over restarts of the daemon")
    events.add_argument("--since", type=fact_id, metavar="ID", help="only facts behind this id")
    events.add_argument("--job", action="append", default=[], metavar="JOB", help="only of this job; repeatable")
    events.add_argument("--type", action="append", default=[], metavar="TYPE", help="only of this type; repeatable")


def _story_command(story: Parser) -> None:
    story.set_defaults(act=_story)
    positional(story, "id", "ID", type=fact_id)


def _note_command(note: Parser) -> None:
    note.set_defaults(act=_note)
    positional(note, "job", "JOB")
    positional(note, "text", "TEXT")


def _jobs_command(jobs: Parser) -> None:
    from forged.cli.forgectl import workers

    verbs = verbs_of(jobs, _list_jobs)
    verb(verbs, "ls", _list_jobs, "all jobs", aliases=["list"])
    create = verb(verbs, "create", _create_job, "create a job, or see that it exists with these settings")
    positional(create, "name", "NAME")
    positional(create, "settings", "KEY=VALUE", nargs="*")
    change = verb(verbs, "change", _change_job, "change some of a job's settings; KEY= takes one away")
    positional(change, "name", "JOB")
    positional(change, "settings", "KEY=VALUE", nargs="+")
    change.add_argument("--version", type=version, metavar="N", help="only if it is at this version")
    positional(verb(verbs, "show", _show_job, "one job, and where its training is"), "name", "JOB")
    remove = verb(verbs, "rm", _remove_job, "remove a job", aliases=["remove"])
    positional(remove, "name", "JOB")
    remove.add_argument("--force", action="store_true", help="also while it has workers")
    workers.fill_jobs(verbs)


def _workers_command(parser: Parser) -> None:
    from forged.cli.forgectl.workers import fill

    fill(parser)


def _plan_command(parser: Parser) -> None:
    from forged.cli.forgectl.workers import fill_plan

    fill_plan(parser)


def _data_command(parser: Parser) -> None:
    from forged.cli.forgectl.data import fill

    fill(parser)


def _transfers_command(parser: Parser) -> None:
    from forged.cli.forgectl.transfers import fill

    fill(parser)


def _ckpt_command(parser: Parser) -> None:
    from forged.cli.forgectl.ckpt import fill

    fill(parser)


def _tokens_command(tokens: Parser) -> None:
    verbs = verbs_of(tokens, _list_tokens)
    verb(verbs, "ls", _list_tokens, "all tokens", aliases=["list"])
    create = verb(verbs, "create", _create_token, "create a token and show its text, this once")
    positional(create, "name", "NAME")
    create.add_argument("--role", required=True, choices=("viewer", "worker", "operator"))
    create.add_argument("--job", action="append", metavar="JOB", help="only for this job; repeatable")
    create.add_argument("--ttl", type=lifetime, metavar="S", help="seconds until it expires")
    positional(verb(verbs, "revoke", _revoke_token, "accept a token no more"), "token_id", "TOKEN")


def _plugins_command(parser: Parser) -> None:
    from forged.cli.forgectl.plugins import fill

    fill(parser)


def _config_command(parser: Parser) -> None:
    from forged.cli.forgectl.config import fill

    fill(parser)


def _completion_command(parser: Parser) -> None:
    from forged.cli.forgectl.completion import fill

    fill(parser)


_COMMANDS = (
    ("ping", "see how long the daemon's bus takes to answer", _ping_command),
    ("status", "the daemon in one look", _status_command),
    ("handlers", "who handles what on the bus, in numbers", _handlers_command),
    ("plugins", "list, show, enable, disable and use plugins", _plugins_command),
    ("jobs", "list, create, show, change and remove jobs, and steer their training", _jobs_command),
    ("workers", "list, show, drain and evict workers", _workers_command),
    ("plan", "what a rescale to so many workers would do", _plan_command),
    ("data", "list and show training data, and audit that each sample was used once", _data_command),
    ("transfers", "the training data that travels, and how far it is", _transfers_command),
    ("ckpt", "list, show, verify, compare, convert and delete checkpoints, without a daemon", _ckpt_command),
    ("events", "the facts, oldest first", _events_command),
    ("story", "why a fact happened, and what followed", _story_command),
    ("note", "put a remark on a job's record", _note_command),
    ("tokens", "list, create and revoke tokens", _tokens_command),
    ("config", "the daemon's settings, and which wait for a restart", _config_command),
    ("backup", "fetch a consistent copy of the daemon's state while it works", _backup_command),
    ("completion", "print the script with which a shell completes commands", _completion_command),
)
_WITHOUT_DAEMON = frozenset({"ckpt"})


# Commands.


def _ping(options: Options) -> int:
    with Connection(options) as wire:
        started = time.perf_counter()
        wire.request("PingDaemon")
        took_s = time.perf_counter() - started
        answer(options, {"seconds": took_s}, lambda: print(f"{wire.endpoint} answered in {tables.duration(took_s)}"))
    return EXIT_OK


def _status(options: Options) -> int:
    from forged.cli.forgectl.plugins import inactive

    with Connection(options) as wire:
        status = answers.one(wire, "ReadStatus")
        answer(options, status, lambda: tables.pairs(status | inactive(wire)))
    return EXIT_OK


def _handlers(options: Options) -> int:
    columns = ("name", "kind", "messages", "queued", "handled", "failed", "dropped", "p50_s", "p99_s", "quarantined")
    with Connection(options) as wire:
        handlers = answers.several(wire, "ListHandlers", field="handlers", key="name")
        answer(options, {"handlers": handlers}, lambda: tables.table(handlers, columns, "no handlers"))
    return EXIT_OK


def _readmit(options: Options) -> int:
    with Connection(options) as wire:
        wire.request("ReadmitHandler", handler=options.name)
        answer(options, {}, lambda: print(f"{options.name} gets facts again"))
    return EXIT_OK


def _backup(options: Options) -> int:
    from forged.cli.forgectl.backup import write_whole

    with Connection(options) as wire:
        ticket, size_bytes = answers.backup(wire)
        write_whole(options.file, wire.fetch(ticket, size_bytes))
        answer(
            options,
            {"file": options.file, "size_bytes": size_bytes},
            lambda: print(f"{options.file} holds the daemon's state, {size_bytes} bytes"),
        )
    return EXIT_OK


def _events(options: Options) -> int:
    from forged.cli.forgectl.workers import in_words

    for event in follow(options) if options.follow else past(options):
        print_json(event) if options.json else tables.event(event, in_words)
        if options.follow:
            sys.stdout.flush()
    return EXIT_OK


def _story(options: Options) -> int:
    from forged.cli.forgectl.workers import in_words

    with Connection(options) as wire:
        records = answers.story(wire, options.id)
        answer(options, {"story": records}, lambda: tables.story(records, options.id, in_words))
    return EXIT_OK


def _note(options: Options) -> int:
    with Connection(options) as wire:
        wire.request("AddNote", job=options.job, text=options.text)
        answer(options, {}, lambda: print("noted"))
    return EXIT_OK


def _create_job(options: Options) -> int:
    wanted = settings(options.settings)
    with Connection(options) as wire:
        job = answers.one(wire, "CreateJob", job=options.name, settings=wanted)
        answer(options, job, lambda: _show_pairs(job))
    return EXIT_OK


def _list_jobs(options: Options) -> int:
    from forged.cli.forgectl.workers import phase_in_words, phases

    columns = ("name", "phase", "version", "created_at", "created_by", "settings")
    with Connection(options) as wire:
        jobs = answers.pages(wire, "ListJobs", field="jobs", key="name")
        known = phases(wire)
        jobs = [job | known.get(f"{job.get('name')}", {}) for job in jobs]
        rows = [job | {"phase": phase_in_words(job)} for job in jobs]
        answer(options, {"jobs": jobs}, lambda: tables.table(rows, columns, "no jobs"))
    return EXIT_OK


def _show_job(options: Options) -> int:
    from forged.cli.forgectl import transfers, workers

    with Connection(options) as wire:
        job = answers.one(wire, "ShowJob", job=options.name)
        training = workers.training(wire, options.name)
        moving = transfers.under_way(wire, options.name, training)
    about = {name: value for name, value in (("training", training), ("transfers", moving)) if value}
    answer(options, job | about, lambda: _show_pairs(job))
    if not options.json:
        if training:
            workers.show_training(training)
        if moving:
            print(f"\nits data: {transfers.in_short(moving)}")
    return EXIT_OK


def _change_job(options: Options) -> int:
    wanted = settings(options.settings)
    with Connection(options) as wire:
        present = answers.one(wire, "ShowJob", job=options.name)
        version = present.get("version") if options.version is None else options.version
        merged = _merged(present.get("settings"), wanted)
        job = answers.one(wire, "ChangeJob", job=options.name, settings=merged, version=version)
        answer(options, job, lambda: _show_pairs(job))
    return EXIT_OK


def _merged(present: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those that are wanted in their places; one that is wanted empty is taken away."""
    known = present if isinstance(present, dict) else {}
    return {key: value for key, value in {**known, **wanted}.items() if key not in wanted or value != ""}


def _show_pairs(job: answers.Row) -> None:
    """A job, without its fence, with which clients tell old requests from new ones, and what it does not have."""
    tables.pairs(
        {key: value for key, value in job.items() if key != "fence" and (key, value) != ("created_with", None)}
    )


def _remove_job(options: Options) -> int:
    with Connection(options) as wire:
        wire.request("RemoveJob", job=options.name, **({"force": True} if options.force else {}))
        answer(options, {}, lambda: print(f"there is no job {options.name} now"))
    return EXIT_OK


def _create_token(options: Options) -> int:
    from forged.auth.tokens import SECRET_BYTES_MIN, encode_token

    secret = os.urandom(SECRET_BYTES_MIN)
    fields = {"name": options.name, "role": options.role, "secret": secret, "jobs": options.job, "ttl_s": options.ttl}
    with Connection(options) as wire:
        token = answers.one(wire, "CreateToken", **fields) | {"token": encode_token(secret)[1]}
        answer(options, token, lambda: print(token["token"]))
    return EXIT_OK


def _list_tokens(options: Options) -> int:
    columns = ("token_id", "name", "role", "jobs", "created_at", "expires_at", "revoked_at")
    with Connection(options) as wire:
        tokens = answers.pages(wire, "ListTokens", field="tokens", key="token_id")
        tokens.sort(key=lambda token: token.get("created_at") or 0.0)
        answer(options, {"tokens": tokens}, lambda: tables.table(tokens, columns, "no tokens"))
    return EXIT_OK


def _revoke_token(options: Options) -> int:
    with Connection(options) as wire:
        token = answers.one(wire, "RevokeToken", token_id=options.token_id)
        answer(options, token, lambda: print(f"{options.token_id} ({tables.field('', token.get('name'))}) is revoked"))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
