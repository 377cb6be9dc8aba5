"""`forgectl memory ls` and `show`: the blocks of a device, and the device as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.memory import pictures
from forged.cli.memory.devices import forecast_in_words, listed, percent, size, stats_in_words
from forged.cli.process import EXIT_OK
from forged.errors import PeerError
from forged.memory.model import MemoryBlock
from forged.memory.pictures import blocks_text, draw_blocks
from forged.plain_client.connection import PlainConnection

COLUMNS = ("offset", "size", "status", "tensor", "worker", "name", "version", "priority", "content")
YIELDING = ("content", "priority", "version", "worker")


def show_blocks(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        blocks = list(_blocks(daemon, options.job, options.device))
    shown = [one for one in blocks if options.free or one.get("worker_id")]
    rows = list(map(_row, shown))
    nothing = f"device {options.device} has no blocks"
    answer(
        options,
        {"device": options.device, "blocks": shown},
        lambda: tables.table(rows, COLUMNS, nothing, yielding=YIELDING, kept="tensor"),
    )
    return EXIT_OK


def show_device(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        # Of an unknown device this is refused by name.
        blocks = list(_blocks(daemon, options.job, options.device))
        views = [one for one in listed(daemon, options.job, options.device[:-1]) if one.get("name") == options.device]
    view = views[0] if views else {}
    drawn = [_as_block(one) for one in blocks]
    if options.picture:
        pictures.write(draw_blocks(drawn, options.device), options.picture)

    def show() -> None:
        tables.pairs(_fields(view))
        print()
        pictures.show(blocks_text(drawn, width=pictures.columns()))

    answer(options, {"device": view, "blocks": blocks}, show)
    return EXIT_OK


def _as_block(held: Row) -> MemoryBlock:
    try:
        return msgspec.convert(held.get("block"), MemoryBlock, strict=False)
    except msgspec.ValidationError as error:
        raise PeerError("answer_strange", f"a block in the daemon's reply: {error}", "compare versions") from error


def _fields(view: Row) -> Row:
    device = answers.map_in(view, "device")
    capability = ".".join(map(str, answers.list_in(device, "compute_capability")))
    fields: Row = {"device": view.get("name"), "job": view.get("job")}
    if capability not in ("", "0.0"):
        fields["compute capability"] = capability
    fields |= stats_in_words(answers.map_in(view, "stats"))
    fields |= {"evictable": size(view.get("evictable_bytes")), "eviction": view.get("eviction")}
    fields |= {"pressure": percent(view.get("pressure"))}
    fields |= forecast_in_words(view) | {"waiting": view.get("waiting")}
    plan = answers.map_in(view, "offset_plan") if view.get("offset_plan") else {}
    if plan:
        fields["planned offsets"] = (
            f"{plan.get('blocks')} blocks, up to {size(plan.get('height'))}; "
            f"{plan.get('placed')} placed, {plan.get('missed')} missed"
        )
    if view.get("is_asserting"):
        fields["state"] = "asserting: the daemon has restarted and waits for the owners of blocks"
    return fields


def _row(held: Row) -> Row:
    block, handle = answers.map_in(held, "block"), answers.list_in(held, "handle")
    is_held = bool(held.get("worker_id"))
    name, version = handle if is_held and len(handle) == len(("name", "version")) else (None, None)
    return {
        "offset": block.get("offset"),
        "size": size(block.get("size")),
        "status": block.get("status"),
        "tensor": block.get("tensor_id"),
        "worker": held.get("worker_id") or None,
        "name": name,
        "version": version,
        "priority": block.get("priority") if is_held else None,
        "content": held.get("content") or None,
    }


def _blocks(daemon: PlainConnection, job: str, device: str) -> Iterator[Row]:
    """The blocks by offset, free ones too."""
    start, more = 0, True
    while more:
        page = answers.one(daemon, "ListBlocks", job=job, device=device, start=start)
        blocks = answers.rows_in(page, "blocks")
        yield from blocks
        more, end = bool(page.get("more")), _end(blocks)
        if more and end <= start:
            raise PeerError("answer_strange", f"a page of the blocks of {device} does not end behind offset {start}")
        start = end


def _end(blocks: Sequence[Row]) -> int:
    block: Any = answers.map_in(blocks[-1], "block") if blocks else {}
    return answers.count_in(block, "offset") + answers.count_in(block, "size")
