"""How a torch run keeps checkpoints: where, how often, and how many."""

from __future__ import annotations

import os
from typing import Any

from forged import checkpoint
from forged.worker.blocking import Training


class Checkpoints:
    """`Checkpoints("s3://bucket/run", every=500, keep=3)`: the checkpoints of a run, for `ft.join(checkpoints=)`.

    The run resumes from the newest one that can be restored, and saves by this schedule between its steps. `options`
    are those of `forged.checkpoint.Checkpoints`: `every`, `every_seconds`, `automatic`, `keep`, `incremental`,
    `memory_every` and others. Saves are written in the background, if `in_background=False` does not say otherwise.
    """

    def __init__(self, where: str | os.PathLike[str], *, in_background: bool = True, **options: Any) -> None:
        self.where = where
        self._options = {"in_background": in_background, **options}

    def open(self, worker: Training) -> checkpoint.Checkpoints:
        """The checkpoints, with all workers of the job as ranks."""
        return checkpoint.Checkpoints(self.where, ranks=worker, **self._options)
