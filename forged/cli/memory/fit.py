"""`forgectl memory fit`: where a block would go."""

from __future__ import annotations

from forged.cli.forgectl import tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.memory.devices import size
from forged.cli.process import EXIT_FAILED, EXIT_OK
from forged.errors import PeerError
from forged.phrases import bytes_text

COLUMNS = ("device", "offset", "evicted", "moved", "reload_s", "reason")


def show_places(options: Options) -> int:
    fields = {"job": options.job, "size": options.size, "alignment": options.alignment, "limit": options.limit}
    with DaemonConnection(options) as daemon:
        places = daemon.request("FindFit", **fields)
    if not isinstance(places, list) or not all(isinstance(one, dict) for one in places):
        raise PeerError("answer_strange", "the daemon's reply to FindFit is no list", "compare versions")
    nothing = f"no device of job {options.job} can make room for {bytes_text(options.size)}"
    rows = list(map(_row, places))
    reply = {"job": options.job, "size": options.size, "alignment": options.alignment, "places": places}
    answer(options, reply, lambda: tables.table(rows, COLUMNS, nothing, yielding=("reason",), kept="device"))
    return EXIT_OK if places else EXIT_FAILED


def _row(place: Row) -> Row:
    moved = {"evicted": size(place.get("evicted_bytes")), "moved": size(place.get("moved_bytes"))}
    return place | moved
