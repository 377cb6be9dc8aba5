"""One rank's side of one save, from the agreement of the ranks to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from forged.checkpoint.format.consolidated import ConsolidatedFile
from forged.checkpoint.format.manifest import ManifestFence, Part
from forged.checkpoint.format.states import States
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, SaveOptions
from forged.checkpoint.saving.agreement import SaveAgreement
from forged.checkpoint.saving.files.consolidation import planned_files
from forged.checkpoint.saving.files.image import ArrayImage
from forged.checkpoint.saving.files.plan import SavePlan, Share
from forged.checkpoint.saving.files.staging import StagedPart
from forged.checkpoint.saving.save_report import SaveReport
from forged.checkpoint.storage import listing


class RunInfo(msgspec.Struct, frozen=True):
    """The run that a save belongs to, for its manifest."""

    job: str = ""
    step: int | None = None
    epoch: int | None = None
    fence: ManifestFence | None = None


@dataclass(slots=True)
class RankSave:
    """One rank's side of one save."""

    rank: int
    world_size: int
    options: SaveOptions
    agreement: SaveAgreement
    plan: SavePlan
    image_or_error: ArrayImage | Exception
    """What this rank writes, or why that could not be prepared."""
    share: Share
    """The pieces of the image."""
    states: States = field(default_factory=lambda: States([], [], []))
    """The states of all ranks; at the root only."""
    staged: StagedPart | None = None
    is_image_staged: bool = True
    """Whether the staged part, if there is one, has the bytes of the image; else the image is over a part of it."""
    references: list[Part] = field(default_factory=list)
    """The unchanged chunks of this rank, in files of earlier checkpoints."""
    whole_tensor_parts: list[Part] = field(default_factory=list)
    """The files of whole tensors that this rank has written."""
    report: SaveReport | None = None
    """Tells an observer how the save goes; at the root, if there is one."""
    is_in_slots: bool = False
    """Whether all ranks have staged into slots of their hosts."""
    is_persisted_by_host: bool = False
    """Whether the host writes the checkpoint from the slots, instead of the ranks."""

    @property
    def image(self) -> ArrayImage:
        """What this rank writes. Raises its preparation's error, in a step in which the other ranks learn of it."""
        if isinstance(self.image_or_error, Exception):
            raise self.image_or_error
        return self.image_or_error

    @property
    def copy(self) -> StagedPart | None:
        """The copy of the image."""
        return self.staged if self.is_image_staged else None

    @property
    def has_whole_tensor_files(self) -> bool:
        """Whether the checkpoint consists of files of whole tensors, which one rank assembles from the parts."""
        layout = self.options.format
        return layout is CheckpointFormat.CONSOLIDATED or (
            layout is CheckpointFormat.SINGLE_FILE and self.world_size > 1
        )

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    def file(self, rank: int) -> str:
        """The name of a rank's part."""
        is_packed = self.options.compression_level is not CompressionLevel.NONE and not self.has_whole_tensor_files
        return listing.part_name(
            self.agreement.prefix, self.agreement.save_id, rank, self.world_size, is_packed=is_packed
        )

    def whole_tensor_files(self) -> list[ConsolidatedFile]:
        """The files of whole tensors of this checkpoint."""
        agreement, options = self.agreement, self.options
        return planned_files(
            self.plan.tensors, agreement.prefix, agreement.save_id, options.format, options.compression_level
        )
