"""Blocking methods made from the methods of an async class."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from forged.blocking.facade import BlockingFacade, blocking, iterating

R = TypeVar("R")


class Account:
    """An async class."""

    def __init__(self, balance: int) -> None:
        self.balance = balance

    async def deposit(self, amount: int, *, note: str = "") -> int:
        """Add to the balance; returns the new one."""
        await asyncio.sleep(0)
        if amount < 0:
            raise ValueError(f"amount must be >= 0, got {amount}{note}")
        self.balance += amount
        return self.balance


class BlockingAccount(BlockingFacade[Account]):
    def __init__(self, account: Account) -> None:
        self.account = account

    deposit = blocking(Account.deposit)
    pay_in = blocking(Account.deposit)

    def _run(self, call: Callable[[Account], Awaitable[R]]) -> R:
        async def awaited() -> R:
            return await call(self.account)

        return asyncio.run(awaited())


def test_call_returns_the_awaited_result() -> None:
    account = BlockingAccount(Account(1))
    balance: int = account.deposit(2, note="salary")
    assert balance == account.account.balance == 3


def test_call_raises_the_error_of_the_async_method() -> None:
    with pytest.raises(ValueError, match=r"amount must be >= 0, got -1 \(refund\)"):
        BlockingAccount(Account(1)).deposit(-1, note=" (refund)")


def test_call_uses_the_override_of_a_subclass() -> None:
    class Frozen(Account):
        async def deposit(self, amount: int, *, note: str = "") -> int:
            return self.balance

    assert BlockingAccount(Frozen(1)).deposit(2) == 1


def test_method_has_the_signature_and_docstring_and_is_not_async() -> None:
    method = BlockingAccount.deposit
    assert inspect.signature(method) == inspect.signature(Account.deposit)
    assert method.__doc__ == Account.deposit.__doc__
    assert not inspect.iscoroutinefunction(method)


def test_help_shows_the_method_under_its_own_name() -> None:
    text = pydoc.plain(pydoc.render_doc(BlockingAccount))
    # Python 3.14 shows annotations without their quotes.
    unquoted = re.sub(r"'(\w+)'", r"\1", text)
    assert "deposit(self, amount: int, *, note: str = '') -> int" in unquoted
    assert "pay_in(self, amount: int, *, note: str = '') -> int" in unquoted
    assert "Add to the balance" in text
    assert BlockingAccount.pay_in.__qualname__ == "BlockingAccount.pay_in"


class Numbers:
    """An async class with a generator."""

    async def below(self, end: int) -> AsyncIterator[int]:
        """The numbers below the end."""
        for number in range(end):
            await asyncio.sleep(0)
            yield number
        if end > 3:
            raise ValueError("too many")


class BlockingNumbers(BlockingFacade[Numbers]):
    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner

    below = iterating(Numbers.below)

    def _run(self, call: Callable[[Numbers], Awaitable[R]]) -> R:
        async def awaited() -> R:
            return await call(Numbers())

        return self._runner.run(awaited())


def test_items_of_an_async_generator_are_yielded_one_by_one() -> None:
    with asyncio.Runner() as runner:
        numbers: Iterator[int] = BlockingNumbers(runner).below(3)
        assert next(numbers) == 0
        assert list(numbers) == [1, 2]


def test_error_of_an_async_generator_is_raised_after_its_items() -> None:
    with asyncio.Runner() as runner:
        numbers = BlockingNumbers(runner).below(4)
        assert [next(numbers) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="too many"):
            next(numbers)


def test_generator_method_has_the_signature_of_a_plain_iterator() -> None:
    assert str(inspect.signature(BlockingNumbers.below)) == "(self, end: 'int') -> 'Iterator[int]'"
    assert BlockingNumbers.below.__doc__ == "The numbers below the end."
