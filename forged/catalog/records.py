"""What the daemon stores of each checkpoint, and the checks of what callers send.

Invariants:
- A path is absolute and has one spelling: no `.` or `..`, no doubled or trailing slash, no control character.
- A record's size is bounded, also for malformed requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from forged.catalog.errors import argument_invalid
from forged.catalog.model import STORAGE_PATH_CHARS_MAX, CheckpointMeta, CheckpointState
from forged.shares import Holder

PREFIX = "ckpt/"
RECORD_OVERHEAD_BYTES = 1024
"""What a record takes in memory besides its stored bytes, about."""
METRICS_MAX = 64
METRIC_CHARS_MAX = 128
HOLDS_MAX = 100
HOLDER_CHARS_MAX = 200
HOLD_S_MAX = 7 * 86_400.0
REASON_CHARS_MAX = 500
SECONDS_MAX = 1e10
SAVE_ID = re.compile(r"[0-9a-f]{8,64}")
_URL = re.compile(r"(?:file|s3|gs|az|memory)://")
_ANY_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
LOCAL = "local"


class Moment(NamedTuple):
    """The present time: wall for records, monotonic for deadlines."""

    wall: float
    monotonic: float
    revision: int = 0
    """The journal's last number: what came before what, also when the wall clock has gone back."""


class CheckpointRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One checkpoint as the daemon stores it."""

    meta: CheckpointMeta
    path: str
    """Where it is, or is being written."""
    save_id: str
    holder: Holder
    """The principal that the record is charged to in the shares of the catalogue."""
    is_trusted: bool = False
    """Whether the path came from a principal that may have the daemon touch any path."""
    recorded_after: int = 0
    """The journal's last number before it was recorded: the wall clock may go back."""
    manifest_job: str | None = None
    """The job that the manifest of an adopted checkpoint names, empty if it names none; None: its own job."""
    worker_id: str = ""
    """The worker that writes it; empty if the daemon does."""
    incarnation: bytes = b""
    """That worker's incarnation: it may report the end also when it has left."""
    keep: int | None = None
    """How many checkpoints the script keeps."""
    holds: dict[str, float] = {}
    """For how many seconds each holder keeps it, counted anew when the daemon starts."""
    is_to_compact: bool = False
    """Whether a full checkpoint is to be made of it."""
    is_given_up: bool = False
    """Whether it counts as failed although its writer did not say so."""
    note: str = ""
    """Why it failed or is corrupted."""

    @property
    def id(self) -> str:
        return self.meta.checkpoint_id

    @property
    def job(self) -> str:
        return self.meta.training_run_id

    @property
    def files_job(self) -> str:
        """The job that its manifest must name, so that the files are this checkpoint's."""
        return self.job if self.manifest_job is None else self.manifest_job

    @property
    def key(self) -> str:
        return key_of(self.job, self.id)

    @property
    def is_being_written(self) -> bool:
        return self.meta.state is CheckpointState.CREATING

    @property
    def is_unsettled(self) -> bool:
        """Whether it is being written, or is a failed save that may be complete yet."""
        return self.is_being_written or self.meta.is_failed_save

    @property
    def is_deleted(self) -> bool:
        return self.meta.state is CheckpointState.DELETED

    @property
    def folder(self) -> str:
        return folder_of(self.path)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CheckpointRecord).decode


def key_of(job: str, checkpoint_id: str) -> str:
    return f"{PREFIX}{job}/{checkpoint_id}"


def encoded(record: CheckpointRecord) -> bytes:
    return _encode(record)


def decoded(value: bytes) -> CheckpointRecord:
    return _decode(value)


def folder_of(path: str) -> str:
    """The directory or bucket folder of a checkpoint."""
    return path.rpartition("/")[0] or "/"


def storage_kind(path: str) -> str:
    """The kind of storage of a path: local, or the scheme of its URL."""
    scheme, mark, _ = path.partition("://")
    return scheme if mark and scheme != "file" else LOCAL


def checked_location(name: str, path: str) -> str:
    """The absolute path or URL of a checkpoint or folder; refuses other spellings of it."""
    wanted = "an absolute path, or a URL such as s3://bucket/folder/name"
    if not 0 < len(path) <= STORAGE_PATH_CHARS_MAX:
        raise argument_invalid(name, path, f"{wanted}, of 1 to {STORAGE_PATH_CHARS_MAX} characters")
    if not path.isprintable():
        raise argument_invalid(name, path, f"{wanted}, without control characters")
    url = _URL.match(path)
    if url is None and (_ANY_URL.match(path) or not path.startswith("/")):
        raise argument_invalid(name, path, wanted)
    rest = path[url.end() :] if url else path[1:]
    parts = rest.split("/")
    if url is not None and path.startswith("file://"):
        if parts[0]:
            raise argument_invalid(name, path, "a file URL without a host: file:///path")
        parts = parts[1:]
    if not all(parts) or "." in parts or ".." in parts:
        raise argument_invalid(name, path, f"{wanted}, without `.`, `..`, and doubled or trailing slashes")
    return path


def checked_checkpoint_path(path: str) -> str:
    """The location of a checkpoint: a folder and a name in it."""
    checked_location("storage_path", path)
    folder = folder_of(path)
    if folder.endswith((":/", "://")):
        raise argument_invalid("storage_path", path, "a folder and a name in it, such as s3://bucket/step-100")
    return path


def checked_save_id(save_id: str) -> str:
    if not SAVE_ID.fullmatch(save_id):
        raise argument_invalid("save_id", save_id, "8 to 64 lower-case hexadecimal digits")
    return save_id


def checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    if len(metrics) > METRICS_MAX:
        raise argument_invalid("metrics", f"{len(metrics)} entries", f"at most {METRICS_MAX} entries")
    for key in metrics:
        if not 0 < len(key) <= METRIC_CHARS_MAX or not key.isprintable():
            raise argument_invalid("metrics", key, f"named with 1 to {METRIC_CHARS_MAX} printable characters")
    return dict(metrics)


def checked_holder(holder: str) -> str:
    if not 0 < len(holder) <= HOLDER_CHARS_MAX or not holder.isprintable():
        raise argument_invalid("holder", holder, f"1 to {HOLDER_CHARS_MAX} printable characters")
    return holder


def checked_seconds(name: str, seconds: float, most: float = SECONDS_MAX) -> float:
    if not (math.isfinite(seconds) and 0 <= seconds <= most):
        raise argument_invalid(name, seconds, f"seconds from 0 to {most:g}")
    return seconds


def shortened(reason: str) -> str:
    """A caller's text, in one line and bounded."""
    return " ".join(reason.split())[:REASON_CHARS_MAX]


def root_of(path: str, roots: tuple[str, ...], job: str) -> str | None:
    """The first of the roots that a path lies in, if any; `{job}` in a root stands for the job's name."""
    of_job = (root.replace("{job}", job).rstrip("/") for root in roots)
    return next((root or "/" for root in of_job if path.startswith(f"{root}/")), None)
