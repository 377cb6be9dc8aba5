"""`docs/development/seed-map.md` names all that the seeds declare or ask for, and it is true.

The seeds stand beside the repository. A clone without them reads what they declare from `tests/seed_names.txt`, which
`python -m tests.test_seed_map` writes anew.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.seed_map import COLUMNS, NOTHING, ROOT, node_ids, rows, tables

SEEDS = ROOT.parent / "shared" / "seeds"
NAMES = ROOT / "tests" / "seed_names.txt"
COUNTS = ["seed", "rows", "shown", "missing", "left out"]

# --- what the seeds declare -------------------------------------------------------------------------------------------

CODE_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
ITEM = re.compile(r"^ *(?:-|\d+\.) (?:\[ \] )?(.+[^:\n])$", re.M)  # one that ends in a colon only introduces others
HEADINGS_UNREAD = {"Scope", "Prerequisites", "Dependencies"}

CSHARP = re.compile(
    r"""^(?:
      \ *(?:public|private)\ (?:
          (?:static\ )?(?P<kind>class|record|enum)\ (?P<type>\w+)
        | (?:[^\n]*?\ )?(?P<name>\w+)(?:
              \((?P<parameters>[^)]*)\)
            | ; | \ => | \ \{[^}]*\}(?:\ =\ (?P<default>[^;]+);)?
          )
      )
      | \ {4}(?P<value>\w+),?$
    )""",
    re.M | re.X,
)
RUST = re.compile(
    r"""^(?:
        (?:pub\ )?(?P<kind>struct|enum|impl)\ (?P<type>\w+)
      | (?:pub\ (?P<function>fn\ \w+)|\ {4}pub\ fn\ (?P<name>\w+))\((?P<parameters>[^)]*)\)
      | \ {4}(?:pub\ )?(?P<field>\w+):\s
      | \ {4}(?P<value>\w+),(?:\ *//.*)?$
    )""",
    re.M | re.X,
)


def csharp_declarations(code: str) -> Iterator[str]:
    owner = ""
    for found in CSHARP.finditer(code):
        if found["type"]:
            owner = found["type"]
            yield f"{found['kind']} {owner}"
        elif found["parameters"] is not None:
            names = (typed.split(maxsplit=1)[1] for typed in found["parameters"].split(",") if typed.strip())
            yield f"{owner}.{found['name']}({', '.join(names)})"
        else:
            default = f" = {found['default']}" if found["default"] else ""
            yield f"{owner}.{found['name'] or found['value']}{default}"


def rust_declarations(code: str) -> Iterator[str]:
    owner = ""
    for found in RUST.finditer(code):
        if found["type"]:
            owner = found["type"]
            if found["kind"] != "impl":
                yield f"{found['kind']} {owner}"
        elif found["parameters"] is not None:
            names = re.findall(r"(\w+):\s", found["parameters"])
            yield f"{found['function'] or owner + '.' + found['name']}({', '.join(names)})"
        else:
            yield f"{owner}.{found['field'] or found['value']}"


def declarations(seed: str) -> Iterator[str]:
    """Every type, enum value, method, field and function in the code of a seed, then every sentence of its lists."""
    readers = {"csharp": csharp_declarations, "rust": rust_declarations}
    for language, code in CODE_BLOCK.findall(seed):
        if language in readers:
            yield from readers[language](code)
    for section in re.split(r"^#+ ", CODE_BLOCK.sub("", seed), flags=re.M):
        heading, _, body = section.partition("\n")
        if heading not in HEADINGS_UNREAD:
            yield from ITEM.findall(body)


def names_in_the_seeds() -> str:
    """One line for each declaration: the seed it stands in, and the declaration itself."""
    seeds = sorted(SEEDS.glob("*.md"))
    return "".join(f"{seed.name}: {declared}\n" for seed in seeds for declared in declarations(seed.read_text()))


# --- what the code says -----------------------------------------------------------------------------------------------


def has_field(owner: object, name: str) -> bool:
    """A field of a dataclass or a struct is declared by the class, but need not be an attribute of it."""
    return isinstance(owner, type) and any(name in vars(base).get("__annotations__", {}) for base in owner.__mro__)


def is_importable(dotted: str) -> bool:
    """Whether the longest module in the path has, by attribute after attribute, the rest of it."""
    package, *rest = dotted.split(".")
    found: object = import_module(package)
    while rest and hasattr(found, "__path__") and find_spec(f"{package}.{rest[0]}"):
        package = f"{package}.{rest.pop(0)}"
        found = import_module(package)
    for name in rest:
        if not hasattr(found, name):
            return name == rest[-1] and has_field(found, name)
        found = getattr(found, name)
    return True


# --- the claims -------------------------------------------------------------------------------------------------------


def test_every_row_has_four_cells() -> None:
    assert [line for _, _, line in tables(COLUMNS) if len(line) != len(COLUMNS)] == []


def test_every_declaration_of_the_seeds_has_its_row() -> None:
    declared = Counter(NAMES.read_text().splitlines())
    mapped = Counter(f"{row.seed}: {row.declared}" for row in rows())
    assert sorted((declared - mapped).elements()) == []


@pytest.mark.skipif(not SEEDS.is_dir(), reason="this clone has no seeds beside it")
def test_seed_names_file_matches_the_seeds() -> None:
    assert NAMES.read_text() == names_in_the_seeds(), "run: python -m tests.test_seed_map"


def test_every_shown_name_is_importable() -> None:
    shown = [row.python for row in rows() if row.state == "shown" and row.python != NOTHING]
    assert [name for name in shown if not is_importable(name)] == []


def test_every_named_test_exists() -> None:
    assert [row.test for row in rows() if row.state == "shown" and not node_ids(row.test)] == []


def test_names_marked_missing_are_not_importable() -> None:
    missing = [row.python for row in rows() if row.state == "missing" and row.python != NOTHING]
    assert [name for name in missing if is_importable(name)] == []


def test_omitted_declaration_has_no_name_and_a_reason() -> None:
    left_out = [row for row in rows() if row.state == "left out"]
    assert [row.declared for row in left_out if row.python != NOTHING or not row.deviation] == []


def test_name_shared_by_two_seeds_is_marked_in_both() -> None:
    sharing = defaultdict(list)
    for row in rows():
        sharing[row.python].append(row)
    silent = {
        row.python
        for row in rows()
        for other in sharing[row.python]
        if row.python != NOTHING and row.seed != other.seed and f"also in {other.seed}" not in row.deviation
    }
    assert silent == set()


def test_the_counts_are_right() -> None:
    by_seed: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows():
        for name in (row.seed, "all"):
            by_seed[name].update(["rows", row.state])
    counted = [[seed, *(str(by_seed[seed][column]) for column in COUNTS[1:])] for seed in by_seed]
    assert sorted(line for _, _, line in tables(COUNTS)) == sorted(counted)


if __name__ == "__main__":
    NAMES.write_text(names_in_the_seeds())
