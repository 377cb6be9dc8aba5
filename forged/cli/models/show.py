"""`forgectl models show`, `lineage`, `diff` and `best`: one version, where it comes from, and how it compares."""

from __future__ import annotations

import time
from collections.abc import Iterator
from shlex import quote
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.models import names, words
from forged.cli.models.names import LATEST, SERVING, Named
from forged.cli.models.words import ARROW
from forged.cli.process import EXIT_FAILED, EXIT_OK
from forged.errors import ConfigError, RequestRefused

PAIR = 2


def show_one(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        view = names.view(daemon, names.named(options.model))
    answer(options, view, lambda: tables.pairs(dict(_fields(view, time.time()))))
    return EXIT_OK


def _fields(view: Row, now: float) -> Iterator[tuple[str, Any]]:
    metadata = answers.map_in(view, "metadata")
    yield "model", metadata.get("model_id")
    if metadata.get("name") not in ("", metadata.get("model_id")):
        yield "name", metadata.get("name")
    yield "version", metadata.get("version")
    yield "state", metadata.get("state")
    yield "aliases", answers.list_in(view, "aliases")
    yield from _known("framework", metadata.get("framework"))
    yield from _known("input shape", words.shape(metadata.get("input_shape")))
    yield from _known("output shape", words.shape(metadata.get("output_shape")))
    yield from _known("size", words.size(metadata.get("size_bytes")))
    yield "checksum", metadata.get("checksum")
    yield "registered", f"{words.moment(metadata.get('registered_at'), now)} by {view.get('registered_by')}"
    yield from _known("tags", words.tags(metadata.get("tags")))
    yield from _artifact(view, now)
    yield "validation", words.evidence(answers.map_in(view, "validation"), now)
    yield "policy", words.policy(answers.map_in(view, "policy"))
    yield "may become", _next_states(view)
    if view.get("blocked_by"):
        yield "blocked by", view["blocked_by"]


def _next_states(view: Row) -> str:
    following = " or ".join(map(str, answers.list_in(view, "next_states")))
    if not following and SERVING in answers.list_in(view, "aliases"):
        model = quote(f"{answers.map_in(view, 'metadata').get('model_id')}")
        return f"deprecated, by `forgectl models rollback {model}`, or when another version serves"
    return following


def _known(label: str, text: Any) -> Iterator[tuple[str, Any]]:
    if text not in ("", None, tables.NONE):
        yield label, text


def _artifact(view: Row, now: float) -> Iterator[tuple[str, Any]]:
    artifact = answers.map_in(view, "artifact")
    files = answers.rows_in(artifact, "files")
    if artifact.get("save_id"):
        yield "checkpoint", _checkpoint(artifact)
    elif artifact.get("location"):
        counted = f" ({tables.counted(len(files), 'file')})" if len(files) > 1 else ""
        yield "files", f"{tables.field('', artifact['location'])}{counted}"
    checked = words.moment(view.get("artifact_checked_at"), now)
    state = tables.field("", view.get("artifact_state"))
    yield "verified", "never" if checked == tables.NONE else f"{state}, {checked}"


def _checkpoint(artifact: Row) -> str:
    catalogued = artifact.get("checkpoint_id")
    job = f" of job {tables.field('', artifact['job'])}" if artifact.get("job") else ""
    where = tables.field("", artifact.get("location"))
    return f"{tables.field('', catalogued)}{job}, {where}" if catalogued else f"{where}{job}"


# Lineage.


def show_lineage(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        view = names.view(daemon, names.named(options.model))
    metadata, artifact = answers.map_in(view, "metadata"), answers.map_in(view, "artifact")
    reply = {"model_id": metadata.get("model_id"), "version": metadata.get("version"), "artifact": artifact}
    reply |= {"checksum": metadata.get("checksum"), "lineage": view.get("lineage")}
    answer(options, reply, lambda: tables.pairs(dict(_lineage(view, time.time()))))
    return EXIT_OK


def _lineage(view: Row, now: float) -> Iterator[tuple[str, Any]]:
    metadata, lineage = answers.map_in(view, "metadata"), answers.map_in(view, "lineage")
    artifact = answers.map_in(view, "artifact")
    yield "version", f"{words.name_of(metadata)}, {metadata.get('state')}"
    yield "checksum", metadata.get("checksum")
    yield from (one for one in _artifact(view, now) if one[0] != "verified")
    if not lineage:
        unknown = "unknown: it was registered without a checkpoint"
        yield "trained by", unknown if not artifact.get("save_id") else "unknown: the checkpoint does not say"
        return
    job = lineage.get("job")
    yield "trained by", f"job {tables.field('', job)}" if job else "no job of a daemon"
    yield "up to", f"step {tables.field('', lineage.get('step'))}, epoch {tables.field('', lineage.get('epoch'))}"
    yield from _known("saved", words.moment(lineage.get("saved_at"), now))
    metrics = answers.map_in(lineage, "metrics")
    yield from _known("metrics", ", ".join(f"{tables.field('', one)} {words.number(metrics[one])}" for one in metrics))
    yield from _known("settings", words.tags(lineage.get("settings")))
    yield from _known("data", lineage.get("audit"))


# Differences.


def show_difference(options: Options) -> int:
    found = names.named(options.model)
    first, second = Named(found.model, found.ref or SERVING), _second(found.model, options.second)
    with DaemonConnection(options) as daemon:
        if not found.ref and not answers.one_unless(
            daemon, names.NOT_SERVING, "ShowModel", model_id=found.model, ref=SERVING
        ):
            raise RequestRefused(
                "model_reference_unknown",
                f"no version of {found.model} serves, so {second.ref} has nothing to be compared with",
                f"name one: `forgectl models diff {quote(found.model)}@VERSION`",
            )
        reply = words.as_text(
            answers.one(daemon, "CompareModels", model_id=found.model, first=first.ref, second=second.ref)
        )
    answer(options, reply, lambda: _show_difference(reply))
    return EXIT_OK


def _second(model: str, text: str | None) -> Named:
    """The second version: `REF`, or `MODEL@REF` of the same model."""
    if text is None:
        return Named(model, LATEST)
    other = names.named(text) if names.SEPARATOR in text else Named(model, text)
    if other.model != model:
        raise ConfigError("usage_wrong", f"{model} and {other.model} are two models", "name two versions of one model")
    return other


def _show_difference(reply: Row) -> None:
    first, second = answers.map_in(reply, "first"), answers.map_in(reply, "second")
    print(f"{words.name_of(first)} {ARROW} {tables.field('', second.get('version'))}")
    tables.pairs({label: text for label, text in _differences(reply, first, second) if text})
    shared = reply.get("shape_compatibility")
    is_known = all(bool(first.get(name)) is bool(second.get(name)) for name in ("input_shape", "output_shape"))
    compatible = f"shape compatibility {shared:.0%}; " if is_known and isinstance(shared, (int, float)) else ""
    reason = f": {tables.field('', reply['reason'])}" if reply.get("reason") else ""
    tables.print_wrapped(f"{compatible}suggests a {tables.field('', reply.get('suggested'))} version{reason}")


def _differences(reply: Row, first: Row, second: Row) -> Iterator[tuple[str, str]]:
    yield "  state", _change(first, second, "state", _plain)
    yield "  framework", _change(first, second, "framework", _plain)
    yield "  input shape", _change(first, second, "input_shape", words.shape)
    yield "  output shape", _change(first, second, "output_shape", words.shape)
    yield "  size", _change(first, second, "size_bytes", words.size)
    yield "  checksum", _change(first, second, "checksum", words.checksum)
    yield "  p99", _pair(reply.get("latency_p99_ms"), words.milliseconds)
    yield "  accuracy", _pair(reply.get("accuracy"), words.number)
    for tag, values in answers.map_in(reply, "changed_tags").items():
        yield f"  tag {tables.field('', tag)}", _pair(values, _plain)


def _plain(value: Any) -> str:
    return tables.field("", value or None)


def _change(first: Row, second: Row, key: str, text: Any) -> str:
    return _pair([first.get(key), second.get(key)], text)


def _pair(values: Any, text: Any) -> str:
    """Two values, or the one that both have; empty if neither is known."""
    if not isinstance(values, list) or len(values) != PAIR:
        return ""
    was, now = map(text, values)
    if was == now:
        return "" if was == tables.NONE else f"{was} (both)"
    return f"{was} {ARROW} {now}"


# The best one.


def show_best(options: Options) -> int:
    model = names.alone(options.model) if options.model else ""
    with DaemonConnection(options) as daemon:
        reply = words.as_text(
            answers.one(
                daemon,
                "FindBestModel",
                model_id=model,
                max_latency_ms=options.max_latency_ms,
                min_accuracy=options.min_accuracy,
            )
        )
    answer(options, reply, lambda: _show_best(reply))
    return EXIT_OK if reply.get("metadata") else EXIT_FAILED


def _show_best(reply: Row) -> None:
    metadata = answers.map_in(reply, "metadata")
    reason = tables.field("", reply.get("reason"))
    if not metadata:
        tables.print_wrapped(f"none: {reason}")
        return
    measured = words.measures(answers.map_in(reply, "validation"))
    said = f"{words.name_of(metadata)} ({tables.field('', metadata.get('state'))}){f': {measured}' if measured else ''}"
    tables.print_wrapped(f"{said}; {reason}" if reply.get("reason") else said)
