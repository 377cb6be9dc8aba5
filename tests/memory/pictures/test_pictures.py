from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given

from forged.memory import MemoryBlock, MemoryInvalid
from forged.memory.pictures import Drawing, draw_blocks, draw_packing, rendered, to_png, to_svg
from forged.memory.pictures.block_map import COLORS
from forged.memory.pictures.drawing import Rectangle, Text, fitting
from forged.memory.pictures.packing import CAPACITY, EVICTED
from forged.memory.pictures.scales import byte_ticks, ticks
from forged.memory.traces import Buffer, Packing, events, plan, replay
from forged.phrases import bytes_text
from tests.memory.pictures.shown import ALLOCATED, BLOCKS, BUFFERS, CACHED, FREE, PACKING, PINNED, pixels_of
from tests.memory.traces.buffers import traces


def test_each_buffer_is_a_rectangle_as_long_as_its_life_and_as_high_as_its_size() -> None:
    found = [shape for shape in draw_packing(BUFFERS, PACKING).shapes if isinstance(shape, Rectangle)]
    a, b = found[2], found[3]
    assert a.width == pytest.approx(2 * b.width)
    assert a.height == pytest.approx(2 * b.height)


def test_picture_of_a_packing_has_title_axes_units_and_legend() -> None:
    said = _texts(draw_packing(BUFFERS, PACKING, 1024, "trace"))
    assert "trace: 4 buffers, height 1.00 KiB, 1.000 x peak" in said
    assert {"offset", "time (units of the trace)", "512 B", "capacity 1.00 KiB", "peak live 1.00 KiB"} <= said


def test_a_capacity_far_above_the_packing_is_told_and_not_drawn() -> None:
    drawing = draw_packing(BUFFERS, PACKING, 80 << 30)
    assert "capacity 80.0 GiB (above)" in _texts(drawing)
    assert _count(drawing, CAPACITY) == 1


def test_an_evicted_buffer_is_drawn_until_its_eviction() -> None:
    buffers = [Buffer("old", 0, 10, 6), Buffer("next", 5, 10, 5)]
    drawing = draw_packing(buffers, replay(events(buffers), 10, "lru"), 10)
    shown = [shape for shape in drawing.shapes if isinstance(shape, Rectangle) and shape.fill == EVICTED]
    assert shown[0].width == pytest.approx((drawing.width - 160) / 2)
    assert "evicted, 6 B" in _texts(drawing)


def test_picture_of_blocks_has_each_status_in_its_colour_and_share() -> None:
    drawing = draw_blocks(BLOCKS, "w0/gpu0", rows=1)
    width = {
        status: sum(
            shape.width
            for shape in drawing.shapes[2:]
            if isinstance(shape, Rectangle) and shape.fill == color and shape.height > 100
        )
        for status, color in COLORS.items()
    }
    assert width[ALLOCATED] == pytest.approx(2 * width[FREE])
    assert width[PINNED] == pytest.approx(width[CACHED])
    assert {"w0/gpu0: 1.00 KiB, 75% in use, 4 blocks", "pinned 128 B in 1", "embedding"} <= _texts(drawing)


def test_a_block_that_crosses_rows_is_drawn_in_each() -> None:
    drawing = draw_blocks([MemoryBlock("1", 0, 100, ALLOCATED)], rows=4)
    assert _count(drawing, COLORS[ALLOCATED]) == 5


@given(traces())
def test_every_packing_can_be_drawn(buffers: list[Buffer]) -> None:
    drawing = draw_packing(buffers, plan(buffers, nodes_max=100), width=400, height=300)
    assert pixels_of(to_png(drawing)).shape == (300, 400, 3)
    ET.fromstring(to_svg(drawing))


def test_nothing_and_sizes_near_2_to_the_63_can_be_drawn() -> None:
    huge = [Buffer("a", -(2**63), 2**63, 2**63 - 1), Buffer("b", 0, 1, 2**63 - 1)]
    for drawing in (
        draw_packing([], Packing({}, 0, 0), 0),
        draw_packing(huge, plan(huge)),
        draw_blocks([]),
        draw_blocks([MemoryBlock("1", 0, 2**63 - 1, CACHED), MemoryBlock("2", 2**63 - 1, 1, FREE)]),
    ):
        pixels_of(to_png(drawing))
        ET.fromstring(to_svg(drawing))


def test_png_and_svg_have_the_size_and_the_colours_of_the_drawing() -> None:
    drawing = Drawing(30, 20, [Rectangle(10, 5, 10, 10, "#2e6da4")])
    pixels = pixels_of(to_png(drawing))
    assert pixels[10, 15].tolist() == [0x2E, 0x6D, 0xA4]
    assert pixels[0, 0].tolist() == pixels[10, 25].tolist() == [255, 255, 255]
    assert ET.fromstring(to_svg(drawing)).attrib["width"] == "30"


def test_the_name_of_the_file_tells_the_format() -> None:
    drawing = Drawing(3, 2)
    assert rendered(drawing, "a.PNG") == to_png(drawing)
    assert rendered(drawing, "a.b.svg") == to_svg(drawing).encode()
    for name in ("a.jpg", "png", ""):
        with pytest.raises(MemoryInvalid, match=r"must be a name that ends in .png or .svg"):
            rendered(drawing, name)


def test_texts_of_strangers_stay_text() -> None:
    drawing = draw_blocks(BLOCKS, 'x"><script>\x00\udc80</script>', rows=1)
    tags = {element.tag.split("}")[1] for element in ET.fromstring(to_svg(drawing)).iter()}
    assert tags == {"svg", "rect", "text"}
    to_png(drawing)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (10 << 20, "10.0 MiB"), (2**63, "8.00 EiB")],
)
def test_bytes_have_three_digits_and_a_unit(size: int, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize("end", [1, 7, 8, 9, 1000, 1 << 20, (1 << 20) + 1, 2**63 - 1])
def test_ticks_of_bytes_are_few_and_powers_of_two_apart(end: int) -> None:
    found = byte_ticks(end, 8)
    step = found[1] - found[0]
    assert 2 <= len(found) <= 9
    assert step & (step - 1) == 0


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 97), (-50, 50), (0, 2**63), (78_848, 1_048_576)])
def test_ticks_of_times_are_few_and_within(first: int, last: int) -> None:
    found = ticks(first, last, 8)
    assert 1 <= len(found) <= 9
    assert first <= found[0] <= found[-1] <= last


def test_a_text_is_shortened_to_its_width() -> None:
    assert fitting("embedding", 9 * 12) == "embedding"
    assert fitting("embedding", 5 * 12) == "emb.."


def _texts(drawing: Drawing) -> set[str]:
    return {shape.text for shape in drawing.shapes if isinstance(shape, Text)}


def _count(drawing: Drawing, color: str) -> int:
    return sum(color in (getattr(shape, "fill", ""), getattr(shape, "color", "")) for shape in drawing.shapes)
