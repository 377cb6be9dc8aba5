"""`forgectl models register`, `verify` and `pull`: the files of a version on this host.

Invariants:
- Files are read before the daemon is asked to register them: it ends a connection that is silent.
- The registry is told what a verification or a copy has found.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from forged.checkpoint.ports import CancelToken
from forged.cli.catalog import names as checkpoint_names
from forged.cli.ckpt.command import checkpoint_command, translated_errors
from forged.cli.ckpt.progress_bar import ProgressBar
from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.forgectl.values import texts_by_key
from forged.cli.models import names, words
from forged.cli.models.names import Named
from forged.cli.process import EXIT_FAILED, EXIT_OK
from forged.client.model_files.comparison import compare, is_damage
from forged.client.model_files.description import ModelFiles, describing
from forged.client.model_files.pulling import Pulled, pull
from forged.errors import ConfigError, ForgedError, RequestRefused
from forged.registry.messages import Artifact, ArtifactState
from forged.registry.model import ModelMetadata

NOT_PERMITTED = "forbidden"


# Registration.


@checkpoint_command
def register(options: Options, token: CancelToken) -> int:
    found = names.named(options.model)
    if found.ref and options.bump:
        raise ConfigError("usage_wrong", f"both a version ({found.ref}) and --bump are given", "give one of them")
    fields = _metadata(found, options)
    described = _described(options, found.model, token)
    if options.checksum and described is not None and options.checksum != described.checksum:
        raise ConfigError(
            "model_checksum_differs",
            f"the files have the checksum {described.checksum}, given is {options.checksum}",
            "register the files that were meant",
        )
    with DaemonConnection(options) as daemon:
        metadata = words.as_text(answers.one(daemon, "RegisterModel", **_request(fields, described, options, found)))
    answer(options, metadata, lambda: _show_registered(metadata))
    return EXIT_OK


def _metadata(found: Named, options: Options) -> Row:
    return {
        "model_id": found.model,
        "name": options.name or found.model,
        "version": names.version(found.ref) if found.ref else [0, 0, 0],
        "framework": options.framework or "",
        "input_shape": _shape(options.input_shape),
        "output_shape": _shape(options.output_shape),
        "size_bytes": options.size_bytes or 0,
        "checksum": options.checksum or "",
        "tags": texts_by_key(options.tag, "is not a tag", "use --tag KEY=VALUE"),
    }


def _described(options: Options, model: str, token: CancelToken) -> ModelFiles | None:
    """What the files or the checkpoint of the command line are; None if it names neither."""
    checkpoint = options.checkpoint
    if checkpoint is not None and options.job:
        with DaemonConnection(options) as daemon:
            meta = answers.map_in(checkpoint_names.find(daemon, options.job, checkpoint), "meta")
        checkpoint = f"{meta.get('storage_path')}"
    elif options.job:
        raise ConfigError("usage_wrong", "--job is given without --checkpoint", "add --checkpoint, such as latest")
    describe = describing(options.files, checkpoint, verify=not options.no_verify)
    if describe is None:
        if not options.checksum:
            raise ConfigError(
                "usage_wrong",
                "nothing tells which files the version has",
                "give --files PATH, --checkpoint PATH, or the --checksum of files elsewhere",
            )
        return None
    with ProgressBar(options, model) as bar:
        return describe(token, bar).of_job(options.job or "")


def _request(fields: Row, described: ModelFiles | None, options: Options, found: Named) -> Row:
    request = {
        "metadata": fields,
        "bump": "" if found.ref else options.bump or "minor",
        "reason": options.reason or "",
    }
    if described is None:
        return request
    fields |= {"checksum": described.checksum, "size_bytes": options.size_bytes or described.size_bytes}
    return request | {
        "artifact": msgspec.to_builtins(described.artifact),
        "lineage": msgspec.to_builtins(described.lineage),
    }


def _show_registered(metadata: Row) -> None:
    name = words.name_of(metadata)
    size = words.size(metadata.get("size_bytes"))
    said = f"registered {name}{f', {size}' if size != tables.NONE else ''}, {metadata.get('checksum')}"
    tables.print_wrapped(f"{said}; `forgectl models promote {words.typed(metadata)}` begins its validation")


def _shape(text: str | None) -> list[int]:
    """A shape: `1,28,28`, or `1x28x28`."""
    sizes = (text or "").replace("x", ",").split(",") if text else []
    if not all(size.strip().isdecimal() for size in sizes):
        raise ConfigError("usage_wrong", f"{text!r} is not a shape", "give sizes such as 1,28,28")
    return [int(size) for size in sizes]


def measured_checksum(options: Options) -> str:
    """The checksum of the files or the checkpoint that a validation has measured; empty if none is named."""
    describe = describing(options.files, options.checkpoint, verify=False)
    if describe is None:
        return ""
    with translated_errors(), ProgressBar(options, options.model) as bar:
        return describe(CancelToken(options.timeout), bar).checksum


# Verification and copies.


@checkpoint_command
def verify(options: Options, token: CancelToken) -> int:
    view = _view(options)
    metadata, artifact = _typed(view)
    started_at = time.monotonic()
    with ProgressBar(options, words.name_of(answers.map_in(view, "metadata"))) as bar:
        found = compare(metadata, artifact, token, bar, options.location or "")
    took_s = time.monotonic() - started_at
    unreported = "" if options.location else _report(options, metadata, found.state, found.problem)
    reply = {
        "model_id": metadata.model_id,
        "version": f"{metadata.version}",
        "state": f"{found.state}",
        "problem": found.problem,
        "bytes_checked": found.bytes_checked,
        "seconds": took_s,
        "reported": not unreported and not options.location,
    }
    answer(options, reply, lambda: _show_verified(reply, unreported))
    return EXIT_OK if found.state is ArtifactState.SOUND else EXIT_FAILED


def _show_verified(reply: Row, unreported: str) -> None:
    state = f"{reply['state']}"
    colour = tables.GREEN if state == ArtifactState.SOUND else tables.RED
    checked = reply["bytes_checked"]
    measured = f", {tables.size(checked)} compared in {tables.duration(reply['seconds'])}" if checked else ""
    problem = f": {tables.field('', reply['problem'])}" if reply["problem"] else ""
    tables.print_wrapped(f"{words.name_of(reply)} is {tables.paint(state, colour)}{measured}{problem}")
    if unreported:
        tables.print_wrapped(f"note: the registry was not told: {unreported}", tables.NOTE_INDENT)


@checkpoint_command
def pull_files(options: Options, token: CancelToken) -> int:
    view = _view(options)
    metadata, artifact = _typed(view)
    started_at = time.monotonic()
    try:
        with ProgressBar(options, words.name_of(answers.map_in(view, "metadata"))) as bar:
            pulled = pull(metadata, artifact, options.target, token, bar, options.location or "")
    except ForgedError as error:
        if is_damage(error) and not options.location:
            _report(options, metadata, ArtifactState.DAMAGED, error.message)
        raise
    took_s = time.monotonic() - started_at
    if not options.location:
        _report(options, metadata, ArtifactState.SOUND, "")
    reply = {
        "model_id": metadata.model_id,
        "version": f"{metadata.version}",
        "target": f"{pulled.path}",
        "files": pulled.files,
        "size_bytes": pulled.size_bytes,
        "left_out": list(pulled.left_out),
        "seconds": took_s,
    }
    answer(options, reply, lambda: _show_pulled(reply, pulled))
    return EXIT_OK


def _show_pulled(reply: Row, pulled: Pulled) -> None:
    files = f"{tables.counted(pulled.files, 'file')}, " if pulled.files > 1 else ""
    took = tables.duration(reply["seconds"])
    target = tables.field("", reply["target"])
    print(f"{target}: {words.name_of(reply)}, {files}{tables.size(pulled.size_bytes)}, verified, written in {took}")
    if pulled.left_out:
        print(f"  left out (not arrays): {tables.names(pulled.left_out)}")


def _view(options: Options) -> Row:
    with DaemonConnection(options) as daemon:
        return answers.one(daemon, "ShowModel", **_reference(options.model))


def _reference(text: str) -> Row:
    found = names.named(text)
    return {"model_id": found.model, "ref": found.ref or names.LATEST}


def _typed(view: Row) -> tuple[ModelMetadata, Artifact]:
    """The metadata and the artifact of a reply, checked."""
    metadata, artifact = (answers.map_in(view, key) for key in ("metadata", "artifact"))
    return _as(metadata, ModelMetadata), _as(artifact, Artifact)


def _as(value: Row, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            "answer_strange", f"forgectl cannot read the daemon's reply: {error}", "install the same version of both"
        ) from error


def _report(options: Options, metadata: ModelMetadata, state: ArtifactState, problem: str) -> str:
    """Tell the registry what was found; returns why it was not told, empty if it was."""
    version: Sequence[int] = [metadata.version.major, metadata.version.minor, metadata.version.patch]
    try:
        with DaemonConnection(options) as daemon:
            daemon.request(
                "ReportArtifact", model_id=metadata.model_id, version=version, state=f"{state}", problem=problem
            )
    except RequestRefused as refusal:
        if refusal.code != NOT_PERMITTED:
            raise
        return refusal.message
    return ""
