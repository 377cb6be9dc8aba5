"""`forged demo`: elastic training on this machine that survives kill -9, and the proof that its result is right."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forged.cli.process import EXIT_FAILED, EXIT_OK, stop_writing
from forged.errors import ForgedError

WORKERS, WORKERS_MIN, WORKERS_MAX = 4, 2, 32
"""At least two, so that a worker survives; more than 32 would show nothing new."""
STEPS, STEPS_MIN, STEPS_MAX = 600, 1, 100_000
DIGITS_MAX = 9


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "demo", help="train on this machine, kill workers with -9, and prove that the result is right"
    )
    parser.add_argument(
        "--workers", type=_whole(WORKERS_MIN, WORKERS_MAX), default=WORKERS, metavar="N", help="number of workers"
    )
    parser.add_argument(
        "--steps",
        type=_whole(STEPS_MIN, STEPS_MAX),
        default=STEPS,
        metavar="S",
        help="number of training steps (minimum)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep records, logs and state in this new directory")
    parser.set_defaults(act=demonstrate)


def demonstrate(options: argparse.Namespace) -> int:
    """Run the demo; fails if any check fails."""
    from forged.demo.scenario import run_demo

    try:
        is_right = run_demo(options.workers, options.steps, options.keep, as_json=options.json)
    except BrokenPipeError as error:
        # For other commands that is no failure; here the proof was not read.
        stop_writing()
        raise ForgedError(
            "output_unread",
            "the reader closed the output, so the demo stopped before its proof",
            "read the output to its end",
        ) from error
    return EXIT_OK if is_right else EXIT_FAILED


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text) if text.isdecimal() and len(text) <= DIGITS_MAX else -1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"must be an integer in [{low}, {high}], got {text!r}")
        return number

    return parse
