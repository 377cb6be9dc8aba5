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
    """What `blocking` returns; a class body turns it into a plain method."""

    def __init__(self, method: Callable[Concatenate[T, P], Awaitable[R]]) -> None:
        self._method = method

    def __set_name__(self, owner: type[BlockingFacade[T]], name: str) -> None:
        awaited = self._method.__name__

        @wraps(self._method)
        def blocking_method(facade: BlockingFacade[T], *args: Any, **kwargs: Any) -> R:
            call: Callable[[T], Awaitable[R]] = methodcaller(awaited, *args, **kwargs)
            return facade._run(call)

        blocking_method.__module__ = owner.__module__
        blocking_method.__name__ = name
        blocking_method.__qualname__ = f"{owner.__qualname__}.{name}"
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
    return BlockingMethod(method)


class BlockingIterator(Generic[T, P, R]):
    """What `iterating` returns; a class body turns it into a plain generator method."""

    def __init__(self, method: Callable[Concatenate[T, P], AsyncIterator[R]]) -> None:
        self._method = method

    def __set_name__(self, owner: type[BlockingFacade[T]], name: str) -> None:
        iterated = self._method.__name__

        @wraps(self._method)
        def iterating_method(facade: BlockingFacade[T], *args: Any, **kwargs: Any) -> Iterator[R]:
            async def begin(target: T) -> AsyncIterator[R]:
                items: AsyncIterator[R] = getattr(target, iterated)(*args, **kwargs)
                return items

            items = facade._run(begin)
            end = object()
            while (item := facade._run(lambda _: anext(items, end))) is not end:
                yield item  # type: ignore[misc]  # it is not the end

        signature = inspect.signature(self._method)
        returned = f"{signature.return_annotation}".removeprefix("Async")
        iterating_method.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        iterating_method.__module__ = owner.__module__
        iterating_method.__name__ = name
        iterating_method.__qualname__ = f"{owner.__qualname__}.{name}"
        setattr(owner, name, iterating_method)

    if TYPE_CHECKING:

        @overload
        def __get__(
            self, facade: None, owner: type[BlockingFacade[T]]
        ) -> Callable[Concatenate[BlockingFacade[T], P], Iterator[R]]: ...

        @overload
        def __get__(self, facade: BlockingFacade[T], owner: type[BlockingFacade[T]]) -> Callable[P, Iterator[R]]: ...

        def __get__(self, facade: BlockingFacade[T] | None, owner: type[BlockingFacade[T]]) -> Any: ...


def iterating(method: Callable[Concatenate[T, P], AsyncIterator[R]]) -> BlockingIterator[T, P, R]:
    """Make a generator method of an async generator method; its items are awaited one by one."""
    return BlockingIterator(method)
