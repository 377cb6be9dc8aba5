"""Blocking methods made from the methods of an async class.

A blocking class inherits `BlockingFacade[AsyncClass]`, says in `_run` how to wait for a call of the async object, and
lists the methods; those that are async generators with `iterating`::

    class BlockingClient(BlockingFacade[ForgedClient]):
        status = blocking(ForgedClient.status)

        def _run(self, call: Callable[[ForgedClient], Awaitable[R]]) -> R:
            return self._loop.run(call, self.aio)

`status` has the parameters, the result type and the docstring of `ForgedClient.status`, for mypy as for `help()`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from enum import Enum, auto
from functools import wraps
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


class BlockingFacade(ABC, Generic[T_co]):
    """Base of a class whose `blocking` methods wait for the methods of an object of the async class `T_co`."""

    @abstractmethod
    def _run(self, call: Callable[[T_co], Awaitable[R]]) -> R:
        """Call with the async object on its event loop, await the result and return it."""


class BlockingMethod(Generic[T, P, R]):
    """What `blocking` and `iterating` return; a class body turns it into a plain method."""

    def __init__(
        self,
        method: Callable[Concatenate[T, P], object],
        wait: Callable[[BlockingFacade[T], Callable[[T], Any]], R],
        signature: inspect.Signature | None = None,
    ) -> None:
        """`wait` is given the call of the method; `signature` is for `help()`, where it differs from the method's."""
        self._method = method
        self._wait = wait
        self._signature = signature

    def __set_name__(self, owner: type[BlockingFacade[T]], name: str) -> None:
        awaited, wait = self._method.__name__, self._wait

        @wraps(self._method)
        def blocking_method(facade: BlockingFacade[T], *args: Any, **kwargs: Any) -> R:
            return wait(facade, methodcaller(awaited, *args, **kwargs))

        blocking_method.__module__ = owner.__module__
        blocking_method.__name__ = name
        blocking_method.__qualname__ = f"{owner.__qualname__}.{name}"
        if self._signature is not None:
            vars(blocking_method)["__signature__"] = self._signature
        setattr(owner, name, blocking_method)

    if TYPE_CHECKING:

        @overload
        def __get__(
            self, facade: None, owner: type[BlockingFacade[T]]
        ) -> Callable[Concatenate[BlockingFacade[T], P], R]: ...

        @overload
        def __get__(self, facade: BlockingFacade[T], owner: type[BlockingFacade[T]]) -> Callable[P, R]: ...

        def __get__(self, facade: BlockingFacade[T] | None, owner: type[BlockingFacade[T]]) -> Any: ...


def blocking(method: Callable[Concatenate[T, P], Awaitable[R]]) -> BlockingMethod[T, P, R]:
    """Make a blocking method of an async one; assign the result in the body of a `BlockingFacade`.

    A generic method loses its type variables here: write that one out.
    """
    return BlockingMethod(method, _result)


def iterating(method: Callable[Concatenate[T, P], AsyncIterator[R]]) -> BlockingMethod[T, P, Iterator[R]]:
    """Make a generator method of an async generator method; its items are awaited one by one."""
    signature = inspect.signature(method)
    returned = f"{signature.return_annotation}".removeprefix("Async")
    return BlockingMethod(method, _items, signature.replace(return_annotation=returned))


def _result(facade: BlockingFacade[T], call: Callable[[T], Awaitable[R]]) -> R:
    return facade._run(call)


class _End(Enum):
    """Stands for the item after the last one."""

    END = auto()


def _items(facade: BlockingFacade[T], call: Callable[[T], AsyncIterator[R]]) -> Iterator[R]:
    async def begin(target: T) -> AsyncIterator[R]:
        return call(target)

    items = facade._run(begin)

    def following(target: T) -> Awaitable[R | _End]:
        return anext(items, _End.END)

    while (item := facade._run(following)) is not _End.END:
        yield item
