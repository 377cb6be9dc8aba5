"""`forgectl ckpt diff`: the differences between two checkpoints.

Invariants:
- Like `diff`, it exits with 0 if there are none and with 1 if there are some.
- Tensors are the same only if they are equal bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import numpy as np

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.verification.difference import Difference, DifferenceKind, Side, differences
from forged.cli.ckpt.command import checkpoint_command
from forged.cli.ckpt.progress_bar import ProgressBar
from forged.cli.ckpt.show import print_rest, shape_text, shown_rows
from forged.cli.ckpt.target import open_checkpoint
from forged.cli.ckpt.values import are_equal, displayable, plain_values
from forged.cli.forgectl import tables
from forged.cli.forgectl.output import print_json
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_FAILED, EXIT_OK

SHOWN_MAX = 40
COLUMNS = ("name", "rank", "difference", "differing", "max_abs", "norm", "nan_on_one_side")
ALWAYS_SHOWN = ("name", "difference")
"""Columns that are shown even if they are empty."""
DESCRIPTIONS = {
    DifferenceKind.SAME: "the same",
    DifferenceKind.CHANGED: "changed",
    DifferenceKind.INCOMPATIBLE: "of different shape or type",
    DifferenceKind.ONLY_IN_A: "only in A",
    DifferenceKind.ONLY_IN_B: "only in B",
}

Row = dict[str, Any]
Wanted = Callable[[str], bool]


@checkpoint_command
def show_differences(options: Options, token: CancelToken) -> int:
    a, b = Side(*open_checkpoint(options.a, token)), Side(*open_checkpoint(options.b, token))
    wanted = _wanted(options.tensors, a.manifest, b.manifest)
    tensors: list[Row] = []
    with ProgressBar(options) as bar:
        done, total = 0, sum(_bytes_of(side.manifest, wanted) for side in (a, b))
        for one in differences(a, b, token, wanted):
            tensors.append(_tensor(one))
            if options.json:
                print_json(tensors[-1])
            done += sum(_size(*kind) for kind in (one.a, one.b) if kind)
            bar(done, total)
    values = list(_values(a.manifest, b.manifest, wanted))
    _report(options, tensors, values)
    return EXIT_OK if all(row["kind"] == DifferenceKind.SAME for row in chain(tensors, values)) else EXIT_FAILED


def _report(options: Options, tensors: Sequence[Row], values: Sequence[Row]) -> None:
    if not options.json:
        _show(
            [row for row in chain(tensors, values) if options.all or row["kind"] != DifferenceKind.SAME],
            is_whole=options.all,
        )
        print(_summary(tensors, values))
        return
    for row in values:
        if row["kind"] != DifferenceKind.SAME:
            print_json(row)
    print_json({"summary": {"tensors": _counts(tensors), "values": _counts(values)}})


def _wanted(pattern: str | None, *manifests: Manifest) -> Wanted:
    """A test for names; a pattern that matches nothing is an error, as a mistyped name would be."""
    if pattern is None:
        return lambda name: True

    def wanted(name: str) -> bool:
        return name == pattern or fnmatchcase(name, pattern)

    names = chain.from_iterable(
        chain(manifest.tensors.names, (name for name, _ in plain_values(manifest))) for manifest in manifests
    )
    if not any(map(wanted, names)):
        raise CheckpointException(
            f"neither checkpoint has a tensor or value that matches {pattern!r}",
            type=ExceptionType.LOAD_FAILED,
            code="checkpoint_tensor_unknown",
            fix="`forgectl ckpt show` lists the names",
        )
    return wanted


def _tensor(one: Difference) -> Row:
    sides = {side: kind and {"dtype": kind[0], "shape": list(kind[1])} for side, kind in (("a", one.a), ("b", one.b))}
    return {
        "tensor": one.name,
        "rank": one.rank,
        "kind": one.kind,
        **sides,
        "elements": one.elements,
        "differing": one.amount.differing if one.kind in {DifferenceKind.SAME, DifferenceKind.CHANGED} else None,
        "max_abs": one.amount.max_abs,
        "norm": one.amount.norm,
        "nan_on_one_side": one.amount.nan_on_one_side,
    }


def _values(a: Manifest, b: Manifest, wanted: Wanted) -> Iterator[Row]:
    """The comparison of values that are not arrays."""
    values_a, values_b = plain_values(a), plain_values(b)
    for name, rank in values_a | values_b:
        if not wanted(name):
            continue
        value_a, value_b = values_a.get((name, rank)), values_b.get((name, rank))
        kind = DifferenceKind.SAME if are_equal(value_a, value_b) else DifferenceKind.CHANGED
        if value_a is None or value_b is None:
            kind = DifferenceKind.ONLY_IN_B if value_a is None else DifferenceKind.ONLY_IN_A
        sides = {
            "a": None if value_a is None else displayable(value_a),
            "b": None if value_b is None else displayable(value_b),
        }
        yield {"value": name, "rank": rank, "kind": kind, **sides}


def _bytes_of(manifest: Manifest, wanted: Wanted) -> int:
    columns = zip(manifest.tensors.names, manifest.tensors.dtypes, manifest.tensors.shapes, strict=True)
    return sum(_size(dtype, shape) for name, dtype, shape in columns if wanted(name))


def _size(dtype: str, shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=object)) * dtype_of(dtype).itemsize


def _counts(rows: Sequence[Row]) -> dict[str, int]:
    counted = Counter(row["kind"] for row in rows)
    return {kind.value: counted[kind] for kind in DifferenceKind}


# For people.


def _show(rows: Sequence[Row], *, is_whole: bool) -> None:
    if not rows:
        return
    shown, left_out = shown_rows(rows, SHOWN_MAX, is_whole=is_whole)
    cells = [_cells(row) for row in shown]
    columns = [name for name in COLUMNS if name in ALWAYS_SHOWN or any(row[name] is not None for row in cells)]
    tables.table(cells, columns, "")
    print_rest(left_out, "differences")
    print()


def _cells(row: Row) -> Row:
    if "value" in row:
        nothing = dict.fromkeys(("differing", "max_abs", "norm", "nan_on_one_side"))
        return {"name": row["value"], "rank": row["rank"], "difference": _of_value(row), **nothing}
    differing = f"{row['differing']:,} of {row['elements']:,}" if row["differing"] else None
    figures = {key: tables.rounded(row[key]) for key in ("max_abs", "norm")}
    nan = row["nan_on_one_side"] or None
    return figures | {
        "name": row["tensor"],
        "rank": row["rank"],
        "difference": _of_tensor(row),
        "differing": differing,
        "nan_on_one_side": nan,
    }


def _of_value(row: Row) -> str:
    if row["kind"] is DifferenceKind.CHANGED:
        return f"{tables.field('', row['a'])} → {tables.field('', row['b'])}"
    return DESCRIPTIONS[row["kind"]]


def _of_tensor(row: Row) -> str:
    if row["kind"] is DifferenceKind.INCOMPATIBLE:
        return " → ".join(f"{side['dtype']} {shape_text(side['shape'])}" for side in (row["a"], row["b"]))
    return DESCRIPTIONS[row["kind"]]


def _summary(tensors: Sequence[Row], values: Sequence[Row]) -> str:
    shown_columns = [_counted(tensors, "tensor"), *([_counted(values, "value")] if values else [])]
    return "; ".join(shown_columns)


def _counted(rows: Sequence[Row], what: str) -> str:
    """How many rows there are of each kind."""
    counts = _counts(rows)
    total = tables.counted(len(rows), what)
    if counts[DifferenceKind.SAME] == len(rows):
        return f"{total}, all the same"
    return f"{total}: " + ", ".join(f"{counts[kind]:,} {DESCRIPTIONS[kind]}" for kind in DifferenceKind if counts[kind])
