"""Finds the model and the version that a command line names: `MODEL`, or `MODEL@REF`.

A reference is a version such as `1.2.3`, an alias, or `latest`. What decides needs one, and sends the exact version
that it stands for.
"""

from __future__ import annotations

import re
from shlex import quote
from typing import Any, NamedTuple

from forged.cli.forgectl import answers
from forged.cli.forgectl.answers import Row
from forged.cli.models.words import as_text
from forged.errors import ConfigError
from forged.plain_client.connection import PlainConnection

SEPARATOR = "@"
LATEST = "latest"
SERVING = "serving"
NOT_SERVING = frozenset({"model_reference_unknown"})
"""No version of the model serves."""
_VERSION = re.compile(r"(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})", re.ASCII)


class Named(NamedTuple):
    """What a command line names."""

    model: str
    ref: str
    """Empty if none is given."""


def named(text: str) -> Named:
    """The model and the reference of `MODEL[@REF]`."""
    model, separator, ref = text.partition(SEPARATOR)
    if not model or (separator and not ref):
        raise ConfigError("usage_wrong", f"{text!r} names no model", "use MODEL, or MODEL@REF such as resnet@1.2.0")
    return Named(model, ref)


def with_ref(text: str) -> Named:
    """Like `named`; a reference is required."""
    found, typed = named(text), quote(text)
    if not found.ref:
        raise ConfigError(
            "usage_wrong",
            f"{text!r} names no version",
            f"use {text}@VERSION, {text}@{LATEST}, or an alias; `forgectl models versions {typed}` lists the versions",
        )
    return found


def alone(text: str) -> str:
    """A model without a reference."""
    found = named(text)
    if found.ref:
        raise ConfigError("usage_wrong", f"{text!r} names one version", f"this is about the whole model: {found.model}")
    return found.model


def version(text: str) -> list[int]:
    """A version as the daemon takes it."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ConfigError("usage_wrong", f"{text!r} is not a version", "give three numbers, such as 1.2.3")
    return list(map(int, match.groups()))


def is_version(text: str) -> bool:
    return _VERSION.fullmatch(text) is not None


def view(daemon: PlainConnection, found: Named) -> Row:
    """The reply of `ShowModel`, with versions as text."""
    shown: Row = as_text(answers.one(daemon, "ShowModel", model_id=found.model, ref=found.ref or LATEST))
    return shown


def exact(daemon: PlainConnection, found: Named) -> list[int]:
    """The version that a reference stands for."""
    if is_version(found.ref):
        return version(found.ref)
    return version(f"{answers.map_in(view(daemon, found), 'metadata').get('version')}")


def versions(
    daemon: PlainConnection, model: str, pages_max: int | None = None, **fields: int
) -> tuple[list[Row], bool]:
    """The versions of a model, the highest first, and whether there are more than so many pages."""
    found: list[Row] = []
    before: Any = None
    taken = 0
    while pages_max is None or taken < pages_max:
        page = answers.one(daemon, "ListModelVersions", model_id=model, before=before, **fields)
        rows = answers.rows_in(page, "versions")
        found += rows
        taken += 1
        if not page.get("more") or not rows:
            return as_text(found), False
        before = rows[-1].get("version")
    return as_text(found), True


def summary(daemon: PlainConnection, model: str) -> Row:
    """A model's entry in the list of models, with its aliases; empty if there is no such model."""
    # All names that begin with the model's sort after it without its last character.
    after, more = model[:-1], True
    while more:
        page = answers.one(daemon, "ListModels", after=after)
        for one in answers.rows_in(page, "models"):
            after = f"{one.get('model_id')}"
            if after >= model:
                found: Row = as_text(one)
                return found if after == model else {}
        more = bool(page.get("more")) and bool(answers.rows_in(page, "models"))
    return {}
