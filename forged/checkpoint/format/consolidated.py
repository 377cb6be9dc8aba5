"""Whole tensors in files as Hugging Face's tools expect them: which one is where, under which name, and what tells it.

Law: every tensor is in exactly one file, whole, and no two have one name in one section. What is the model's bears the
name that it has in the model; the files of the same tensors are the same, whoever works them out. No two saves give a
file one name: what leads other tools to the files of a model is its index, which bears the name that they look for.
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
"""The section of all that is neither."""
WHOLE = "whole"
"""That of a single file, where what is not the model's keeps the name of its section."""
_SECTIONS_DROPPED = {MODEL: MODEL, WHOLE: MODEL, OPTIMIZER: OPTIMIZER}
"""Which first key is no part of the names in a section."""
FILE_BYTES_MAX = 5_000_000_000
FILE_METADATA = {"format": "pt", "by": "forged"}
"""Without a format that it knows, `transformers` opens no file."""
INDEX_SUFFIX = ".safetensors.index.json"


class File(NamedTuple):
    """A file of whole tensors."""

    name: str
    """Without the prefix."""
    section: str
    tensors: list[int]
    names: list[str]
    """What each is called in the file."""
    size: int
    """How many bytes they have."""


def files_of(tensors: Tensors, save_id: str, *, is_packed: bool, file_bytes_max: int = FILE_BYTES_MAX) -> list[File]:
    """All files: a section has as many as it takes for none to be larger than that, unless one tensor is."""
    if file_bytes_max < 1:
        raise invalid(f"file_bytes_max = {file_bytes_max}", "give a number of bytes above 0")
    ending = "packed" if is_packed else "safetensors"
    found: list[File] = []
    for section, numbers in _sections(tensors).items():
        names = dict(zip(numbers, names_of(tensors, numbers, section), strict=True))
        groups = list(_filled(tensors, numbers, file_bytes_max))
        for place, (some, size) in enumerate(groups, 1):
            of = f"-{place:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            name = f"{save_id}.{section}{of}.{ending}"
            found.append(File(name, section, some, [names[number] for number in some], size))
    return found


def single_file_of(tensors: Tensors, name: str) -> File:
    """All tensors in one file."""
    numbers = list(range(len(tensors.names)))
    return File(name, WHOLE, numbers, names_of(tensors, numbers, WHOLE), sum(_sizes(tensors)))


def indexes_of(files: Iterable[File]) -> dict[str, bytes]:
    """The documents that tell which tensor is where, by name; of the model, and of sections that have several files."""
    sections: dict[str, list[File]] = {}
    for file in files:
        sections.setdefault(file.section, []).append(file)
    return {
        section + INDEX_SUFFIX: _index(some)
        for section, some in sections.items()
        if (section == MODEL or len(some) > 1) and some[0].name.endswith(".safetensors")
    }


def names_of(tensors: Tensors, numbers: Iterable[int], section: str) -> list[str]:
    """What tensors are called outside: as in the model, with dots; unique."""
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
    """Which tensors belong together."""
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
    """The keys that lead to a tensor, as they are, with dots between them."""
    own = name.removeprefix(f"{_SECTIONS_DROPPED[section]}/") if section in _SECTIONS_DROPPED else name
    return ".".join(map(_plain_key, own.split("/"))) or "_"


def _plain_key(part: str) -> str:
    return part[1:] if part.startswith("#") else unescape_key(part)


def _filled(tensors: Tensors, numbers: list[int], file_bytes_max: int) -> Iterator[tuple[list[int], int]]:
    """One file after the other, filled in the order of the tensors; with how many bytes each has."""
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


def _index(files: list[File]) -> bytes:
    said = {
        "metadata": {"total_size": sum(file.size for file in files)},
        "weight_map": {name: file.name for file in files for name in file.names},
    }
    return msgspec.json.format(msgspec.json.encode(said), indent=2) + b"\n"
