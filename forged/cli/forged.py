"""`forged`: the command that runs the daemon, and sees to what it runs with.

Law: what a command needs is loaded when it is called.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from forged.cli.forgectl.parser import Misuse, understood
from forged.cli.process import EXIT_OK, complain, run
from forged.cli.service import demo, install
from forged.errors import ConfigError, ForgedError
from forged.version import VERSION

PROGRAM = "forged"
FLAGS = ("data_dir", "socket", "listen", "http", "plugin_dir", "log_level", "log_format")
"""The settings that have a flag."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in words
    try:
        options = understood(words, _parser().parse_args)
    except ConfigError as error:
        return complain(PROGRAM, error, json=as_json)
    if options.act is not _run:
        return run(PROGRAM, partial(options.act, options), json=as_json)
    try:
        code: int = options.act(options)
    except ForgedError as error:
        return complain(PROGRAM, error)
    except BaseExceptionGroup as group:
        # What goes wrong while the daemon runs comes out of its task groups, wrapped once for each.
        errors, bugs = group.split(ForgedError)
        if errors is None or bugs is not None:
            raise
        return max(complain(PROGRAM, error) for error in _leaves(errors))
    return code


def _leaves(group: BaseExceptionGroup[ForgedError]) -> Iterator[ForgedError]:
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _leaves(one)
        else:
            yield one


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise Misuse(self, message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="The control plane of elastic ML training.")
    parser.add_argument("--version", action="version", version=f"forged {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("run", help="run the daemon in the foreground")
    serve.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML; the flags below override it")
    serve.add_argument("--data-dir", metavar="DIR", help="where the state is kept")
    serve.add_argument("--socket", metavar="PATH", help="the Unix socket for forgectl (default: $FORGED_SOCKET)")
    serve.add_argument("--listen", metavar="HOST:PORT", action="append", help="where workers connect; port 0 means any")
    serve.add_argument("--http", metavar="HOST:PORT", help="where health and metrics are served; port 0 means any")
    serve.add_argument("--plugin-dir", metavar="DIR", help="where plugins are")
    serve.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    serve.add_argument("--log-format", metavar="FORMAT", help="json, pretty or auto: pretty on a terminal")
    serve.set_defaults(act=_run)
    check = commands.add_parser("check-config", help="say whether a configuration is valid, and all that is not")
    check.add_argument("config", type=Path, metavar="FILE")
    check.set_defaults(act=_check_config)
    install.add_parser(commands)
    demo.add_parser(commands)
    return parser


def _run(options: argparse.Namespace) -> int:
    # Late, so that the other commands need not wait for it.
    from forged.cli.service.serve import Process

    Process(options.config, _flags(options)).run()
    return EXIT_OK


def _check_config(options: argparse.Namespace) -> int:
    from forged.cli.service.check_config import check

    check(options.config)
    print(f"{options.config} is valid")
    return EXIT_OK


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(options, key) for key in FLAGS}


if __name__ == "__main__":
    sys.exit(main())
