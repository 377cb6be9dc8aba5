"""docs/protocol.md as data: vectors, tables and session; and its generated parts.

`python -m tests.net.protocol_page` regenerates them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from forged.daemon import REQUESTS
from forged.kernel.messages import ANY_JOB, Fence, Request

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"

ANYTHING = {"$any": True}
_FENCED = re.compile(r"^```(vector(?: read)?|peer vector|session)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_PLAIN = {str: "text", int: "int", float: "float", bool: "bool", bytes: "bytes", NoneType: "nil", msgspec.Raw: "record"}


@dataclass(frozen=True)
class Vector:
    """A frame and its message."""

    frame: bytes
    message: list[Any]
    read_only: bool


@dataclass(frozen=True)
class Line:
    """One message of the session, or the loss of a connection."""

    sender: str
    message: Any


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def vectors() -> Iterator[Vector]:
    """The frames between clients and daemons."""
    return _vectors("vector", "vector read")


def peer_vectors() -> Iterator[Vector]:
    """The frames between workers, in the order in which they are sent."""
    return _vectors("peer vector")


def _vectors(*kinds: str) -> Iterator[Vector]:
    for kind, body in _FENCED.findall(text()):
        if kind not in kinds:
            continue
        *head, written = body.strip().splitlines()
        digits = "".join(line for line in head if re.fullmatch(r"[0-9a-f ]+", line))
        yield Vector(bytes.fromhex(digits), notation(written), kind.endswith("read"))


def session() -> list[Line]:
    (body,) = [body for kind, body in _FENCED.findall(text()) if kind == "session"]
    return [_line(line) for line in body.strip().splitlines()]


def notation(written: str) -> Any:
    """Parse JSON with `hex"..."` and `ANY`."""
    plain = re.sub(r'hex"([0-9a-f]*)"', r'{"$hex": "\1"}', written)
    plain = re.sub(r"\bANY\b", '{"$any": true}', plain)
    return json.loads(plain, object_hook=_unhex)


def table(heading: str) -> list[dict[str, str]]:
    """The rows of the first table under a heading, by column name, without code marks."""
    (_, section) = re.split(rf"^#+ {re.escape(heading)}$", text(), maxsplit=1, flags=re.MULTILINE)
    lines = section.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    end = next(index for index, line in enumerate([*lines, ""]) if index > start and not line.startswith("|"))
    names, _, *rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[start:end]]
    return [dict(zip(names, row, strict=True)) for row in rows]


def generated() -> dict[str, str]:
    """The generated parts of the page."""
    return {name: body for _, name, body in _parts()}


def generate() -> dict[str, str]:
    """The generated parts as they should be."""
    return {"requests": _requests(), "replies": _replies()}


def write() -> None:
    """Regenerate these parts."""
    parts = generate()
    page = _GENERATED.sub(lambda found: f"{found[1]}{parts[found[2]]}{found[3]}", text())
    PAGE.write_text(page, encoding="utf-8")


def describe(wanted: Any) -> str:
    """The name of a type on the page."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return " or ".join(map(describe, arguments))
    if origin in (list, tuple):
        return f"list of {describe(arguments[0])}"
    if origin in (dict, Mapping):
        return f"map of {describe(arguments[0])} to {describe(arguments[1])}"
    if wanted is Fence:
        return "fence"
    return _PLAIN.get(wanted) or wanted.__name__


def _parts() -> Iterator[tuple[str, str, str]]:
    for found in _GENERATED.finditer(text()):
        yield found[0], found[2], found[0].removeprefix(found[1]).removesuffix(found[3])


def _line(line: str) -> Line:
    if line == "reconnect":
        return Line("reconnect", None)
    sender, _, written = line.partition(" ")
    return Line(sender, notation(written))


def _unhex(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["$hex"]) if "$hex" in value else value


def _requests() -> str:
    head = "| request | role | in | decides | fields | reply | |\n|---|---|---|---|---|---|---|\n"
    return head + "".join(map(_request_row, REQUESTS))


def _request_row(request: type[Request[Any]]) -> str:
    place = {None: "daemon", ANY_JOB: "any"}.get(request.job_field, "job")
    decides = "yes" if request.decides else ""
    reply = describe(request.reply_type())
    meaning = " ".join((request.__doc__ or "").split("\n\n")[0].split()).replace("|", "\\|")
    cells = [f"`{request.__name__}`", request.needs, place, decides, _fields(request), reply, meaning]
    return f"| {' | '.join(cells)} |\n"


def _replies() -> str:
    head = "| type | fields |\n|---|---|\n"
    structs = _structs([request.reply_type() for request in REQUESTS])
    enums = _enums([*REQUESTS, *structs])
    rows = [f"| `{one.__name__}` | {_fields(one) or 'none'} |\n" for one in structs]
    rows += [f"| `{one.__name__}` | {', '.join(f'`{value}`' for value in one)} |\n" for one in enums]
    return head + "".join(rows)


def _fields(struct: type[msgspec.Struct]) -> str:
    hints = get_type_hints(struct)
    return ", ".join(
        f"`{field.name}`: {describe(hints[field.name])}{_default(field)}" for field in msgspec.structs.fields(struct)
    )


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f" = `{json.dumps(field.default_factory())}`"
    if field.default is not msgspec.NODEFAULT:
        return f" = `{json.dumps(msgspec.to_builtins(field.default)).replace('null', 'nil')}`"
    return ""


def _structs(types: Sequence[Any]) -> list[type[msgspec.Struct]]:
    found: dict[type[msgspec.Struct], None] = {}
    for one in _leaves(types):
        if issubclass(one, msgspec.Struct) and one is not Fence and one not in found:
            found[one] = None
            found |= dict.fromkeys(_structs(list(get_type_hints(one).values())))
    return list(found)


def _enums(structs: Sequence[type[msgspec.Struct]]) -> list[type[StrEnum]]:
    hints = [get_type_hints(struct)[field] for struct in structs for field in struct.__struct_fields__]
    return list(dict.fromkeys(one for one in _leaves(hints) if issubclass(one, StrEnum)))


def _leaves(types: Sequence[Any]) -> Iterator[type[Any]]:
    for one in types:
        if arguments := get_args(one):
            yield from _leaves([argument for argument in arguments if argument is not ...])
        elif isinstance(one, type):
            yield one


if __name__ == "__main__":
    write()
