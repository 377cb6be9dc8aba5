"""The grammar of `forgectl models`: the model registry.

Invariants:
- A model is named as `MODEL`, a version as `MODEL@REF`: a version such as 1.2.0, an alias, or `latest`.
- A command's module is imported when the command runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from forged.cli.forgectl.parser import Act, Parser, add_reason, imported, positional, verb, verbs_of
from forged.cli.forgectl.values import count

STATES = ("registered", "validating", "staging", "canary", "production", "deprecated", "archived")
BUMPS = ("major", "minor", "patch")
ONE = "such as resnet@1.2.0, resnet@serving or resnet@latest"
LATEST = f"{ONE} (default: latest)"
EPILOG = """\
A version is named as MODEL@REF, where REF is a version such as 1.2.0, an alias such as serving, or
latest. Without @REF, commands that only show take the latest version."""


def fill(models: Parser) -> None:
    """Add the verbs."""
    models.epilog = EPILOG
    models.formatter_class = argparse.RawDescriptionHelpFormatter
    models.set_defaults(all=False)
    verbs = verbs_of(models, _act("ls", "show_models"))
    _listing(verbs)
    _registering(verbs)
    _promoting(verbs)
    _measuring(verbs)
    _asking(verbs)
    _labelling(verbs)
    _files(verbs)


def _listing(verbs: Any) -> None:
    listing = verb(verbs, "ls", _act("ls", "show_models"), "list models, with what serves", aliases=["list"])
    _of_version(
        verbs, "show", _act("show", "show_one"), "show a version: its state, files, evidence, what is next", LATEST
    )
    text = "list the versions of a model, the highest first"
    versions = _of_model(verbs, "versions", _act("ls", "show_versions"), text)
    finding = verb(verbs, "find", _act("ls", "find"), "find versions of all models")
    positional(finding, "text", "TEXT", nargs="?", default="", help="a part of the model's id or name")
    finding.add_argument("--state", choices=STATES, help="only versions in this state")
    finding.add_argument(
        "--tag", action="append", default=[], metavar="KEY[=VALUE]", help="only versions with this tag; repeatable"
    )
    finding.add_argument("--checksum", metavar="TEXT", help="only versions with these files")
    finding.add_argument("--alias", metavar="ALIAS", help="only versions that this alias names")
    for parser in (listing, versions, finding):
        _all(parser)


def _registering(verbs: Any) -> None:
    text, which = "register a version with its files, or with a checkpoint", "or MODEL@VERSION (default: the next one)"
    registering = _of_model(verbs, "register", _act("files", "register"), text, which)
    registering.add_argument(
        "--bump", choices=BUMPS, help="without a version in MODEL, take the next one of this kind (default: minor)"
    )
    registering.add_argument("--files", metavar="PATH", help="a file or a folder; its checksum is computed")
    registering.add_argument(
        "--checkpoint", metavar="PATH", help="path or URL of a checkpoint; with --job its id, @STEP, or latest"
    )
    registering.add_argument("--job", metavar="JOB", help="find the checkpoint in the catalogue of this job")
    registering.add_argument("--no-verify", action="store_true", help="do not compare every byte of the checkpoint")
    registering.add_argument("--framework", metavar="TEXT", help="such as pytorch or onnx")
    registering.add_argument("--input-shape", metavar="SIZES", help="such as 1,28,28")
    registering.add_argument("--output-shape", metavar="SIZES", help="such as 10")
    registering.add_argument("--name", metavar="TEXT", help="the name for people (default: MODEL)")
    registering.add_argument("--tag", action="append", default=[], metavar="KEY=VALUE", help="a tag; repeatable")
    registering.add_argument("--checksum", metavar="TEXT", help="the checksum that the files must have")
    registering.add_argument("--size-bytes", type=count, metavar="N", help="the size (default: of the files)")
    add_reason(registering)
    importing = verb(verbs, "import", _act("import_file", "import_file"), "take in versions that serve elsewhere")
    positional(importing, "file", "FILE", help="JSON; - for stdin")
    text = "take in the versions, aliases, tags and stages of an MLflow registry"
    migrating = verb(verbs, "import-mlflow", _act("mlflow", "import_mlflow"), text)
    positional(migrating, "source", "SOURCE", help="the URL of its server, or its SQLite file")
    for parser in (importing, migrating):
        parser.add_argument("--dry-run", action="store_true", help="change nothing; show what would be imported")
        add_reason(parser)


def _promoting(verbs: Any) -> None:
    text = "promote a version by one step: registered, validating, staging, canary, production"
    promoting = _of_version(verbs, "promote", _act("change", "promote"), text)
    promoting.add_argument("--to", choices=STATES, help="the state to give it (default: the next one)")
    changing = _of_version(verbs, "transition", _act("change", "transition"), "give a version another state")
    changing.add_argument("state", metavar="STATE", choices=STATES)
    for parser in (promoting, changing):
        parser.add_argument("--waive", metavar="REASON", help="promote without evidence; the reason is recorded")
        add_reason(parser)
    text = "take the serving version, or MODEL@REF, out of service; the version before it serves again"
    which = "or MODEL@REF (default: the serving version)"
    rolling_back = _of_version(verbs, "rollback", _act("change", "roll_back"), text, which)
    rolling_back.add_argument("--to", metavar="VERSION", help="the version that serves instead (default: the last one)")
    add_reason(rolling_back)


def _measuring(verbs: Any) -> None:
    validating = _of_version(verbs, "validate", _act("evidence", "validate"), "record a validation of a version")
    _measures(validating)
    validating.add_argument(
        "--env", action="append", default=[], metavar="KEY=VALUE", help="where it was measured; repeatable"
    )
    validating.add_argument("--files", metavar="PATH", help="what was measured; refused if it is not the version")
    validating.add_argument("--checkpoint", metavar="PATH", help="the same, for a checkpoint")
    validating.add_argument("--checksum", metavar="TEXT", help="of what was measured (default: the version's)")
    _of_version(verbs, "validations", _act("evidence", "show_validations"), "list the validations of a version", LATEST)
    text = "report what a canary, or the serving version, shows in service"
    _measures(_of_version(verbs, "canary", _act("evidence", "report_canary"), text))


def _measures(parser: Parser) -> None:
    parser.add_argument("--failed", action="store_true", help="it has not passed")
    parser.add_argument("--accuracy", type=_measure, metavar="NUMBER", help="higher is better")
    parser.add_argument("--p50-ms", type=_measure, metavar="NUMBER", help="the median latency in milliseconds")
    parser.add_argument("--p99-ms", type=_measure, metavar="NUMBER", help="the 99th percentile in milliseconds")
    parser.add_argument(
        "--samples", metavar="FILE", help="latencies of single requests in milliseconds: p50 and p99 follow from them"
    )
    parser.add_argument("--error", action="append", default=[], metavar="TEXT", help="an error; repeatable")


def _asking(verbs: Any) -> None:
    text, which = "show what was changed, by whom and why", "or MODEL (default: all versions)"
    history = _of_version(verbs, "history", _act("history", "show_history"), text, which)
    history.add_argument("--follow", "-f", action="store_true", help="show new facts as they come")
    _all(history)
    at = _of_model(verbs, "at", _act("history", "show_served"), "show what was serving at a time")
    positional(at, "time", "TIME", help="such as 2026-11-20T08:00, or 2h for two hours ago")
    at.add_argument("--alias", metavar="ALIAS", help="what this alias named (default: serving)")
    best = verb(verbs, "best", _act("show", "show_best"), "show the best version in canary or production")
    positional(best, "model", "MODEL", nargs="?", default="", help="(default: of all models)")
    best.add_argument("--max-latency-ms", type=_measure, metavar="NUMBER", help="only versions with this p99 or less")
    best.add_argument(
        "--min-accuracy", type=_measure, metavar="NUMBER", help="only versions with this accuracy or more"
    )
    text = "compare two versions, and suggest which part of the version number to raise"
    comparing = _of_version(verbs, "diff", _act("show", "show_difference"), text, "or MODEL (default: what serves)")
    positional(comparing, "second", "REF", nargs="?", help="the other version (default: latest)")
    _of_version(
        verbs, "lineage", _act("show", "show_lineage"), "show the checkpoint, job, step and data of a version", LATEST
    )


def _labelling(verbs: Any) -> None:
    tagging = _of_version(verbs, "tag", _act("change", "tag"), "set and remove tags of a version")
    positional(tagging, "tags", "KEY=VALUE", nargs="*")
    tagging.add_argument("--remove", action="append", default=[], metavar="KEY", help="remove this tag; repeatable")
    naming = _of_version(verbs, "alias", _act("change", "alias"), "let an alias name a version, or remove it")
    positional(naming, "alias", "ALIAS", help="such as champion")
    naming.add_argument("--remove", action="store_true", help="remove the alias from MODEL")
    add_reason(naming)
    ruling = _of_model(verbs, "policy", _act("change", "policy"), "show or change what a promotion needs")
    positional(ruling, "settings", "KEY=VALUE", nargs="*", help="such as canary=act; KEY= restores the default")
    add_reason(ruling)
    text = "delete an archived version, or with --reason a registered one, from the registry; its files stay"
    add_reason(_of_version(verbs, "rm", _act("change", "remove"), text, aliases=["remove"]))


def _files(verbs: Any) -> None:
    verifying = _of_version(verbs, "verify", _act("files", "verify"), "compare every byte of a version's files", LATEST)
    text = "copy the files of a version, verified; a checkpoint becomes a safetensors file"
    pulling = _of_version(verbs, "pull", _act("files", "pull_files"), text, LATEST)
    positional(pulling, "target", "TARGET", nargs="?", help="a new name, or a folder (default: the current folder)")
    for parser in (verifying, pulling):
        parser.add_argument("--location", metavar="PATH", help="where the files are, if they were moved")


def _all(parser: Parser) -> None:
    parser.add_argument("--all", action="store_true", help="do not shorten the list on a terminal")


def _of_model(verbs: Any, name: str, act: Act, text: str, which: str | None = None) -> Parser:
    parser = verb(verbs, name, act, text)
    positional(parser, "model", "MODEL", help=which)
    return parser


def _of_version(verbs: Any, name: str, act: Act, text: str, which: str = ONE, aliases: Sequence[str] = ()) -> Parser:
    parser = verb(verbs, name, act, text, aliases=aliases)
    positional(parser, "model", "MODEL@REF", help=which)
    return parser


def _act(module: str, function: str) -> Act:
    """A function of a module of `forged.cli.models`."""
    return imported(f"forged.cli.models.{module}", function)


def _measure(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value
