"""The tables of requests by role and of their senders in docs/security.md, and that the daemon keeps to them."""

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


EXTERNAL = [signal for signal in SIGNALS.values() if signal.external and signal.__module__.startswith("forged.")]
KINDS: list[type[Request[Any] | Signal]] = [*REQUESTS, *EXTERNAL]
WITHOUT_INCARNATION = {
    "ShowWorker": "reads what every viewer of the job may see",
    "DrainWorker": "an operator may drain any worker",
    "EvictWorker": "an operator may evict any worker",
    "ReadStacks": "an operator may read the stacks of any worker",
}
"""The requests that name a worker and carry no incarnation, and why not."""


def test_the_page_lists_each_request_and_signal_with_its_role() -> None:
    expected = list(rows(KINDS))
    written = re.findall(r"^\| (?:viewer|worker|operator) \| .*$", PAGE.read_text(), re.MULTILINE)
    assert written == expected, "\n" + "\n".join(expected)


def names_a_worker(kind: type[Any]) -> bool:
    return not {"worker_id", "worker"}.isdisjoint(kind.__struct_fields__)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if names_a_worker(kind)], ids=lambda kind: kind.__name__)
def test_each_message_in_a_workers_name_has_its_incarnation(kind: type[Any]) -> None:
    is_listed = kind.__name__ in WITHOUT_INCARNATION
    assert ("incarnation" in kind.__struct_fields__) != is_listed
    assert is_listed == (kind.needs is not Role.WORKER), "a worker speaks for itself alone"


def test_the_page_says_of_each_message_of_a_worker_what_proves_its_sender() -> None:
    written = re.findall(r"^\| (`.*`) \| (yes|no) \|", PAGE.read_text(), re.MULTILINE)
    found = {name: answer == "yes" for names, answer in written for name in re.findall(r"`(\w+)`", names)}
    assert found == {kind.__name__: names_a_worker(kind) for kind in KINDS if kind.needs is Role.WORKER}


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
