"""`forgectl models validate`, `validations` and `canary`: what has been measured of a version."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.forgectl.values import texts_by_key
from forged.cli.models import names, words
from forged.cli.models.words import PATH
from forged.cli.process import EXIT_OK
from forged.errors import ConfigError

COLUMNS = ("number", "passed", "p50", "p99", "accuracy", "samples", "at_at", "by", "environment", "errors")
YIELDING = ("environment", "errors", "by", "samples", "p50")
STDIN = "-"
SAMPLES_FORM = "write numbers of milliseconds, one per line or as a JSON list"
NAN = float("nan")


def validate(options: Options) -> int:
    found = names.with_ref(options.model)
    environment = texts_by_key(options.env, "does not describe the environment", "use --env KEY=VALUE")
    samples, checksum = _samples(options.samples), _checksum(options)
    with DaemonConnection(options) as daemon:
        metadata = answers.map_in(names.view(daemon, found), "metadata")
        recorded = words.as_text(
            answers.one(
                daemon,
                "RecordValidation",
                result=_result(metadata, options, passed=not options.failed),
                checksum=checksum or metadata.get("checksum"),
                samples_ms=samples,
                environment=environment,
            )
        )
    answer(options, recorded, lambda: _show_recorded(metadata, recorded))
    return EXIT_OK


def _checksum(options: Options) -> str:
    """The checksum of what was measured, if the command line says what that is."""
    if options.files is None and options.checkpoint is None:
        return options.checksum or ""
    from forged.cli.models.files import measured_checksum

    return measured_checksum(options)


def _show_recorded(metadata: Row, recorded: Row) -> None:
    typed = words.typed(metadata)
    said = f"{words.name_of(metadata)}: validation {words.evidence(recorded, time.time())}"
    passed = answers.map_in(recorded, "result").get("passed")
    leads_on = metadata.get("state") in PATH[:-1]
    hint = f"; `forgectl models promote {typed}` promotes it" if passed and leads_on else ""
    tables.print_wrapped(f"{said}{hint}")


def report_canary(options: Options) -> int:
    found = names.with_ref(options.model)
    samples = _samples(options.samples)
    with DaemonConnection(options) as daemon:
        metadata = answers.map_in(names.view(daemon, found), "metadata")
        result = _result(metadata, options, passed=not options.failed)
        reply = words.as_text(answers.one(daemon, "ReportCanary", result=result, samples_ms=samples))
    answer(options, reply, lambda: _show_measured(metadata, reply))
    return EXIT_OK


def _show_measured(metadata: Row, reply: Row) -> None:
    reason = tables.field("", reply.get("reason"))
    tables.print_wrapped(f"{words.name_of(metadata)}: {reason}{_consequence(metadata, reply)}")


def _consequence(metadata: Row, reply: Row) -> str:
    """What follows from a priority at or above the threshold."""
    priority, threshold = reply.get("priority"), reply.get("threshold")
    if not isinstance(priority, (int, float)) or not isinstance(threshold, (int, float)):
        return ""
    if metadata.get("state") != "canary" or priority < threshold:
        return ""
    return {
        "act": "; the registry rolls it back",
        "advise": f"; `forgectl models rollback {words.typed(metadata)}` takes it out of service",
    }.get(f"{reply.get('action')}", "")


def show_validations(options: Options) -> int:
    found = names.named(options.model)
    with DaemonConnection(options) as daemon:
        metadata = answers.map_in(names.view(daemon, found), "metadata")
        typed = words.typed(metadata)
        version = names.version(f"{metadata.get('version')}")
        reply = daemon.request("ListValidations", model_id=found.model, version=version)
    recorded = [one for one in words.as_text(reply) if isinstance(one, dict)] if isinstance(reply, list) else []
    nothing = (
        f"{words.name_of(metadata)} has not been validated; `forgectl models validate {typed}` records a validation"
    )
    rows = list(map(_row, recorded))
    shown = [one for one in COLUMNS if any(row[one] not in (None, tables.NONE) for row in rows)]
    answer(
        options,
        {"validations": recorded},
        lambda: tables.table(rows, shown, nothing, yielding=YIELDING, kept="number"),
    )
    return EXIT_OK


def _row(recorded: Row) -> Row:
    result = answers.map_in(recorded, "result")
    return {
        "number": recorded.get("number"),
        "passed": result.get("passed"),
        "p50": words.milliseconds(result.get("latency_p50_ms")),
        "p99": words.milliseconds(result.get("latency_p99_ms")),
        "accuracy": words.number(result.get("accuracy_score")),
        "samples": recorded.get("samples") or None,
        "at_at": recorded.get("at"),
        "by": recorded.get("by"),
        "environment": words.tags(recorded.get("environment")),
        "errors": tables.names(answers.list_in(result, "errors")),
    }


# What is sent.


def _result(metadata: Row, options: Options, *, passed: bool) -> Row:
    return {
        "model_id": metadata.get("model_id"),
        "version": names.version(f"{metadata.get('version')}"),
        "passed": passed,
        "latency_p50_ms": NAN if options.p50_ms is None else options.p50_ms,
        "latency_p99_ms": NAN if options.p99_ms is None else options.p99_ms,
        "accuracy_score": NAN if options.accuracy is None else options.accuracy,
        "errors": list(options.error),
    }


def _samples(where: str | None) -> list[float]:
    """Latencies in milliseconds: a JSON list, or numbers between spaces, commas or newlines."""
    if where is None:
        return []
    text = _text_of(where)
    try:
        listed: Any = json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split()
        samples = list(map(float, listed))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            "usage_wrong",
            f"{where} has other things than latencies: {error}",
            SAMPLES_FORM,
        ) from None
    if not samples:
        raise ConfigError("usage_wrong", f"{where} contains no latencies", SAMPLES_FORM)
    return samples


def _text_of(where: str) -> str:
    try:
        return sys.stdin.read() if where == STDIN else Path(where).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "usage_wrong", f"{where} cannot be read: {error}", "name a text file with latencies, or - for stdin"
        ) from error
