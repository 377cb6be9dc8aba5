"""`forgectl models ls`, `versions` and `find`: lists of models and versions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.models import names, words
from forged.cli.models.names import SERVING
from forged.cli.process import EXIT_OK
from forged.errors import ConfigError
from forged.plain_client.connection import PlainConnection

MODEL_COLUMNS = ("model", "versions", "latest", "serving", "aliases", "canaries")
VERSION_COLUMNS = (
    "version",
    "state",
    "aliases",
    "framework",
    "input",
    "output",
    "size",
    "registered_at",
    "tags",
    "checksum",
)
FOUND_COLUMNS = ("model", *(one for one in VERSION_COLUMNS if one != "aliases"))
YIELDING = ("tags", "checksum", "output", "input", "framework", "size", "registered_at")
"""The columns that a narrow terminal cuts or omits first."""
SHOWN_MAX = 40
"""The longest list on a terminal without `--all`."""


def show_models(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        page = answers.whole(daemon, "ListModels", field="models", key="model_id", **_first_page(options))
    models = words.as_text(answers.rows_in(page, "models"))
    nothing = "no models; `forgectl models register MODEL --files PATH` registers one"
    rows = list(map(_model_row, models))

    def show() -> None:
        tables.table(rows, MODEL_COLUMNS, nothing, yielding=("canaries", "aliases"), kept="model")
        _print_rest(has_more=page.get("more"))

    answer(options, {"models": models}, show)
    return EXIT_OK


def show_versions(options: Options) -> int:
    model = names.alone(options.model)
    with DaemonConnection(options) as daemon:
        found, has_more = names.versions(daemon, model, **_first_page(options))
        aliases = answers.map_in(names.summary(daemon, model), "aliases")
    rows = [_version_row(one, aliases) for one in found]

    def show() -> None:
        _show(rows, VERSION_COLUMNS, f"model {model} has no versions")
        _print_rest(has_more=has_more)

    answer(options, {"versions": found}, show)
    return EXIT_OK


def find(options: Options) -> int:
    fields = {
        "state": options.state,
        "tags": dict(map(_tag, options.tag)),
        "checksum": options.checksum or "",
        "alias": options.alias or "",
        "text": options.text or "",
    }
    if not any(fields.values()):
        raise ConfigError(
            "usage_wrong",
            "nothing is given to look for",
            "give a TEXT, --state, --tag, --checksum or --alias; `forgectl models ls` lists all models",
        )
    with DaemonConnection(options) as daemon:
        found, has_more = _found(daemon, fields, **_first_page(options))
    rows = [_version_row(one, {}) for one in found]

    def show() -> None:
        _show(rows, FOUND_COLUMNS, "no version matches")
        _print_rest(has_more=has_more)

    answer(options, {"versions": found}, show)
    return EXIT_OK


def _found(daemon: PlainConnection, fields: Row, pages_max: int | None = None, **page: int) -> tuple[list[Row], bool]:
    """The versions that match, and whether there are more than so many pages."""
    found: list[Row] = []
    after, taken = "", 0
    while pages_max is None or taken < pages_max:
        reply = words.as_text(answers.one(daemon, "FindModels", **fields, **page, after=after))
        rows = answers.rows_in(reply, "versions")
        found += rows
        taken += 1
        if not reply.get("more") or not rows:
            return found, False
        after = words.name_of(rows[-1])
    return found, True


def _first_page(options: Options) -> dict[str, Any]:
    """On a terminal, how much of a list is asked for; all of it with `--all`, in a pipe and in JSON."""
    is_cut = sys.stdout.isatty() and not (options.all or options.json)
    return {"pages_max": 1, "limit": SHOWN_MAX} if is_cut else {}


def _print_rest(*, has_more: object) -> None:
    if has_more:
        print(f"and more than these {SHOWN_MAX}: --all shows them")


def _tag(text: str) -> tuple[str, str | None]:
    """A tag to look for: `KEY=VALUE`, or `KEY` for any value."""
    key, separator, value = text.partition("=")
    return key, value if separator else None


def _model_row(one: Row) -> Row:
    aliases = {name: version for name, version in answers.map_in(one, "aliases").items() if name != SERVING}
    return {
        "model": one.get("model_id"),
        "versions": one.get("versions"),
        "latest": one.get("latest"),
        "serving": one.get("serving") or tables.NONE,
        "aliases": words.tags(aliases),
        "canaries": answers.map_in(one, "policy").get("canary"),
    }


def _version_row(one: Row, aliases: Row) -> Row:
    return {
        "model": one.get("model_id"),
        "version": one.get("version"),
        "state": one.get("state") or tables.NONE,
        "aliases": ", ".join(sorted(alias for alias in aliases if aliases[alias] == one.get("version"))) or tables.NONE,
        "framework": one.get("framework") or tables.NONE,
        "input": words.shape(one.get("input_shape")),
        "output": words.shape(one.get("output_shape")),
        "size": words.size(one.get("size_bytes")),
        "registered_at": one.get("registered_at"),
        "tags": words.tags(one.get("tags")),
        "checksum": words.checksum(one.get("checksum")),
    }


def _show(rows: Sequence[Row], columns: Sequence[str], nothing: str) -> None:
    """Print versions; columns in which no version has a value are left out."""
    always = ("model", "version", "state")
    shown = [one for one in columns if one in always or any(row[one] not in (None, tables.NONE) for row in rows)]
    tables.table(rows, shown, nothing, yielding=YIELDING, kept="version")
