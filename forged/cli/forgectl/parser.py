"""The parser of `forgectl` commands, on top of argparse.

Invariants:
- A command's verbs and arguments are added when the command is used, so that other commands start faster.
- Every error in a command line is a `Misuse`.
- The `metavar` of an argument names its kind of value, for the help and for completion.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

from forged.cli.forgectl.values import seconds
from forged.cli.process import EXIT_USAGE, remark
from forged.errors import ConfigError

TIMEOUT_S = 10.0

Options = argparse.Namespace
Act = Callable[[Options], int]
Fill = Callable[["Parser"], None]


class Misuse(Exception):
    """An error in a command line, with the usage."""

    def __init__(self, parser: argparse.ArgumentParser, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.program = parser.prog
        self.usage = parser.format_usage()


class Parser(argparse.ArgumentParser):
    """Raises errors instead of ending the process. Accepts no abbreviations: a new option would break them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.fill: Fill | None = None
        """Adds the verbs and arguments."""

    def whole(self) -> Parser:
        """The parser with all verbs and arguments."""
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self.whole()
        return super().parse_known_args(args, namespace)

    def _match_arguments_partial(self, actions: Any, arg_strings_pattern: str) -> list[int]:
        """Before an option, arguments that may be absent wait for what follows it. Newer versions of Python do so."""
        counts: list[int] = super()._match_arguments_partial(actions, arg_strings_pattern)
        if arg_strings_pattern[sum(counts) :].startswith("O"):
            while counts and not counts[-1]:
                counts.pop()
        return counts

    def error(self, message: str) -> NoReturn:
        raise Misuse(self, message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            raise Misuse(self, _unknown_word(self.prog, f"{action.metavar}".lower(), value, action.choices))
        super()._check_value(action, value)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse would ignore output errors.
        print(message, end="", file=file)


def _unknown_word(program: str, kind: str, value: object, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """That a verb or command is needed, with all of them, and an example for a verb."""
    # An alias follows the name of its parser.
    names = {parser: name for name, parser in reversed(list(parsers.items()))}
    known = ", ".join(reversed(list(names.values())))
    said = f"{value!r} is no {kind} of `{program}`, which needs one of {known}"
    if kind != "verb":
        return said
    parser = parsers.get("show", next(iter(parsers.values())))
    required = (
        " ".join([*action.option_strings[:1], f"{action.metavar}"]) for action in parser._actions if action.required
    )
    return f"{said}; for example `{' '.join([parser.prog, *required])}`"


def understood(words: Sequence[str], parse: Callable[[Sequence[str]], Options]) -> Options:
    """Parse a command line. Errors are printed with the usage, or raised as `ConfigError` with `--json`."""
    try:
        return parse(words)
    except Misuse as misuse:
        if "--json" in words:
            raise ConfigError("usage_wrong", misuse.what, f"see `{misuse.program} --help`") from misuse
        remark(f"{misuse.usage}{misuse.program}: error: {misuse.what}")
        raise SystemExit(EXIT_USAGE) from misuse


@cache
def everywhere() -> Parser:
    """The options of all commands that use a daemon, before or after the command."""
    return _with_timeout(_with_daemon(), f"seconds to wait for a reply (default: {TIMEOUT_S:g})")


@cache
def with_or_without_daemon() -> Parser:
    """The options of commands that use a daemon only with `--job`."""
    text = f"seconds after which to stop (default: no limit; with --job {TIMEOUT_S:g} for a reply)"
    return _with_timeout(_with_daemon(), text)


@cache
def without_daemon() -> Parser:
    """The options of commands that use no daemon."""
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    return _with_timeout(parser, "seconds after which to stop (default: no limit)")


@cache
def computing() -> Parser:
    """The options of commands that only compute: they use no daemon and wait for nothing."""
    return _with_json(Parser(add_help=False, argument_default=argparse.SUPPRESS))


def _with_daemon() -> Parser:
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--socket", metavar="PATH", help="the daemon's Unix socket (default: $FORGED_SOCKET)")
    parser.add_argument(
        "--endpoint", metavar="URL", help="unix:///path, tcp://host:port or tls://host:port (default: $FORGED_ENDPOINT)"
    )
    parser.add_argument("--token", metavar="TEXT", help="access token (default: $FORGED_TOKEN)")
    return parser


def _with_timeout(parser: Parser, text: str) -> Parser:
    parser.add_argument("--timeout", type=seconds, metavar="S", help=text)
    return _with_json(parser)


def _with_json(parser: Parser) -> Parser:
    parser.add_argument("--json", action="store_true", help="print JSON, including errors")
    return parser


def command(commands: Any, name: str, text: str, fill: Fill, common: Parser) -> None:
    """Add a command; `fill` completes its parser when it is used."""
    parser: Parser = commands.add_parser(name, help=text, description=text, parents=[common])
    parser.fill = fill


def verb(
    verbs: Any, name: str, act: Act, text: str, aliases: Sequence[str] = (), common: Parser | None = None
) -> Parser:
    """Add a verb of a command."""
    parents = [common or everywhere()]
    parser: Parser = verbs.add_parser(name, help=text, description=text, aliases=aliases, parents=parents)
    parser.set_defaults(act=act)
    return parser


def imported(module: str, function: str) -> Act:
    """A function of a module that is imported when the command runs."""

    def act(options: Options) -> int:
        run: Act = getattr(import_module(module), function)
        return run(options)

    return act


def verbs_of(parser: Parser, act: Act) -> Any:
    """Where a command's verbs are added; `act` runs without a verb."""
    parser.set_defaults(act=act)
    return parser.add_subparsers(metavar="VERB")


def positional(parser: Parser, name: str, metavar: str, **options: Any) -> None:
    """Add a positional argument."""
    parser.add_argument(name, metavar=metavar, **options)


def add_reason(parser: Parser) -> None:
    """Add the optional `--reason`."""
    parser.add_argument("--reason", metavar="TEXT", help="the reason, recorded with the fact")
