"""The layout `consolidated`: whole tensors in files as Hugging Face's tools expect them.

Invariants:
- Every tensor is in exactly one file, and tensor names are unique within a section.
- Model tensors have the names that they have in the model.
- The division into files depends only on the tensors, so all ranks compute the same.
- File names of different saves differ; only the index has the fixed name that other tools look for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from forged.checkpoint.errors import invalid
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import Tensors
from forged.checkpoint.format.safetensors import unique_name
from forged.checkpoint.format.tree import unescape_key

MODEL = "model"
OPTIMIZER = "optimizer"
STATE = "state"
"""The section of tensors that belong neither to the model nor to the optimizer."""
WHOLE = "whole"
"""The section of a single file, where tensors outside the model keep their section's name."""
_SECTIONS_DROPPED = {MODEL: MODEL, WHOLE: MODEL, OPTIMIZER: OPTIMIZER}
"""By section, the first key that is left out of tensor names."""
FILE_BYTES_MAX = 5_000_000_000
FILE_METADATA = {"format": "pt", "by": "forged"}
"""`transformers` refuses files without a format that it knows."""
INDEX_SUFFIX = ".safetensors.index.json"


class ConsolidatedFile(NamedTuple):
    """A file of whole tensors."""

    name: str
    """The file name without the prefix."""
    section: str
    tensors: list[int]
    names: list[str]
    """The tensors' names in the file."""
    size: int
    """The bytes of the tensors."""


def files_of(
    tensors: Tensors, save_id: str, *, is_packed: bool, file_bytes_max: int = FILE_BYTES_MAX
) -> list[ConsolidatedFile]:
    """All files. A section is divided so that no file is larger than `file_bytes_max`, unless one tensor is."""
    if file_bytes_max < 1:
        raise invalid(f"file_bytes_max must be > 0, got {file_bytes_max}", "give a number of bytes above 0")
    ending = "packed" if is_packed else "safetensors"
    found: list[ConsolidatedFile] = []
    for section, numbers in _sections(tensors).items():
        names = dict(zip(numbers, names_of(tensors, numbers, section), strict=True))
        groups = list(_grouped_by_size(tensors, numbers, file_bytes_max))
        for place, (some, size) in enumerate(groups, 1):
            of = f"-{place:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            name = f"{save_id}.{section}{of}.{ending}"
            found.append(ConsolidatedFile(name, section, some, [names[number] for number in some], size))
    return found


def single_file_of(tensors: Tensors, name: str) -> ConsolidatedFile:
    """All tensors in one file."""
    numbers = list(range(len(tensors.names)))
    return ConsolidatedFile(name, WHOLE, numbers, names_of(tensors, numbers, WHOLE), sum(_sizes(tensors)))


def indexes_of(files: Iterable[ConsolidatedFile]) -> dict[str, bytes]:
    """By name, the index files: of the model, and of sections with several files."""
    sections: dict[str, list[ConsolidatedFile]] = {}
    for file in files:
        sections.setdefault(file.section, []).append(file)
    return {
        section + INDEX_SUFFIX: _index(some)
        for section, some in sections.items()
        if (section == MODEL or len(some) > 1) and some[0].name.endswith(".safetensors")
    }


def names_of(tensors: Tensors, numbers: Iterable[int], section: str) -> list[str]:
    """The tensors' names in files: keys joined by dots, made unique."""
    taken: set[str] = set()
    found = []
    for number in numbers:
        name = _plain_name(tensors.names[number], section)
        if number in tensors.ranks and section != _rank_section(tensors.ranks[number]):
            name = f"{name}@{tensors.ranks[number]}"
        found.append(unique_name(name, taken))
        taken.add(found[-1])
    return found


def _sections(tensors: Tensors) -> dict[str, list[int]]:
    """The tensors of each section."""
    heads = [name.partition("/")[0] for name in tensors.names]
    has_model = any(head == MODEL for number, head in enumerate(heads) if number not in tensors.ranks)
    found: dict[str, list[int]] = {}
    for number, head in enumerate(heads):
        if number in tensors.ranks:
            section = _rank_section(tensors.ranks[number])
        elif head in {MODEL, OPTIMIZER}:
            section = head
        else:
            section = STATE if has_model else MODEL
        found.setdefault(section, []).append(number)
    return found


def _rank_section(rank: int) -> str:
    return f"rank-{rank:05d}"


def _plain_name(name: str, section: str) -> str:
    """The keys that lead to a tensor, unescaped, joined by dots."""
    own = name.removeprefix(f"{_SECTIONS_DROPPED[section]}/") if section in _SECTIONS_DROPPED else name
    return ".".join(map(_plain_key, own.split("/"))) or "_"


def _plain_key(part: str) -> str:
    return part[1:] if part.startswith("#") else unescape_key(part)


def _grouped_by_size(tensors: Tensors, numbers: list[int], file_bytes_max: int) -> Iterator[tuple[list[int], int]]:
    """The tensors of each file, in order, with their bytes."""
    sizes = _sizes(tensors)
    some: list[int] = []
    size = 0
    for number in numbers:
        if some and size + sizes[number] > file_bytes_max:
            yield some, size
            some, size = [], 0
        some.append(number)
        size += sizes[number]
    yield some, size


def _sizes(tensors: Tensors) -> list[int]:
    return [
        math.prod(shape) * dtype_of(dtype).itemsize for shape, dtype in zip(tensors.shapes, tensors.dtypes, strict=True)
    ]


def _index(files: list[ConsolidatedFile]) -> bytes:
    index = {
        "metadata": {"total_size": sum(file.size for file in files)},
        "weight_map": {name: file.name for file in files for name in file.names},
    }
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
