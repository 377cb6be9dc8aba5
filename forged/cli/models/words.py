"""What the registry's values are in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from shlex import quote
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row

ARROW = "→"
PATH = ("registered", "validating", "staging", "canary", "production")
"""The states on the way of a promotion."""
FIGURES = 4
CHECKSUM_CHARS = 19
"""So many characters of a checksum tell two versions apart in a table."""
DAY_S = 86_400.0
_VERSIONS = frozenset({"version", "latest", "serving", "to", "baseline"})
"""The fields whose value is a version."""
_PARTS = 3


def as_text(value: Any, key: str = "") -> Any:
    """A reply with versions as `1.2.3`, for people and for JSON."""
    if isinstance(value, dict):
        inner = "version" if key == "aliases" else ""
        return {name: as_text(one, inner or f"{name}") for name, one in value.items()}
    if isinstance(value, list) and key in _VERSIONS and len(value) == _PARTS:
        return ".".join(map(str, value))
    return [as_text(one) for one in value] if isinstance(value, list) else value


def name_of(metadata: Row) -> str:
    """A version with its model: `resnet@1.2.0`."""
    return f"{tables.field('', metadata.get('model_id'))}@{tables.field('', metadata.get('version'))}"


def typed(metadata: Row) -> str:
    """A version as it is typed in a shell: names of models may have spaces."""
    return quote(name_of(metadata))


def number(value: Any) -> str:
    """A measure; a dash if it was not measured."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return tables.NONE
    return f"{value:.{FIGURES}g}"


def milliseconds(value: Any) -> str:
    """A latency; a dash if it was not measured."""
    text = number(value)
    return text if text == tables.NONE else f"{text} ms"


def shape(sizes: Any) -> str:
    """A shape: `1×28×28`."""
    return "×".join(map(str, sizes)) if isinstance(sizes, list) and sizes else tables.NONE


def size(value: Any) -> str:
    """A size; a dash if it is unknown."""
    return tables.size(value) if isinstance(value, int) and value > 0 else tables.NONE


def checksum(value: Any) -> str:
    """The beginning of a checksum."""
    text = tables.field("", value or None)
    return text if len(text) <= CHECKSUM_CHARS else text[:CHECKSUM_CHARS] + tables.CUT


def moment(at: Any, now: float) -> str:
    """A time, and how long ago it was; a dash if there is none."""
    if not isinstance(at, (int, float)) or not at:
        return tables.NONE
    return f"{tables.moment(at)} ({tables.duration(now - at)} ago)" if now - at >= 1 else tables.moment(at)


def tags(value: Any) -> str:
    """Tags in one line."""
    return tables.fields(value) if isinstance(value, dict) and value else tables.NONE


def measures(result: Row) -> str:
    """The measures of a validation."""
    shown = {
        "p50": milliseconds(result.get("latency_p50_ms")),
        "p99": milliseconds(result.get("latency_p99_ms")),
        "accuracy": number(result.get("accuracy_score")),
    }
    said = [f"{name} {text}" for name, text in shown.items() if text != tables.NONE]
    errors = answers.list_in(result, "errors")
    said += [f"{tables.counted(len(errors), 'error')}: {tables.names(errors)}"] * bool(errors)
    return ", ".join(said)


def evidence(validation: Row, now: float) -> str:
    """A recorded validation in a sentence."""
    if not validation:
        return tables.NONE
    result = answers.map_in(validation, "result")
    verdict = "passed" if result.get("passed") else "failed"
    samples = answers.count_in(validation, "samples")
    measured = measures(result)
    return (
        f"no. {tables.field('', validation.get('number'))} {verdict}, {moment(validation.get('at'), now)}"
        f"{f': {measured}' if measured else ''}"
        f"{f', from {samples:,} samples' if samples else ''}"
    )


def policy(value: Row) -> str:
    """A model's policy in a sentence."""
    return "; ".join(_policy(value)) if value else tables.NONE


def _policy(value: Row) -> Iterator[str]:
    if value.get("requires_validation"):
        age_s = value.get("evidence_max_age_s")
        recent = f" of the last {tables.duration(age_s)}" if isinstance(age_s, (int, float)) else ""
        limits = [
            *[f"p99 <= {milliseconds(value['max_latency_p99_ms'])}"] * (value.get("max_latency_p99_ms") is not None),
            *[f"accuracy >= {number(value['min_accuracy'])}"] * (value.get("min_accuracy") is not None),
        ]
        within = f" with {' and '.join(limits)}" if limits else ""
        yield f"promotion needs a validation{recent}{within}"
    else:
        yield "promotion needs no validation"
    threshold = number(value.get("rollback_threshold"))
    yield {
        "off": "canaries are not watched",
        "advise": f"a canary is reported from rollback priority {threshold} on",
        "act": f"a canary is rolled back from priority {threshold} on",
    }.get(f"{value.get('canary')}", "")


def entry(one: Row) -> str:
    """An entry of the journal in a sentence, without its version."""
    was, now = (tables.field("", one.get(key) or None) for key in ("was", "now"))
    said = {
        "registered": "registered",
        "imported": f"imported as {now}",
        "transitioned": f"{was} {ARROW} {now}",
        "validated": f"validation {tables.field('', one.get('evidence'))}: {now}",
        "alias_moved": _alias(one, was, now),
        "rolled_back": f"rolled back{f' to {now}' if one.get('now') else ''}",
        "policy_changed": f"policy: {now}",
        "tagged": f"tagged{f': {now}' if one.get('now') else ''}",
        "deleted": "deleted",
    }.get(f"{one.get('kind')}", tables.field("", one.get("kind")))
    return said + "".join(_grounds(one))


def _alias(one: Row, was: str, now: str) -> str:
    alias = tables.field("", one.get("alias"))
    if not one.get("now"):
        return f"alias {alias} removed"
    return f"alias {alias}: {was} {ARROW} {now}" if one.get("was") else f"alias {alias} {ARROW} {now}"


def _grounds(one: Row) -> Iterator[str]:
    if one.get("evidence") and one.get("kind") != "validated":
        yield f", on validation {tables.field('', one['evidence'])}"
    if one.get("waiver"):
        yield f", without evidence: {tables.field('', one['waiver'])}"
