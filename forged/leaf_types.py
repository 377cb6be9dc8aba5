"""Leaf types: how values of other libraries, such as tensors, are arrays in a training state.

A package whose values need nothing configured has a provider, which is imported when the first such value is met.

Invariants:
- A value of a package without a provider imports nothing.
- Only the providers of `PROVIDERS` are ever imported, also where another process names the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Keys = tuple[Any, ...]
"""The keys that lead to a value of a state."""

PROVIDERS = {"torch": "forged.torch.tensors", "forged.torch": "forged.torch.tensors"}
"""By package, the module with its leaf types."""
TYPES_REMEMBERED = 4096


class LeafRefused(ValueError):
    """A leaf cannot be an array, or an array no leaf."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.what = what
        """What the value is, as the end of a sentence."""
        self.fix = fix


@dataclass(frozen=True, slots=True)
class LeafType:
    """How arrays of another library are saved and restored."""

    accepts: Callable[[Any], bool]
    to_array: Callable[[Any], Any]
    """A numpy array, or a `ShardedArray`: the value's own memory rather than a copy, so that it can be loaded into."""
    from_array: Callable[[Any, Any], Any]
    """The value for such an array; the second argument is the value that the given state has there, or None."""


class Provider(Protocol):
    """A module with the leaf types of a package."""

    LEAF_TYPES: Sequence[LeafType]

    def blank_for(self, owner: Any, keys: Keys, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """A value to load an array into that the state of `owner` lacks at `keys`; None if it may not get one."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """A value of one rank: never deduplicated, and loaded by the same rank."""

    value: Any


def package_of(value: Any) -> str | None:
    """The package with a provider that defines the value's class, or the first of its bases; None if there is none."""
    return _package_of(type(value))  # type: ignore[arg-type] # mypy thinks of metaclasses without a hash


@lru_cache(maxsize=TYPES_REMEMBERED)
def _package_of(kind: type[Any]) -> str | None:
    for base in kind.__mro__:
        for package in PROVIDERS:
            if base.__module__ == package or base.__module__.startswith(f"{package}."):
                return package
    return None


def provider_of(package: str) -> Provider:
    """The provider of a package; `KeyError` if it has none."""
    return cast("Provider", import_module(PROVIDERS[package]))


def leaf_types_of(value: Any) -> Sequence[LeafType]:
    """The leaf types of the package that defines the class of a value."""
    package = package_of(value)
    return () if package is None else provider_of(package).LEAF_TYPES


def leaf_type_for(value: Any, given: Iterable[LeafType] = ()) -> LeafType | None:
    """The leaf type of a value, one of those that are given first; None if it is no leaf."""
    for leaf_type in given:
        if leaf_type.accepts(value):
            return leaf_type
    return next((leaf_type for leaf_type in leaf_types_of(value) if leaf_type.accepts(value)), None)


def package_in(owner: Any, values: Any) -> str | None:
    """The package whose leaves an object takes: that of its class, or else of the first leaf in its state."""
    return package_of(owner) or next(_packages_in(values), None)


def _packages_in(values: Any) -> Iterator[str]:
    if isinstance(values, Mapping):
        for value in values.values():
            yield from _packages_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _packages_in(value)
    elif leaf_type_for(values) is not None and (package := package_of(values)) is not None:
        yield package
