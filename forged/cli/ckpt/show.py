"""`forgectl ckpt show`: the contents of a checkpoint.

Invariants:
- Only the manifest is read.
- On a terminal, long lists are shortened, with the number of omitted rows; pipes and `--json` get everything.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.ports import CancelToken
from forged.cli.ckpt.command import checkpoint_command
from forged.cli.ckpt.ls import checkpoint_row
from forged.cli.ckpt.target import open_checkpoint
from forged.cli.ckpt.values import displayable, plain_values
from forged.cli.forgectl import tables
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_OK

SHOWN_MAX = 40
"""The longest list on a terminal."""
FILES_SHOWN_MAX = 12
VALUES_SHOWN_MAX = 12
TENSOR_COLUMNS = ("name", "rank", "dtype", "shape", "size", "pieces")

Row = dict[str, Any]


@checkpoint_command
def show_one(options: Options, token: CancelToken) -> int:
    storage, manifest = open_checkpoint(options.where, token)
    tensors = matching_rows(_tensors(manifest), options.tensors, manifest.prefix)
    whole = checkpoint_row(manifest) | {
        "url": storage.url,
        "files": [_file(manifest, number) for number in range(len(manifest.parts))],
        "extra_files": manifest.extra_files,
        "sections": _sections(manifest),
        "tensors": tensors,
        "values": [
            {"name": name, "rank": rank, "value": displayable(node)}
            for (name, rank), node in plain_values(manifest).items()
        ],
        "custom": manifest.custom,
    }
    answer(options, whole, lambda: _show(whole, manifest, is_whole=options.all))
    return EXIT_OK


def matching_rows(rows: Sequence[Row], pattern: str | None, prefix: str) -> list[Row]:
    """The rows whose names match; no match is an error, as a mistyped name would be."""
    if pattern is None:
        return list(rows)
    found = [row for row in rows if row["name"] == pattern or fnmatchcase(row["name"], pattern)]
    if not found:
        raise CheckpointException(
            f"no tensor of {prefix} matches {pattern!r}",
            prefix,
            ExceptionType.LOAD_FAILED,
            code="checkpoint_tensor_unknown",
            fix="`forgectl ckpt show` lists the names",
        )
    return found


def shown_rows(rows: Sequence[Row], shown_max: int, *, is_whole: bool) -> tuple[Sequence[Row], int]:
    """The rows to show on a terminal, and how many are left out."""
    if is_whole or not sys.stdout.isatty() or len(rows) <= shown_max:
        return rows, 0
    return rows[: shown_max - 1], len(rows) - shown_max + 1


def print_rest(left_out: int, what: str) -> None:
    """Print how many rows were left out."""
    if left_out:
        print(f"and {left_out:,} more {what}: --all shows them")


def shape_text(shape: Sequence[int]) -> str:
    """The shape as text, such as 3×4."""
    return "×".join(map(str, shape)) or "scalar"


def _tensors(manifest: Manifest) -> list[Row]:
    """All tensors, in order."""
    columns = manifest.tensors
    pieces = _pieces(manifest)
    sizes = _sizes(manifest)
    return [
        {
            "name": name,
            "rank": columns.ranks.get(number),
            "dtype": columns.dtypes[number],
            "shape": list(columns.shapes[number]),
            "size_bytes": sizes[number],
            "pieces": pieces[number],
        }
        for number, name in enumerate(columns.names)
    ]


def _pieces(manifest: Manifest) -> list[int]:
    """The number of pieces of each tensor, copies included."""
    counts = np.zeros(len(manifest.tensors.names), np.int64)
    for part in manifest.parts:
        np.add.at(counts, np.array(part.tensors, np.int64), 1)
    found: list[int] = counts.tolist()
    return found


def _sizes(manifest: Manifest) -> list[int]:
    columns = manifest.tensors
    kinds = list(zip(columns.shapes, columns.dtypes, strict=True))
    known = {kind: int(np.prod(kind[0], dtype=object)) * dtype_of(kind[1]).itemsize for kind in set(kinds)}
    return [known[kind] for kind in kinds]


def _sections(manifest: Manifest) -> list[Row]:
    """The top-level keys of the state, with their tensors and bytes."""
    found: dict[str, Row] = {}
    for name, size in zip(manifest.tensors.names, _sizes(manifest), strict=True):
        first = name.partition("/")[0]
        row = found.setdefault(first, {"section": first, "tensors": 0, "size_bytes": 0})
        row["tensors"] += 1
        row["size_bytes"] += size
    return list(found.values())


def _file(manifest: Manifest, number: int) -> Row:
    part = manifest.parts[number]
    its = "" if not part.is_referenced else next(link.prefix for link in manifest.links if link.has_file(part.file))
    row: Row = {"file": part.file, "rank": part.rank, "size_bytes": part.size, "pieces": len(part.tensors)}
    return row | ({"of_checkpoint": its} if its else {})


# Text output.


def _show(whole: Row, manifest: Manifest, *, is_whole: bool) -> None:
    head = {key: whole[key] for key in ("prefix", "url", "created_at", "job", "step", "epoch")}
    size = tables.size(whole["size_bytes"])
    files = len(manifest.own_parts) + len(whole["extra_files"])
    layout = f"{whole['layout']}, compression {whole['compression']}, version {whole['version']}"
    tables.pairs(
        {key: value for key, value in head.items() if value is not None}
        | ({"parent": whole["parent"], "chain": " ← ".join(whole["chain"])} if whole["parent"] else {})
        | {"ranks": manifest.world_size, "layout": layout, "size": f"{size} in {tables.counted(files, 'file')}"}
        | ({"custom": manifest.custom} if manifest.custom else {})
    )
    files_of_all = whole["files"] + [
        {"file": file, "rank": None, "size_bytes": size, "pieces": None} for file, size in whole["extra_files"].items()
    ]
    _list(files_of_all, ("file", "rank", "pieces", "size"), FILES_SHOWN_MAX, "files", is_whole=is_whole)
    _list(whole["sections"], ("section", "tensors", "size"), SHOWN_MAX, "sections", is_whole=is_whole)
    tensors = [row | {"shape": shape_text(row["shape"])} for row in whole["tensors"]]
    _list(tensors, TENSOR_COLUMNS, SHOWN_MAX, "tensors", is_whole=is_whole)
    _list(whole["values"], ("name", "rank", "value"), VALUES_SHOWN_MAX, "values", is_whole=is_whole)


def _list(rows: Sequence[Row], columns: Sequence[str], shown_max: int, what: str, *, is_whole: bool) -> None:
    if not rows:
        return
    print()
    shown, left_out = shown_rows(rows, shown_max, is_whole=is_whole)
    cells = [row | {"size": tables.size(row["size_bytes"])} if "size_bytes" in row else row for row in shown]
    shown_columns = [column for column in columns if column != "rank" or any(row["rank"] is not None for row in shown)]
    tables.table(cells, shown_columns, "")
    print_rest(left_out, what)
