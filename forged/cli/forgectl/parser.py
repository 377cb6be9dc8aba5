"""What commands of `forgectl` are made of.

Law: a command is taken apart into verbs and arguments when it is used, so that nobody waits for the others. Whatever
is wrong with a command line is a `Misuse`. A `metavar` says what kind of thing is meant, to people and to the
completion alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

from forged.cli.forgectl.values import seconds
from forged.cli.process import EXIT_USAGE, remark
from forged.errors import ConfigError

TIMEOUT_S = 10.0

Options = argparse.Namespace
Act = Callable[[Options], int]
Fill = Callable[["Parser"], None]


class Misuse(Exception):
    """A command line that means nothing: what is wrong, and how it is written."""

    def __init__(self, parser: argparse.ArgumentParser, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.program = parser.prog
        self.usage = parser.format_usage()


class Parser(argparse.ArgumentParser):
    """Raises what is wrong instead of ending the process. Takes no abbreviations: a later option would break them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.fill: Fill | None = None
        """Adds what the command consists of."""

    def whole(self) -> Parser:
        """Itself, with everything that the command consists of."""
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self.whole()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise Misuse(self, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse would pass over output that cannot be written.
        print(message, end="", file=file)


def understood(words: Sequence[str], parse: Callable[[Sequence[str]], Options]) -> Options:
    """What a command line says; what is wrong with it is told to people with its usage, to programs as any error."""
    try:
        return parse(words)
    except Misuse as misuse:
        if "--json" in words:
            raise ConfigError("usage_wrong", misuse.what, f"see `{misuse.program} --help`") from misuse
        remark(f"{misuse.usage}{misuse.program}: error: {misuse.what}")
        raise SystemExit(EXIT_USAGE) from misuse


@cache
def everywhere() -> Parser:
    """What may stand before the command and behind it."""
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--socket", metavar="PATH", help="the daemon's Unix socket (default: $FORGED_SOCKET)")
    parser.add_argument("--endpoint", metavar="URL", help="unix:///path, tcp://host:port or tls://host:port")
    parser.add_argument("--token", metavar="TEXT", help="who you are (default: $FORGED_TOKEN)")
    waiting = f"seconds to wait for an answer (default: {TIMEOUT_S:g})"
    return _answered_in_time(parser, waiting)


@cache
def without_daemon() -> Parser:
    """The same for what asks no daemon."""
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    return _answered_in_time(parser, "seconds after which to give up (default: never)")


def _answered_in_time(parser: Parser, waiting: str) -> Parser:
    parser.add_argument("--timeout", type=seconds, metavar="S", help=waiting)
    parser.add_argument("--json", action="store_true", help="for programs, errors too")
    return parser


def command(commands: Any, name: str, text: str, fill: Fill, common: Parser) -> None:
    """A command, of which only the name is settled yet."""
    parser: Parser = commands.add_parser(name, help=text, description=text, parents=[common])
    parser.fill = fill


def verb(
    verbs: Any, name: str, act: Act, text: str, aliases: Sequence[str] = (), common: Parser | None = None
) -> Parser:
    """What can be done with the things that a command is about."""
    parents = [common or everywhere()]
    parser: Parser = verbs.add_parser(name, help=text, description=text, aliases=aliases, parents=parents)
    parser.set_defaults(act=act)
    return parser


def verbs_of(parser: Parser, act: Act) -> Any:
    """Where a command's verbs are added; without one of them, it acts like this."""
    parser.set_defaults(act=act)
    return parser.add_subparsers(metavar="VERB")


def positional(parser: Parser, name: str, metavar: str, **options: Any) -> None:
    """An argument without a flag."""
    parser.add_argument(name, metavar=metavar, **options)
