"""`forgectl memory devices`, `stats` and `forecast`: the devices of jobs, how full they are, and for how long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_OK
from forged.phrases import bytes_text
from forged.plain_client.connection import PlainConnection

DEVICE_COLUMNS = ("device", "job", "total", "held", "cached", "free", "pressure", "waiting", "out of memory")
STATS_COLUMNS = (
    *("device", "job", "total", "allocated", "pinned", "cached", "free", "largest free", "fragmentation"),
    *("blocks", "allocations"),
)

FORECAST_COLUMNS = ("device", "job", "pressure", "obtainable", "rate", "out of memory", "between", "samples")
NOTHING = "no devices; a worker registers its own"
REMOVED = frozenset({"job_unknown"})
"""The job was removed between two requests."""


def show_devices(options: Options) -> int:
    return _show(options, DEVICE_COLUMNS, _device_row, ())


def show_stats(options: Options) -> int:
    return _show(options, STATS_COLUMNS, _stats_row, ("stats",))


def show_forecasts(options: Options) -> int:
    return _show(options, FORECAST_COLUMNS, _forecast_row, ("pressure", "forecast"))


def _show(options: Options, columns: tuple[str, ...], row: Any, fields: tuple[str, ...]) -> int:
    """Print a table, or as JSON these fields of each device; without fields all."""
    with DaemonConnection(options) as daemon:
        devices = list(listed(daemon, options.job))
    named = ("job", "name", *fields)
    found = [{key: one[key] for key in named if key in one} for one in devices] if fields else devices
    rows = list(map(row, devices))
    answer(options, {"devices": found}, lambda: tables.table(rows, columns, NOTHING, yielding=("job",), kept="device"))
    return EXIT_OK


def listed(daemon: PlainConnection, job: str | None, after: str = "", pages_max: int | None = None) -> Iterator[Row]:
    """The devices of a job, or of all jobs."""
    for name in [job] if job else _jobs(daemon):
        yield from answers.pages_unless(
            daemon,
            frozenset() if job else REMOVED,
            "ListDevices",
            field="devices",
            key="name",
            after=after,
            pages_max=pages_max,
            job=name,
        )


def _jobs(daemon: PlainConnection) -> Iterable[str]:
    return (f"{one.get('name')}" for one in answers.pages(daemon, "ListJobs", field="jobs", key="name"))


# Rows.


def _device_row(view: Row) -> Row:
    stats = answers.map_in(view, "stats")
    cached = answers.count_in(stats, "cached_bytes")
    return _named(view) | {
        "total": size(stats.get("total_bytes")),
        "held": size(answers.count_in(stats, "allocated_bytes") - cached),
        "cached": size(cached),
        "free": size(stats.get("free_bytes")),
        "pressure": percent(view.get("pressure")),
        "waiting": view.get("waiting"),
        "out of memory": "asserting" if view.get("is_asserting") else until(view),
    }


def _stats_row(view: Row) -> Row:
    stats = answers.map_in(view, "stats")
    return _named(view) | stats_in_words(stats)


def stats_in_words(stats: Row) -> Row:
    return {
        "total": size(stats.get("total_bytes")),
        "allocated": size(stats.get("allocated_bytes")),
        "pinned": size(stats.get("pinned_bytes")),
        "cached": size(stats.get("cached_bytes")),
        "free": size(stats.get("free_bytes")),
        "largest free": size(stats.get("largest_free_block")),
        "fragmentation": percent(stats.get("fragmentation_ratio")),
        "blocks": stats.get("block_count"),
        "allocations": stats.get("allocation_count"),
    }


def _forecast_row(view: Row) -> Row:
    return _named(view) | {"pressure": percent(view.get("pressure"))} | forecast_in_words(view)


def forecast_in_words(view: Row) -> Row:
    forecast = answers.map_in(view, "forecast")
    low, high = forecast.get("low_s"), forecast.get("high_s")
    rate = forecast.get("rate_bytes_per_s")
    return {
        "obtainable": size(forecast.get("obtainable_bytes")),
        "rate": _rate(rate) if forecast.get("samples") else tables.NONE,
        "out of memory": until(view),
        "between": f"{_in(low)} to {_in(high)}" if _is_number(low) or _is_number(high) else tables.NONE,
        "samples": forecast.get("samples"),
    }


def _named(view: Row) -> Row:
    return {"device": view.get("name"), "job": view.get("job")}


# Values.


def size(value: Any) -> str:
    """A number of bytes; the value itself if it is none."""
    return bytes_text(round(value)) if _is_number(value) else tables.field("", value)


def percent(value: Any) -> str:
    return f"{value:.1%}" if _is_number(value) else tables.field("", value)


def until(view: Row) -> str:
    """When a device runs out of memory at the present rate."""
    seconds = answers.map_in(view, "forecast").get("seconds")
    if not _is_number(seconds):
        return "not soon"
    return f"in {_in(seconds)}" if seconds > 0 else "now"


def _in(seconds: Any) -> str:
    if not _is_number(seconds):
        return "never"
    return tables.duration(seconds) if seconds > 0 else "now"


def _rate(bytes_per_s: Any) -> str:
    sign = "-" if _is_number(bytes_per_s) and bytes_per_s < 0 else ""
    return f"{sign}{bytes_text(round(abs(bytes_per_s)))}/s" if _is_number(bytes_per_s) else tables.NONE


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
