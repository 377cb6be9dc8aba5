"""`forged demo`: elastic training on this machine, under kill -9, and the proof that it was right.

Law: what is asked for is checked before anything starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forged.cli.process import EXIT_FAILED, EXIT_OK, stop_writing
from forged.errors import ForgedError

WORKERS, WORKERS_MIN, WORKERS_MAX = 4, 2, 32
"""With fewer nobody survives; more processes would show nothing else."""
STEPS, STEPS_MIN, STEPS_MAX = 600, 1, 100_000
DIGITS_MAX = 9


def add_parser(commands: Any) -> None:
    """Let the command line know the command."""
    parser = commands.add_parser("demo", help="see elastic training survive kill -9, on this machine, and proven right")
    parser.add_argument(
        "--workers", type=_whole(WORKERS_MIN, WORKERS_MAX), default=WORKERS, metavar="N", help="how many train together"
    )
    parser.add_argument(
        "--steps", type=_whole(STEPS_MIN, STEPS_MAX), default=STEPS, metavar="S", help="how many steps at least"
    )
    parser.add_argument("--json", action="store_true", help="one object at the end, for programs")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave records, logs and state in this new directory")
    parser.set_defaults(act=demonstrate)


def demonstrate(options: argparse.Namespace) -> int:
    """Show it; fails when anything was not right."""
    from forged.demo.scenario import perform

    try:
        is_right = perform(options.workers, options.steps, options.keep, as_json=options.json)
    except BrokenPipeError as error:
        # For other commands that is no failure; here it is the proof that nobody has seen.
        stop_writing()
        raise ForgedError(
            "output_unread",
            "nobody reads the output any more, so it was broken off before the proof",
            "read it to its end",
        ) from error
    return EXIT_OK if is_right else EXIT_FAILED


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text) if text.isdecimal() and len(text) <= DIGITS_MAX else -1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return number

    return parse
