from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.boxes import chunks, grid_of, whole
from forged.checkpoint.loading.manifest_index import Index
from tests.checkpoint.fixtures.layouts import small_chunks
from tests.checkpoint.fixtures.manifests import SMALL_SHAPES, boxes_in, manifest_of


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_layout_gives_offset_box_piece_and_tensor_of_each_chunk(data: st.DataObject) -> None:
    with small_chunks(4, 64, 1):
        shapes = data.draw(st.lists(SMALL_SHAPES, min_size=1, max_size=4))
        pieces = [(tensor, data.draw(boxes_in(shape))) for tensor, shape in enumerate(shapes)]
        layout = Index(manifest_of(shapes, [pieces])).layout(0)
        at = 7
        number = 0
        for place, (tensor, box) in enumerate(pieces):
            for chunk in chunks(box, grid_of(shapes[tensor], 1)):
                assert layout.file_offsets[number] == at
                assert layout.chunk_box(number) == chunk
                assert (layout.piece_of(number), layout.tensor_of(number)) == (place, tensor)
                at, number = at + chunk.volume, number + 1
        assert (layout.file_offsets[-1], layout.first_chunks[-1]) == (at, number)


def test_chunks_larger_in_the_file_than_in_memory_are_refused() -> None:
    manifest = manifest_of([(8,)], [[(0, whole((8,)))]], stored=[9])
    with pytest.raises(CheckpointException) as caught:
        Index(manifest).layout(0)
    assert caught.value.code == "checkpoint_manifest_malformed"
