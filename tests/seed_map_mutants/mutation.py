"""Source edits that break one claim of a module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class MutationError(Exception):
    """A mutation does not fit the source any more."""


class Mutation(Protocol):
    """An edit of one file of `forged`."""

    @property
    def path(self) -> str:
        """Relative to the root of the tree."""
        ...

    def applied(self, source: str) -> str:
        """The broken source; raises `MutationError` if the mutation does not fit."""
        ...


@dataclass(frozen=True)
class Edit:
    """Replaces a text that is in the file once."""

    path: str
    old: str
    new: str

    def applied(self, source: str) -> str:
        found = source.count(self.old)
        if found != 1:
            raise MutationError(f"{self.path} must have this text once, found {found} times: {self.old}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Constant:
    """Makes a field or property of a class have this value, an expression, whatever was assigned."""

    path: str
    member: str
    """`Class.name`."""
    value: str

    def applied(self, source: str) -> str:
        if self.member not in _members(ast.parse(source)):
            raise MutationError(f"{self.path} must declare {self.member}")
        return f"{source}\n\n{self.member} = property(lambda self: {self.value}, lambda self, given: None)\n"


def _members(module: ast.Module) -> Iterator[str]:
    """The fields and methods of all classes."""
    for found in module.body:
        if not isinstance(found, ast.ClassDef):
            continue
        for node in found.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield f"{found.name}.{node.target.id}"
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{found.name}.{node.name}"
