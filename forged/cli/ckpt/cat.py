"""`forgectl ckpt cat`: the first elements and the statistics of a tensor, or the whole tensor as a `.npy` file.

Invariants:
- Only verified bytes are shown, and at most one block of them is in memory.
- A file appears as a whole or not at all, and replaces an existing one only with `--force`.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any

import numpy as np

from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.format.boxes import Box, Grid, chunks, grid_of, whole
from forged.checkpoint.format.dtypes import EXTENDED
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.loading.fetching import bytes_of
from forged.checkpoint.loading.lazy_view import CheckpointView, TensorInfo
from forged.checkpoint.ports import CancelToken
from forged.cli.ckpt.command import checkpoint_command
from forged.cli.ckpt.progress_bar import ProgressBar
from forged.cli.ckpt.show import shape_text
from forged.cli.ckpt.statistics import Statistics, has_statistics, plain_elements
from forged.cli.ckpt.target import open_checkpoint
from forged.cli.ckpt.values import displayable, plain_values
from forged.cli.forgectl import tables
from forged.cli.forgectl.commands.backup import write_whole
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_OK
from forged.errors import RequestRefused

BLOCK_BYTES = 64 << 20
"""The memory for one block, unless a chunk is larger."""
HEAD = 8
MODE = 0o666
"""The mode of a new file, before the umask."""
NEAREST_MAX = 3
SHOWN_IF_NOT_ZERO = frozenset({"nan", "infinite"})
"""Counts that are left out of the text output when they are zero."""

Array = np.ndarray[Any, Any]


@checkpoint_command
def show_tensor(options: Options, token: CancelToken) -> int:
    _require_new(options)
    storage, manifest = open_checkpoint(options.where, token)
    if (options.tensor, options.rank) in (values := plain_values(manifest)) and options.out is None:
        value = displayable(values[options.tensor, options.rank])
        result = {"name": options.tensor, "rank": options.rank, "value": value}
        answer(options, result, lambda: print(tables.field("", value)))
        return EXIT_OK
    rank = _owner(manifest, options.tensor, options.rank)
    with CheckpointView(storage, manifest, rank=rank or 0, token=lambda: token) as view:
        info = view.info(options.tensor)
        row = {
            "name": info.name,
            "rank": info.rank,
            "dtype": manifest.tensors.dtypes[_number(manifest, options.tensor, info.rank)],
            "shape": list(info.shape),
            "size_bytes": info.nbytes,
        }
        with ProgressBar(options, info.name) as bar:
            row |= _write_npy(view, info, bar, options.out) if options.out else _summary(view, info, bar)
    answer(options, row, lambda: _show(row))
    return EXIT_OK


def _require_new(options: Options) -> None:
    """Refuse to replace an existing file without `--force`."""
    if options.out is not None and not options.force and os.path.lexists(options.out):
        raise RequestRefused(
            "file_exists", f"{options.out} exists already", "name another file, or add --force to replace it"
        )


def _owner(manifest: Manifest, name: str, asked: int | None) -> int | None:
    """The rank of the wanted tensor if it is a per-rank one; refuses an ambiguous name."""
    ranks = manifest.tensors.ranks
    owners = [ranks.get(number) for number, one in enumerate(manifest.tensors.names) if one == name]
    if asked in owners:
        return asked
    if not owners:
        raise _unknown(manifest, name)
    own = sorted(owner for owner in owners if owner is not None)
    if asked is None and len(own) == 1:
        return own[0]
    if not own:
        # The tensor is common to all ranks, so the given rank has it too.
        return None
    if asked is None:
        raise invalid(f"{len(own):,} ranks have their own {name}", f"name one rank, such as --rank {own[0]}")
    raise CheckpointException(
        f"rank {asked} has no tensor {name} in {manifest.prefix}",
        manifest.prefix,
        ExceptionType.LOAD_FAILED,
        code="checkpoint_tensor_unknown",
        fix=f"ranks with this tensor: {tables.names(own)}",
    )


def _number(manifest: Manifest, name: str, owner: int | None) -> int:
    """The number of the tensor."""
    ranks = manifest.tensors.ranks
    names = enumerate(manifest.tensors.names)
    return next(number for number, one in names if one == name and ranks.get(number) == owner)


def _unknown(manifest: Manifest, name: str) -> CheckpointException:
    near = get_close_matches(name, manifest.tensors.names, NEAREST_MAX)
    return CheckpointException(
        f"{manifest.prefix} has no tensor {name!r}",
        manifest.prefix,
        ExceptionType.LOAD_FAILED,
        code="checkpoint_tensor_unknown",
        fix=f"did you mean {' or '.join(near)}?" if near else "`forgectl ckpt show` lists the names",
    )


def _blocks(view: CheckpointView, info: TensorInfo, bar: ProgressBar) -> Iterator[Array]:
    """The tensor in blocks of whole chunks, in C order."""
    done = 0
    for box in _boxes(info):
        block = view.box(info.name, box.offset, box.shape)
        yield block
        done += block.nbytes
        bar(done, info.nbytes)


def _boxes(info: TensorInfo) -> Iterator[Box]:
    if not info.nbytes:
        return iter(())
    axis, step = grid_of(info.shape, info.dtype.itemsize)
    behind = math.prod(info.shape[axis + 1 :]) * info.dtype.itemsize
    return chunks(whole(info.shape), Grid(axis, step * max(1, BLOCK_BYTES // (step * behind))))


def _summary(view: CheckpointView, info: TensorInfo, bar: ProgressBar) -> dict[str, Any]:
    """The first elements and the statistics."""
    head: list[Any] = []
    statistics = Statistics() if has_statistics(info.dtype) else None
    for block in _blocks(view, info, bar):
        flat = block.reshape(-1)
        head = head or plain_elements(flat[:HEAD])
        if statistics is None:
            break
        statistics.add(flat)
    return {"head": head, "statistics": None if statistics is None else statistics.summary()}


def _write_npy(view: CheckpointView, info: TensorInfo, bar: ProgressBar, file: str) -> dict[str, Any]:
    """Write the whole tensor to a `.npy` file."""
    header = io.BytesIO()
    is_raw = info.dtype.name in EXTENDED
    npy_header = {
        "descr": f"|V{info.dtype.itemsize}" if is_raw else np.lib.format.dtype_to_descr(info.dtype),
        "fortran_order": False,
        "shape": info.shape,
    }
    np.lib.format.write_array_header_1_0(header, npy_header)

    def pieces() -> Iterator[bytes | memoryview]:
        yield header.getvalue()
        yield from map(bytes_of, _blocks(view, info, bar))

    write_whole(file, pieces(), mode=MODE, code="file_unwritable")
    return {"file": file}


def _show(row: dict[str, Any]) -> None:
    fields = {"dtype": row["dtype"], "shape": shape_text(row["shape"]), "size": tables.size(row["size_bytes"])}
    if row["rank"] is not None:
        fields = {"rank": row["rank"], **fields}
    if "file" in row:
        fields |= {"file": row["file"]}
        if row["dtype"] in EXTENDED:
            fields |= {"to read it": f"numpy.load(…).view(ml_dtypes.{row['dtype']})"}
    tables.pairs({"name": row["name"], **fields, **_as_text(row)})


def _figure(value: Any) -> Any:
    return tables.rounded(value) if isinstance(value, float) else value


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    if "head" not in row:
        return {}
    elements = math.prod(row["shape"])
    shown = ", ".join(tables.field("", one) for one in islice(row["head"], HEAD))
    statistics = (row["statistics"] or {}).items()
    return {
        "head": f"{shown}, {tables.CUT}" if elements > HEAD else shown,
        **{
            key: _figure(value)
            for key, value in statistics
            if value is not None and (value or key not in SHOWN_IF_NOT_ZERO)
        },
    }
