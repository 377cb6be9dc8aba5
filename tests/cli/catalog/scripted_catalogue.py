"""Replies of a daemon about the checkpoints of the job `run`, and `forgectl ckpt` run on it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.scripted_daemon import Refusal, ScriptedDaemon, scripted_daemon

AGE_S = 3 * 86_400.0 + 60.0
Caught = pytest.CaptureFixture[str]
UNKNOWN = Refusal("refused", "checkpoint_unknown", "there is no such checkpoint", "list the checkpoints of the run")


def record(number: int, **changes: Any) -> dict[str, Any]:
    """A `CheckpointMeta`; its age is shown as three days, however slow the test is."""
    return {
        "checkpoint_id": f"ckpt-{number:08x}",
        "training_run_id": "run",
        "epoch": 0,
        "step": 100 * number,
        "checkpoint_type": "full",
        "state": "complete",
        "size_bytes": 2_150_000_000,
        "created_at": time.time() - AGE_S,
        "parent_id": None,
        "metrics": {},
        "storage_path": f"/data/run/step-{100 * number}",
        "verified_at": None,
        "pinned": False,
        "holders": [],
        "abandoned": False,
    } | changes


ESTIMATE = {"low_s": 2.0, "expected_s": 2.5, "high_s": 4.0, "source": "7 restores of this job"}


def view_of(meta: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A `CheckpointView`."""
    return {
        "meta": meta,
        "chain": [meta["checkpoint_id"]],
        "children": [],
        "is_restorable": True,
        "is_managed": True,
        "is_kept": True,
        "retention": "the newest restorable checkpoint",
        "estimate": ESTIMATE,
    } | changes


class ScriptedCatalogue(Mapping[str, Any]):
    """The replies about these checkpoints; further ones are given by name, as values or functions of the fields."""

    def __init__(self, *metas: dict[str, Any], page: int = 500, **replies: Any) -> None:
        self._replies = {"ListCheckpoints": self._list, "ShowCheckpoint": self._show, "ShowJob": {"settings": {}}}
        self._replies |= {"ReadRetention": {"verdicts": [], "more": False, "regained_bytes": 0}}
        self._replies |= replies
        self._page = page
        self.metas = list(metas)

    def __getitem__(self, method: str) -> Any:
        return self._replies[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self._replies)

    def __len__(self) -> int:
        return len(self._replies)

    def _list(self, fields: dict[str, Any]) -> dict[str, Any]:
        ids = [meta["checkpoint_id"] for meta in self.metas]
        first = ids.index(fields["after"]) + 1 if fields.get("after") else 0
        end = first + min(self._page, fields.get("limit", self._page))
        size = sum(meta["size_bytes"] for meta in self.metas)
        page = {"checkpoints": self.metas[first:end], "more": end < len(ids), "count": len(ids), "size_bytes": size}
        return page | {"cadence": "every 600 s: a save costs 10 s, 1 failure in 5.0 h"}

    def _show(self, fields: dict[str, Any]) -> Any:
        found = [meta for meta in self.metas if meta["checkpoint_id"] == fields["checkpoint_id"]]
        return view_of(found[0]) if found else UNKNOWN


@contextmanager
def catalogue(directory: Path, *metas: dict[str, Any], facts: Any = None, **replies: Any) -> Iterator[ScriptedDaemon]:
    """A daemon with these checkpoints of the job `run`."""
    with scripted_daemon(directory, ScriptedCatalogue(*metas, **replies), facts=facts) as daemon:
        yield daemon


def on_terminal(daemon: ScriptedDaemon, line: str, capsys: Caught, columns: int) -> list[str]:
    """The lines of a command on a terminal without colours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True)
        for name, value in (("TERM", "xterm"), ("COLUMNS", f"{columns}"), ("LINES", "24"), ("NO_COLOR", "1")):
            patch.setenv(name, value)
        code, out, err = daemon.run(line, capsys)
    assert (code, err) == (0, "")
    return out.splitlines()
