"""Pictures of memory: packings over time and the blocks of a pool, as SVG, as PNG and in the terminal."""

from forged.memory.pictures.block_map import draw_blocks
from forged.memory.pictures.drawing import Drawing
from forged.memory.pictures.packing import draw_packing
from forged.memory.pictures.png import to_png
from forged.memory.pictures.rendering import rendered
from forged.memory.pictures.svg import to_svg
from forged.memory.pictures.terminal import blocks_text, packing_text

__all__ = ["Drawing", "blocks_text", "draw_blocks", "draw_packing", "packing_text", "rendered", "to_png", "to_svg"]
