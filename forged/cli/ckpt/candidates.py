"""Shell completion for the names of checkpoints and tensors.

Invariants:
- Only directories and manifests are read, without numpy and without the network, so completion is immediate.
- What cannot be read is not offered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SUFFIX = ".metadata.json"
MANIFEST_BYTES_MAX = 16 << 20
"""Larger manifests take too long to read for a completion."""
FOREIGN = (".safetensors", ".npz", ".safetensors.index.json")


def checkpoints(begun: str, endings: tuple[str, ...] = ()) -> Iterator[str]:
    """Checkpoints as they are typed, directories that may contain some, and files with these endings."""
    lead = begun[: begun.rfind("/") + 1]
    with suppress(OSError), os.scandir(Path(lead).expanduser() if lead else ".") as entries:
        found = {entry.name: entry.is_dir() for entry in entries}
        for name, is_directory in sorted(found.items()):
            if name.startswith(".") and not begun[len(lead) :]:
                continue
            if name.endswith(SUFFIX):
                yield f"{lead}{name.removesuffix(SUFFIX)}"
            elif is_directory and f"{name}{SUFFIX}" not in found:
                yield f"{lead}{name}/"
            elif endings and name.endswith(endings):
                yield f"{lead}{name}"


def sources(begun: str) -> Iterator[str]:
    """What `convert` accepts as a source."""
    return checkpoints(begun, FOREIGN)


def tensors(where: str) -> Iterator[str]:
    """The tensor names of a checkpoint."""
    path = Path(f"{where.rstrip('/').removesuffix(SUFFIX)}{SUFFIX}").expanduser()
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        if path.stat().st_size <= MANIFEST_BYTES_MAX:
            names = json.loads(path.read_bytes())["tensors"]["names"]
            yield from (name for name in names if isinstance(name, str))
