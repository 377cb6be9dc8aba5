"""`forgectl ckpt convert`: a checkpoint in another layout, or to and from files of other tools.

Invariants:
- Existing files are never replaced.
- Values that the target cannot hold, and repaired chunks, are reported.
"""

from __future__ import annotations

import time
from typing import Any

from forged.checkpoint.export.conversion import ConversionOptions, Converted, convert
from forged.checkpoint.model import CheckpointFormat, CompressionLevel
from forged.checkpoint.ports import CancelToken
from forged.cli.ckpt.command import checkpoint_command
from forged.cli.ckpt.progress_bar import ProgressBar
from forged.cli.forgectl import tables
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_OK

TORCH = "dcp"
"""The format of a directory of `torch.distributed.checkpoint`."""


@checkpoint_command
def convert_one(options: Options, token: CancelToken) -> int:
    started_at = time.monotonic()
    with ProgressBar(options) as bar:
        how = ConversionOptions(
            None if options.format in (None, TORCH) else CheckpointFormat(options.format),
            CompressionLevel(options.compression),
            is_torch_directory=options.format == TORCH,
            progress=bar,
        )
        converted = convert(options.source, options.target, how, token)
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
        "repaired": [
            {"tensor": one.tensor, "rank": one.rank, "file": one.file, "chunk": one.chunk, "source": one.source}
            for one in converted.repaired
        ],
    }


def _show(options: Options, converted: Converted, took_s: float) -> None:
    tensors = tables.counted(converted.tensors, "tensor")
    target = tables.field("", options.target)
    print(f"{target}: {tensors}, {tables.size(converted.size_bytes)}, written in {tables.duration(took_s)}")
    if converted.left_out:
        print(f"  left out (the target cannot hold them): {tables.names(converted.left_out)}")
    for one in converted.repaired:
        where = tables.field("", f"chunk {one.chunk} of {one.tensor} in {one.file}")
        print(f"  {where} is corrupt; its bytes were read from {tables.field('', one.source)}")
