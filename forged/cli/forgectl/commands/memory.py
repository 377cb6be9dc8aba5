"""The grammar of `forgectl memory`: GPU memory.

Invariants:
- A device is named as `WORKER/DEVICE` within its job.
- A command's module is imported when the command runs.
"""

from __future__ import annotations

import argparse
from typing import Any

from forged.cli.forgectl.parser import Parser, computing, imported, positional, verb, verbs_of
from forged.cli.forgectl.values import byte_count, count

MODULES = "forged.cli.memory"
POLICIES = ("best_fit", "first_fit", "worst_fit", "pool", "lru", "cost")
SIZES = "such as 1048576, 512MiB or 80GB"
EPILOG = """\
A device is named WORKER/DEVICE, such as w0/gpu0. A size is a number of bytes, or has a unit: kB, MB, GB,
TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024)."""


def fill(memory: Parser) -> None:
    """Add the verbs."""
    memory.epilog = EPILOG
    memory.formatter_class = argparse.RawDescriptionHelpFormatter
    memory.set_defaults(job=None)
    listing = imported(f"{MODULES}.devices", "show_devices")
    verbs = verbs_of(memory, listing)
    _of_any_job(verb(verbs, "devices", listing, "list devices, with how full they are"))
    text = "show the statistics of each device's pool"
    _of_any_job(verb(verbs, "stats", imported(f"{MODULES}.devices", "show_stats"), text))
    text = "show when devices run out of memory at the present rate"
    _of_any_job(verb(verbs, "forecast", imported(f"{MODULES}.devices", "show_forecasts"), text))
    _blocks(verbs)
    _fit(verbs)
    _traces(verbs)


def _blocks(verbs: Any) -> None:
    listing = verb(verbs, "ls", imported(f"{MODULES}.blocks", "show_blocks"), "list the blocks of a device by offset")
    showing = verb(
        verbs, "show", imported(f"{MODULES}.blocks", "show_device"), "show a device with a map of its blocks"
    )
    for parser in (listing, showing):
        positional(parser, "device", "DEVICE", help="such as w0/gpu0")
        _of_job(parser)
    _picture(showing)
    listing.add_argument("--free", action="store_true", help="list free blocks too")


def _fit(verbs: Any) -> None:
    text = "show where in a job's devices a block would go, and what would give way; changes nothing"
    fitting = verb(verbs, "fit", imported(f"{MODULES}.fit", "show_places"), text)
    positional(fitting, "size", "SIZE", type=byte_count, help=SIZES)
    _of_job(fitting)
    fitting.add_argument(
        "--alignment", type=byte_count, default=256, metavar="SIZE", help="a power of two (default: 256)"
    )
    fitting.add_argument("--limit", type=count, default=20, metavar="N", help="at most so many places (default: 20)")


def _traces(verbs: Any) -> None:
    text = "find an offset for each buffer of a trace, so that all of them fit"
    planning = verb(verbs, "plan", imported(f"{MODULES}.traces", "plan_trace"), text, common=computing())
    text = "replay a trace with an allocation policy: how much memory it needs, and what it evicts"
    replaying = verb(verbs, "replay", imported(f"{MODULES}.traces", "replay_trace"), text, common=computing())
    for parser in (planning, replaying):
        positional(parser, "file", "FILE", help="a CSV of lifetimes, a log of RMM, or a memory snapshot of PyTorch")
        parser.add_argument("--device", type=count, metavar="N", help="which device of a PyTorch snapshot")
        _picture(parser)
        parser.add_argument(
            "--alignment",
            type=byte_count,
            default=1,
            metavar="SIZE",
            help="of all buffers, a power of two (default: 1)",
        )
    planning.add_argument("--capacity", type=byte_count, metavar="SIZE", help=f"{SIZES} (default: the lowest found)")
    planning.add_argument("--nodes-max", type=count, metavar="N", help="bound of the search (default: half a minute)")
    replaying.add_argument(
        "--capacity", type=byte_count, action="append", metavar="SIZE", help=f"{SIZES}; repeatable (default: no limit)"
    )
    replaying.add_argument(
        "--policy", choices=POLICIES, action="append", help="where blocks go; repeatable (default: best_fit)"
    )


def _picture(parser: Parser) -> None:
    parser.add_argument("--picture", metavar="FILE", help="draw it into this file too: .svg or .png")


def _of_any_job(parser: Parser) -> None:
    parser.add_argument("--job", default=argparse.SUPPRESS, metavar="JOB", help="only this job (default: all)")


def _of_job(parser: Parser) -> None:
    parser.add_argument("--job", required=True, metavar="JOB", help="the job")
