"""`forgectl ckpt compact PATH`: makes a full checkpoint of an incremental one.

Invariants:
- The checkpoint can be restored at each moment, also if the command is interrupted.
"""

from __future__ import annotations

import time

from forged.checkpoint.ports import CancelToken
from forged.checkpoint.saving.compaction import make_full
from forged.checkpoint.storage import listing
from forged.cli.ckpt.command import checkpoint_command
from forged.cli.ckpt.ls import checkpoint_row
from forged.cli.ckpt.progress_bar import ProgressBar
from forged.cli.ckpt.target import storage_and_prefix
from forged.cli.forgectl import tables
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_OK


@checkpoint_command
def compact_one(options: Options, token: CancelToken) -> int:
    storage, prefix = storage_and_prefix(options.checkpoint, token)
    before = listing.read_manifest(storage, prefix)
    started_at = time.monotonic()
    with ProgressBar(options, prefix) as bar:
        manifest = make_full(storage, prefix, token, bar)
    took_s = time.monotonic() - started_at
    name = tables.field("", prefix)
    text = f"{name} is a full checkpoint already"
    if before.links:
        text = f"{name}: it is a full checkpoint now, {tables.size(manifest.size_bytes)}, in {tables.duration(took_s)}"
    written = manifest.size_bytes - before.size_bytes
    answer(options, checkpoint_row(manifest) | {"written_bytes": written, "seconds": took_s}, lambda: print(text))
    return EXIT_OK
