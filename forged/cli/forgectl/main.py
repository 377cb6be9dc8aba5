"""`forgectl`: the operator's command.

Invariants:
- People get tables, programs get JSON: one object, or one per line for a stream.
- The exit code says which kind of error occurred.
- Modules are imported when a command needs them, because start-up time is what a user waits for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.connection import PROGRAM, DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import (
    Fill,
    Options,
    Parser,
    command,
    everywhere,
    positional,
    understood,
    verb,
    verbs_of,
    with_or_without_daemon,
)
from forged.cli.process import EXIT_OK, run
from forged.version import VERSION

COMPLETE = "complete"
"""The hidden command that shells call for completion."""
EPILOG = """\
exit codes:
  0    success; also if the reader of the output stops early
  1    failure: an error in the daemon, no forged daemon at the address, output
       that cannot be written, an audit that found errors, a damaged or
       different checkpoint
  2    wrong usage, or a local problem to fix first
  3    refused by the daemon, with the reason; a checkpoint that is missing or
       exists already
  4    unavailable: no daemon or storage, or no answer in time; try again
  130  interrupted

environment:
  FORGED_SOCKET, FORGED_ENDPOINT, FORGED_TOKEN   defaults for --socket,
       --endpoint and --token
  FORGED_CA, FORGED_CERTIFICATE, FORGED_KEY   PEM files for tls:// endpoints
  NO_COLOR   disable colours

For shell completion see "forgectl completion --help"."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        # A character that the terminal cannot show is printed as its code.
        sys.stdout.reconfigure(errors="backslashreplace")
    return run(PROGRAM, lambda: _act(words), json="--json" in words)


def _act(words: Sequence[str]) -> int:
    if words[:1] == [COMPLETE]:
        from forged.cli.forgectl.candidates import print_candidates

        return print_candidates(_parser(), words[1:])
    options = understood(words, _parsed)
    code: int = options.act(options)
    return code


def _parsed(words: Sequence[str]) -> Options:
    # Defaults are set here: the default of a verb's parser would overwrite an option that stands before the verb.
    parser = _parser()
    options = Options(json=False, socket=None, endpoint=None, token=None, timeout=None)
    _, rest = parser.parse_known_args(words, options)
    if rest and hasattr(options, "settings") and not any(word.startswith("-") for word in rest):
        # argparse ends a repeatable positional at the first option after it.
        options.settings += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.socket and options.endpoint:
        parser.error("argument --endpoint: not allowed with argument --socket")
    return options


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="Control a forged daemon.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[everywhere()],
    )
    parser.add_argument("--version", action="version", version=f"forgectl {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text, fill in _COMMANDS:
        common = with_or_without_daemon() if name in _WITH_OR_WITHOUT_DAEMON else everywhere()
        command(commands, name, text, fill, common)
    return parser


def _from(module: str, fill: str = "fill") -> Fill:
    """The function that completes a command's parser, imported when the command is used."""

    def imported(parser: Parser) -> None:
        function: Fill = getattr(import_module(f"forged.cli.forgectl.commands.{module}"), fill)
        function(parser)

    return imported


def _ping_command(ping: Parser) -> None:
    ping.set_defaults(act=_ping)


def _status_command(status: Parser) -> None:
    status.set_defaults(act=_status)


def _handlers_command(handlers: Parser) -> None:
    verbs = verbs_of(handlers, _handlers)
    verb(verbs, "ls", _handlers, "list handlers", aliases=["list"])
    positional(verb(verbs, "readmit", _readmit, "re-enable a quarantined handler"), "name", "HANDLER")


def _note_command(note: Parser) -> None:
    note.set_defaults(act=_note)
    positional(note, "job", "JOB")
    positional(note, "text", "TEXT")


def _backup_command(backup: Parser) -> None:
    backup.set_defaults(act=_backup)
    positional(backup, "file", "FILE")


_COMMANDS: tuple[tuple[str, str, Callable[[Parser], None]], ...] = (
    ("ping", "measure the daemon's response time", _ping_command),
    ("status", "show daemon status", _status_command),
    ("handlers", "list the handlers on the daemon's bus, re-enable a quarantined one", _handlers_command),
    ("plugins", "list, show, enable, disable and run plugins", _from("plugins")),
    ("jobs", "list, create, show, change and remove jobs; control their training", _from("jobs")),
    ("workers", "list, show, drain and evict workers", _from("workers")),
    ("plan", "show what a rescale would change", _from("rescale_plan")),
    ("data", "list, show and audit training data", _from("data")),
    ("transfers", "show the progress of shard transfers", _from("transfers")),
    ("slots", "list the memory into which workers stage checkpoints", _from("slots")),
    ("ckpt", "list, show, verify, compare, convert, keep and delete checkpoints", _from("ckpt")),
    ("models", "register, promote, roll back, compare, verify and copy versions of models", _from("models")),
    ("memory", "list devices and blocks of GPU memory; forecast, fit, plan and replay", _from("memory")),
    ("events", "show facts, oldest first", _from("events", "fill_events")),
    ("story", "show the causes and consequences of a fact", _from("events", "fill_story")),
    ("note", "add a note to a job's history", _note_command),
    ("tokens", "list, create and revoke tokens", _from("tokens")),
    ("config", "show and reload the daemon's settings", _from("config")),
    ("backup", "save a consistent copy of the daemon's state while it runs", _backup_command),
    ("completion", "print the completion script for a shell", _from("completion")),
)
_WITH_OR_WITHOUT_DAEMON = frozenset({"ckpt"})


# Commands.


def _ping(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        started = time.perf_counter()
        daemon.request("PingDaemon")
        took_s = time.perf_counter() - started
        answer(options, {"seconds": took_s}, lambda: print(f"{daemon.endpoint} answered in {tables.duration(took_s)}"))
    return EXIT_OK


def _status(options: Options) -> int:
    from forged.cli.forgectl.commands.plugins import inactive

    with DaemonConnection(options) as daemon:
        status = answers.one(daemon, "ReadStatus")
        answer(options, status, lambda: tables.pairs(status | inactive(daemon)))
    return EXIT_OK


def _handlers(options: Options) -> int:
    columns = ("name", "kind", "messages", "queued", "handled", "failed", "dropped", "p50_s", "p99_s", "quarantined")
    with DaemonConnection(options) as daemon:
        handlers = answers.several(daemon, "ListHandlers", field="handlers", key="name")
        answer(
            options,
            {"handlers": handlers},
            lambda: tables.table(
                handlers, columns, "no handlers", yielding=("messages", "p99_s", "p50_s"), kept="name"
            ),
        )
    return EXIT_OK


def _readmit(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        daemon.request("ReadmitHandler", handler=options.name)
        answer(options, {}, lambda: print(f"re-enabled {options.name}"))
    return EXIT_OK


def _note(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        daemon.request("AddNote", job=options.job, text=options.text)
        answer(options, {}, lambda: print(f"added the note to job {options.job}"))
    return EXIT_OK


def _backup(options: Options) -> int:
    from forged.cli.forgectl.commands.backup import write_whole

    with DaemonConnection(options) as daemon:
        ticket, size_bytes = answers.backup(daemon)
        write_whole(options.file, daemon.fetch(ticket, size_bytes))
        answer(
            options,
            {"file": options.file, "size_bytes": size_bytes},
            lambda: print(f"saved the daemon's state to {options.file} ({size_bytes} bytes)"),
        )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
