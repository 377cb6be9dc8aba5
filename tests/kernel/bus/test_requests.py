from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forged.errors import ConfigError
from forged.kernel.bus.requests import Proceed, RequestTable
from forged.kernel.messages import Call
from tests.kernel_fixture import Add, ReadTotal


def answer(*_: Any) -> int:
    return 1


async def wrapper(request: Any, _: Call, proceed: Proceed) -> Any:
    return await proceed(request)


def sealing(register: Callable[[RequestTable], None], *expected: Any) -> list[str]:
    """The error text of `seal`."""
    table = RequestTable()
    register(table)
    try:
        table.seal(expected)
    except ConfigError as error:
        return [f"{problem.key} {problem.value}" for problem in error.problems]
    return []


def served_twice(table: RequestTable) -> None:
    table.serve(Add, answer, "one")
    table.serve(Add, answer, "two")


def replaced_twice(table: RequestTable) -> None:
    table.serve(Add, answer, "one")
    table.replace(Add, answer, "two")
    table.replace(Add, answer, "three")


def test_each_type_served_once_is_settled() -> None:
    def register(table: RequestTable) -> None:
        table.serve(Add, answer, "one")
        table.serve(ReadTotal, answer, "one")

    assert sealing(register, Add, ReadTotal) == []


def test_type_without_handler_is_refused() -> None:
    assert sealing(lambda table: None, Add) == ["Add None"]


def test_a_type_that_two_serve_is_refused() -> None:
    assert sealing(served_twice, Add) == ["Add two"]


def test_a_type_that_two_replace_is_refused() -> None:
    assert sealing(replaced_twice, Add) == ["Add three"]


def test_replacing_a_type_without_handler_is_refused() -> None:
    assert sealing(lambda table: table.replace(Add, answer, "two")) == ["Add two"]


def test_wrapping_a_type_without_handler_is_refused() -> None:
    assert sealing(lambda table: table.wrap(Add, wrapper, "two")) == ["Add two"]


def test_all_that_is_wrong_is_in_one_error() -> None:
    def register(table: RequestTable) -> None:
        replaced_twice(table)
        table.serve(Add, answer, "four")
        table.wrap(ReadTotal, wrapper, "five")

    assert sealing(register, Add, ReadTotal) == [
        "Add three",
        "Add four",
        "ReadTotal None",
        "ReadTotal five",
    ]


def test_a_replacement_answers_in_the_place_of_the_first() -> None:
    table = RequestTable()
    table.serve(Add, answer, "one")
    table.replace(Add, lambda *_: 2, "two")
    table.seal([Add])
    assert table.routes[Add].owner == "two"


def test_wrapper_may_be_registered_before_its_handler() -> None:
    table = RequestTable()
    table.wrap(Add, wrapper, "two")
    table.serve(Add, answer, "one")
    table.replace(Add, answer, "three")
    table.seal([Add])
    assert table.routes[Add].wrappers == [("two", wrapper)]


def test_replacement_may_be_registered_before_its_handler() -> None:
    table = RequestTable()
    table.replace(Add, answer, "two")
    table.serve(Add, answer, "one")
    table.seal([Add])
    assert table.routes[Add].owner == "two"


def test_a_type_that_is_served_without_being_expected_is_settled_too() -> None:
    assert sealing(lambda table: table.serve(Add, answer, "a plugin")) == []


@pytest.mark.parametrize("register", [served_twice, replaced_twice])
def test_error_names_the_first_registration(register: Callable[[RequestTable], None]) -> None:
    table = RequestTable()
    register(table)
    with pytest.raises(ConfigError, match=r"which (one serves|two replaces) already"):
        table.seal([])
