"""`forgectl models import`: takes in versions that serve elsewhere, from a JSON file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.models import names
from forged.cli.process import EXIT_FAILED, EXIT_OK
from forged.errors import ConfigError
from forged.pagination import in_batches

BATCH_MAX = 500
OUTCOMES = ("imported", "known", "refused", "serving")
STDIN = "-"
SHOWN_MAX = 12
FORM = 'write {"versions": [{"metadata": {"model_id": ..., "version": "1.2.0", "state": ..., "checksum": ...}}]}'


def import_file(options: Options) -> int:
    found = list(map(_version, _read(options.file)))
    done = send(options, found, options.reason or "")
    answer(options, done, lambda: show_imported(done))
    return EXIT_FAILED if done["refused"] or not found else EXIT_OK


def send(options: Options, versions: Sequence[Row], reason: str) -> Row:
    """Import versions in the parts that one request can carry; returns the outcomes of all."""
    done: Row = {outcome: [] for outcome in OUTCOMES}
    with DaemonConnection(options) as daemon:
        for batch in in_batches(versions, msgpack.packb, BATCH_MAX):
            reply = answers.one(daemon, "ImportModels", versions=batch, reason=reason, dry_run=options.dry_run)
            for outcome in OUTCOMES:
                done[outcome] += answers.list_in(reply, outcome)
    return done | {"dry_run": options.dry_run}


def show_imported(done: Row) -> None:
    """Print the outcomes of an import."""
    imported, known, refused, serving = (done[outcome] for outcome in OUTCOMES)
    verb = "would import" if done["dry_run"] else "imported"
    if imported:
        print(f"{verb} {tables.counted(len(imported), 'version')}: {tables.names(imported)}")
    _print_some("would serve" if done["dry_run"] else "serves now", serving)
    if known:
        print(f"known before: {tables.counted(len(known), 'version')}: {tables.names(known)}")
    _print_some("refused", refused)
    if not (imported or known or refused):
        print("there is no version to import")


def _print_some(label: str, listed: Sequence[str]) -> None:
    for one in listed[:SHOWN_MAX]:
        tables.print_wrapped(f"{label}: {tables.field('', one)}", tables.NOTE_INDENT)
    if len(listed) > SHOWN_MAX:
        print(f"and {len(listed) - SHOWN_MAX:,} more: --json shows them")


# The file.


def _read(where: str) -> list[Any]:
    try:
        text = sys.stdin.read() if where == STDIN else Path(where).read_text()
        said = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("usage_wrong", f"{where} cannot be read: {error}", FORM) from None
    listed = said.get("versions") if isinstance(said, dict) else said
    if not isinstance(listed, list):
        raise ConfigError("usage_wrong", f"{where} has no list of versions", FORM)
    return listed


def _version(said: Any) -> Row:
    """One version as the daemon takes it; what the file leaves out is empty."""
    metadata = answers.map_in(said, "metadata") if isinstance(said, dict) else {}
    model, number = metadata.get("model_id"), metadata.get("version")
    if not isinstance(model, str) or not isinstance(number, str):
        raise ConfigError("usage_wrong", f"a version of the file lacks model_id or version: {said!r:.200}", FORM)
    empty: Row = {
        "name": model,
        "framework": "",
        "input_shape": [],
        "output_shape": [],
        "size_bytes": 0,
        "checksum": "",
        "tags": {},
    }
    exact = names.version(number)
    imported: Row = {**said, "metadata": empty | metadata | {"version": exact}}
    result = answers.map_in(imported, "validation")
    if result:
        imported["validation"] = {"errors": []} | result | {"model_id": model, "version": exact}
    return imported
