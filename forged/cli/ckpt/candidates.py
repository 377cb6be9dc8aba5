"""What a shell is offered where a checkpoint, or a tensor of one, is to be named.

Law: it is found out by looking into directories and the manifest, without loading what reads checkpoints, so that
nobody waits; nothing is asked of a network, and what cannot be read is not offered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SUFFIX = ".metadata.json"
MANIFEST_BYTES_MAX = 16 << 20
"""Reading a larger one would take a while."""
FOREIGN = (".safetensors", ".npz", ".safetensors.index.json")


def checkpoints(begun: str, endings: tuple[str, ...] = ()) -> Iterator[str]:
    """Checkpoints, as they are typed, the directories in which there may be more, and files that end so."""
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
    """What can be converted."""
    return checkpoints(begun, FOREIGN)


def tensors(where: str) -> Iterator[str]:
    """The tensors of a checkpoint."""
    path = Path(f"{where.rstrip('/').removesuffix(SUFFIX)}{SUFFIX}").expanduser()
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        if path.stat().st_size <= MANIFEST_BYTES_MAX:
            names = json.loads(path.read_bytes())["tensors"]["names"]
            yield from (name for name in names if isinstance(name, str))
