"""`forgectl config`: the daemon's settings as they are, and reading its file anew.

Law: a setting is shown as it would be written, and whatever has not come into force says what it waits for.
"""

from __future__ import annotations

from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import Connection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options, Parser, verb, verbs_of
from forged.cli.process import EXIT_OK

COLUMNS = ("key", "value", "default", "note")


def fill(config: Parser) -> None:
    """The settings, and their reload."""
    verbs = verbs_of(config, _show)
    verb(verbs, "show", _show, "the settings")
    verb(verbs, "reload", _reload, "have the daemon read its file anew")


def _show(options: Options) -> int:
    with Connection(options) as wire:
        said = answers.one(wire, "ShowConfig")
        answer(options, said, lambda: _show_settings(said))
    return EXIT_OK


def _show_settings(said: Row) -> None:
    print(f"read from {tables.field('', said['source'])}" if said.get("source") else "read from no file")
    settings = said.get("settings")
    rows = [_row(one) for one in settings if isinstance(one, dict)] if isinstance(settings, list) else []
    tables.table(rows, COLUMNS if any(row["note"] for row in rows) else COLUMNS[:-1], "no settings")


def _row(setting: Row) -> Row:
    key, value = setting.get("key"), setting.get("value")
    default, wanted = setting.get("default", value), setting.get("wanted")
    return {
        "key": key,
        "value": _written(f"{key}", value),
        "default": "" if default == value else _written(f"{key}", default),
        "note": "" if wanted is None else f"needs restart: {_written(f'{key}', wanted)}",
    }


def _written(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and key.endswith("_mode"):
        return f"{value:#o}"
    return tables.field("", value) or '""'


def _reload(options: Options) -> int:
    with Connection(options) as wire:
        said = answers.one(wire, "ReloadConfig")
        answer(options, said, lambda: _show_reloaded(said))
    return EXIT_OK


def _show_reloaded(said: Row) -> None:
    changed, waiting = said.get("changed"), said.get("needs_restart")
    print(f"changed: {tables.field('', changed)}" if changed else "nothing has changed")
    if waiting:
        print(f"needs a restart: {tables.field('', waiting)}")
