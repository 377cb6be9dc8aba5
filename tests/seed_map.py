"""Read `docs/development/seed-map.md`: its rows, and the tests that the rows name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAP = ROOT / "docs" / "development" / "seed-map.md"
COLUMNS = ["seed", "Python", "test", "deviation"]
NOTHING = "—"


@dataclass(frozen=True)
class Row:
    """One line of the map, its cells without their backticks."""

    seed: str
    heading: str
    declared: str
    python: str
    test: str
    deviation: str

    @property
    def state(self) -> str:
        return {"missing": "missing", NOTHING: "left out"}.get(self.test, "shown")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def declared_name(cell: str, owner: str) -> str:
    """The declaration that a cell stands for; code belongs to the type in the heading, text to no type."""
    code = re.fullmatch(r"`([^`]+)`", cell)
    if not code:
        return cell
    is_free = re.match(r"(class|record|enum|struct|fn) ", code[1])
    return code[1] if is_free else f"{owner}.{code[1]}"


def tables(header: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Each line of each table under this header, with the seed and the heading that it stands under."""
    seed = heading = ""
    inside = False
    for line in MAP.read_text().splitlines():
        if line.startswith("## "):
            seed = line.removeprefix("## ")
        elif line.startswith("### "):
            heading = line.removeprefix("### ")
        if not line.startswith("|"):
            inside = False
        elif cells(line) == header:
            inside = True
        elif inside and not line.startswith("|--"):
            yield seed, heading, cells(line)


@cache
def rows() -> list[Row]:
    found = [(seed, heading, line) for seed, heading, line in tables(COLUMNS) if len(line) == len(COLUMNS)]
    return [
        Row(seed, heading, declared_name(line[0], heading), line[1].strip("`"), line[2].strip("`"), line[3])
        for seed, heading, line in found
    ]


@cache
def keys() -> dict[Row, str]:
    """What each row is called in its seed: its declaration, under its heading if the seed has it several times."""
    times = Counter((row.seed, row.declared) for row in rows())
    return {
        row: row.declared if times[row.seed, row.declared] == 1 else f"{row.heading}: {row.declared}" for row in rows()
    }


@cache
def node_ids(test: str) -> list[str]:
    """The node ids of the test functions that a cell `tests/path.py::test_name` names; none if it names no test."""
    path, _, function = test.partition("::")
    if not path.startswith("tests/") or not function.startswith("test_") or not (ROOT / path).is_file():
        return []
    module = ast.parse((ROOT / path).read_text())
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    blocks = [(f"{path}::", module.body), *((f"{path}::{found.name}::", found.body) for found in classes)]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        f"{owner}{function}"
        for owner, block in blocks
        if any(isinstance(node, functions) and node.name == function for node in block)
    ]
