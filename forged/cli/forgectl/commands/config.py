"""`forgectl config`: the daemon's settings, and the reload of its configuration file.

A setting is shown as it is written in the file; a setting that needs a restart says so.
"""

from __future__ import annotations

from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options, Parser, verb, verbs_of
from forged.cli.process import EXIT_OK

COLUMNS = ("key", "value", "default", "note")


def fill(config: Parser) -> None:
    """Add the verbs."""
    verbs = verbs_of(config, _show)
    verb(verbs, "show", _show, "show the settings")
    verb(verbs, "reload", _reload, "reload the configuration file")


def _show(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        view = answers.one(daemon, "ShowConfig")
        answer(options, view, lambda: _print_settings(view))
    return EXIT_OK


def _print_settings(view: Row) -> None:
    print(f"configuration file: {tables.field('', view['source'])}" if view.get("source") else "no configuration file")
    settings = view.get("settings")
    rows = [_row(one) for one in settings if isinstance(one, dict)] if isinstance(settings, list) else []
    tables.table(rows, COLUMNS if any(row["note"] for row in rows) else COLUMNS[:-1], "no settings")


def _row(setting: Row) -> Row:
    key, value = setting.get("key"), setting.get("value")
    default, wanted = setting.get("default", value), setting.get("wanted")
    return {
        "key": key,
        "value": _written(f"{key}", value),
        "default": "" if default == value else _written(f"{key}", default),
        "note": "" if wanted is None else f"after restart: {_written(f'{key}', wanted)}",
    }


def _written(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and key.endswith("_mode"):
        return f"{value:#o}"
    return tables.field("", value) or '""'


def _reload(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        outcome = answers.one(daemon, "ReloadConfig")
        answer(options, outcome, lambda: _print_reloaded(outcome))
    return EXIT_OK


def _print_reloaded(outcome: Row) -> None:
    changed, waiting = outcome.get("changed"), outcome.get("needs_restart")
    print(f"changed: {tables.field('', changed)}" if changed else "no setting changed")
    if waiting:
        print(f"needs a restart: {tables.field('', waiting)}")
