"""`forgectl slots`: memory of the daemon's host that outlives workers."""

from __future__ import annotations

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options, Parser
from forged.cli.process import EXIT_OK

COLUMNS = ("slot_id", "job", "worker_id", "owner", "size", "step", "rank", "world_size", "storage_path")


def fill(slots: Parser) -> None:
    """Add the option."""
    slots.add_argument("--job", default="", metavar="JOB", help="only the slots of this job")
    slots.set_defaults(act=_list)


def _list(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        page = answers.whole(daemon, "ListSlots", field="slots", key="slot_id", job=options.job)
    slots = answers.rows_in(page, "slots")
    rows = [slot | {"size": tables.size(slot["size_bytes"])} if "size_bytes" in slot else slot for slot in slots]
    answer(options, page, lambda: tables.table(rows, COLUMNS, "no slots", yielding=("slot_id", "storage_path")))
    return EXIT_OK
