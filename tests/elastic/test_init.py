"""The public names of `forged.elastic`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import get_type_hints

import pytest

from forged import data, elastic
from forged.elastic import config, model


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def undescribed(cls: ast.ClassDef) -> Iterator[str]:
    """The members of a class that no text follows."""
    for member, after in zip(cls.body, [*cls.body[1:], ast.Pass()], strict=True):
        if isinstance(member, (ast.Assign, ast.AnnAssign)) and not is_text(after):
            yield f"{cls.name}.{ast.unparse(member)}"


@pytest.mark.parametrize(("module", "base"), [(model, "StrEnum"), (config, "msgspec.Struct")])
def test_every_enum_member_and_setting_has_a_docstring(module: ModuleType, base: str) -> None:
    classes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    chosen = [cls for cls in classes if base in map(ast.unparse, cls.bases)]
    assert chosen
    assert [name for cls in chosen for name in undescribed(cls)] == []


def test_values_and_settings_live_in_the_package_that_is_named_for_them() -> None:
    def homes(package: ModuleType, names: Iterable[str]) -> set[str]:
        return {getattr(package, name).__module__.rpartition(".")[0] for name in names}

    assert homes(elastic, elastic.__all__) == {"forged.elastic"}
    assert homes(data, ["DataShard", "DataTransfer"]) == {"forged.data"}


def test_every_member_of_a_value_has_a_type_that_can_be_resolved() -> None:
    """What mypy is told holds at run time, too: a field that hides a type by its name would not."""
    values = [found for name in elastic.__all__ if inspect.isclass(found := getattr(elastic, name))]
    assert len(values) > 5
    for value in values:
        assert all(kind is not None for kind in get_type_hints(value).values()), value
