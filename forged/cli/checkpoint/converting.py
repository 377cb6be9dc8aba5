"""`forgectl ckpt convert`: a checkpoint in another format, or from and to the files of other tools.

Law: nothing that was there is touched. What the target cannot hold, and what had to be read elsewhere, is told.
"""

from __future__ import annotations

import time
from typing import Any

from forged.checkpoint.conversion import Converted, How, convert
from forged.checkpoint.model import CheckpointFormat, CompressionLevel
from forged.checkpoint.ports import Halt
from forged.cli import show
from forged.cli.checkpoint.acting import acting
from forged.cli.checkpoint.bar import Bar
from forged.cli.grammar import Options
from forged.cli.output import answer
from forged.cli.process import EXIT_OK


@acting
def convert_one(options: Options, halt: Halt) -> int:
    """Make a target of a source."""
    started_at = time.monotonic()
    with Bar(options) as bar:
        how = How(
            None if options.format is None else CheckpointFormat(options.format),
            CompressionLevel(options.compression),
            tell=bar,
        )
        converted = convert(options.source, options.target, how, halt)
    took_s = time.monotonic() - started_at
    answer(options, _as_json(options, converted, took_s), lambda: _show(options, converted, took_s))
    return EXIT_OK


def _as_json(options: Options, converted: Converted, took_s: float) -> dict[str, Any]:
    return {
        "source": options.source,
        "target": options.target,
        "tensors": converted.tensors,
        "size_bytes": converted.size_bytes,
        "seconds": took_s,
        "left_out": list(converted.left_out),
        "mended": [
            {"tensor": one.tensor, "rank": one.rank, "file": one.file, "chunk": one.chunk, "source": one.source}
            for one in converted.mended
        ],
    }


def _show(options: Options, converted: Converted, took_s: float) -> None:
    tensors = show.counted(converted.tensors, "tensor")
    target = show.field("", options.target)
    print(f"{target} has {tensors}, {show.size(converted.size_bytes)}, in {show.duration(took_s)}")
    if converted.left_out:
        print(f"  left out, being no arrays: {show.names(converted.left_out)}")
    for one in converted.mended:
        where = show.field("", f"chunk {one.chunk} of {one.tensor} in {one.file}")
        print(f"  {where} is damaged; the same bytes were read from {show.field('', one.source)}")
