"""`forged`: the command that runs, checks, installs and demonstrates the daemon, and launches workers.

Modules are imported when a command needs them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from forged.cli.forgectl.parser import Misuse, understood
from forged.cli.process import EXIT_OK, print_error, run
from forged.cli.service import demo, install, launch
from forged.errors import ConfigError, ForgedError
from forged.version import VERSION

PROGRAM = "forged"
FLAGS = ("data_dir", "socket", "listen", "http", "plugin_dir", "log_level", "log_format")
"""The settings that have a command-line flag."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in words
    try:
        options = understood(words, partial(launch.parsed, parse=_parser().parse_args))
    except ConfigError as error:
        return print_error(PROGRAM, error, json=as_json)
    if options.act is not _run:
        return run(PROGRAM, partial(options.act, options), json=as_json)
    try:
        code: int = options.act(options)
    except ForgedError as error:
        return print_error(PROGRAM, error)
    except BaseExceptionGroup as group:
        # An error in the running daemon is wrapped by each of its task groups.
        errors, bugs = group.split(ForgedError)
        if errors is None or bugs is not None:
            raise
        return max(print_error(PROGRAM, error) for error in _leaves(errors))
    return code


def _leaves(group: BaseExceptionGroup[ForgedError]) -> Iterator[ForgedError]:
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _leaves(one)
        else:
            yield one


class _Parser(argparse.ArgumentParser):
    """Raises errors instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise Misuse(self, message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="The control plane of elastic ML training.")
    parser.add_argument("--version", action="version", version=f"forged {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("run", help="run the daemon in the foreground")
    serve.add_argument("--config", type=Path, metavar="FILE", help="configuration in TOML; the flags below override it")
    serve.add_argument("--data-dir", metavar="DIR", help="directory of the daemon's state")
    serve.add_argument("--socket", metavar="PATH", help="Unix socket for forgectl (default: $FORGED_SOCKET)")
    serve.add_argument(
        "--listen",
        metavar="HOST:PORT",
        action="append",
        help="address for workers; port 0 chooses a free port; repeatable",
    )
    serve.add_argument(
        "--http", metavar="HOST:PORT", help="address of the health and metrics endpoints; port 0 chooses a free port"
    )
    serve.add_argument("--plugin-dir", metavar="DIR", help="directory of plugins")
    serve.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    serve.add_argument("--log-format", metavar="FORMAT", help="json, pretty or auto (pretty on a terminal, else json)")
    serve.set_defaults(act=_run)
    check = commands.add_parser("check-config", help="validate a configuration and list all errors")
    check.add_argument("config", type=Path, metavar="FILE")
    check.set_defaults(act=_check_config)
    launch.add_parser(commands)
    install.add_parser(commands)
    demo.add_parser(commands)
    return parser


def _run(options: argparse.Namespace) -> int:
    # Imported here, because it would slow down the other commands.
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
