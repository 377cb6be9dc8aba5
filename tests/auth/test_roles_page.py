"""The table of requests by role in docs/security.md, and that the daemon keeps to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forged.auth.model import Principal, Role
from forged.daemon import REQUESTS
from forged.errors import ForgedError
from forged.kernel.messages import ANY_JOB, SIGNALS, Call, Request, Signal
from tests.client.daemon_runner import DaemonRunner, config_in

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
SCOPES = {"job": "a job of the caller", ANY_JOB: "any job, or none", None: "the whole daemon"}


def rows(kinds: Iterable[type[Request[Any] | Signal]]) -> Iterator[str]:
    """The table's rows: for each role and scope, the names."""
    names: dict[tuple[Role, str], list[str]] = {}
    for kind in kinds:
        names.setdefault((kind.needs, SCOPES[kind.job_field]), []).append(f"`{kind.__name__}`")
    for role in Role:
        for scope in SCOPES.values():
            if (role, scope) in names:
                yield f"| {role} | {scope} | {', '.join(sorted(names[role, scope]))} |"


def test_the_page_lists_each_request_and_signal_with_its_role() -> None:
    external = [signal for signal in SIGNALS.values() if signal.external and signal.__module__.startswith("forged.")]
    expected = list(rows([*REQUESTS, *external]))
    written = re.findall(r"^\| (?:viewer|worker|operator) \| .*$", PAGE.read_text(), re.MULTILINE)
    assert written == expected, "\n" + "\n".join(expected)


def sample(kind: Any) -> Any:
    """A value of this type, with every required field."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.StructType():
            fields = {field.name: sample(field.type) for field in info.fields if field.required}
            return info.cls(**fields)
        case msgspec.inspect.UnionType():
            return None if info.includes_none else sample(info.types[0])
        case msgspec.inspect.EnumType():
            choices: list[Enum] = list(info.cls)
            return choices[0]
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return 1
        case msgspec.inspect.BoolType():
            return False
        case msgspec.inspect.BytesType():
            return b"x" * 16
        case msgspec.inspect.DictType():
            return {}
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            return ()
        case _:
            return "x"


@pytest.mark.parametrize("role", Role)
async def test_each_request_is_refused_to_each_smaller_role(tmp_path: Path, role: Role) -> None:
    runner = DaemonRunner(config_in(tmp_path))
    daemon = await runner.open()
    try:
        for request in map(sample, REQUESTS):
            code = ""
            try:
                await daemon.bus.ask(request, Call(Principal("caller", role), "test"))
            except ForgedError as error:
                code = error.code
            assert (code == "forbidden") == (not role.covers(request.needs)), type(request).__name__
    finally:
        await runner.close()


@pytest.mark.parametrize("role", Role)
async def test_principal_of_one_job_is_refused_every_request_about_another(tmp_path: Path, role: Role) -> None:
    runner = DaemonRunner(config_in(tmp_path))
    daemon = await runner.open()
    try:
        for request in map(sample, REQUESTS):
            if request.job_field != ANY_JOB:
                with pytest.raises(ForgedError) as refused:
                    await daemon.bus.ask(request, Call(Principal("caller", role, frozenset({"own"})), "test"))
                assert refused.value.code == "forbidden", type(request).__name__
    finally:
        await runner.close()
