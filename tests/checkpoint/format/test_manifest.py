from __future__ import annotations

import base64
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.boxes import CHUNK_BYTES_MAX, Box, Shape, chunk_lengths, grid_of
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import (
    DIGEST_BYTES,
    SIZE_MAX,
    TOMBSTONE,
    Manifest,
    ManifestFence,
    Part,
    Tensors,
    decode,
    deduplicate_boxes,
    digests_of,
    encode,
    pieces,
)
from forged.checkpoint.format.states import States
from forged.checkpoint.format.tree import DEPTH_MAX, NAME_CHARS_MAX, unflatten
from forged.checkpoint.model import AXES_MAX, CheckpointFormat, CompressionLevel, PerRank, ShardedArray
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_writer import write_checkpoint

PATH = "a.metadata.json"


def states() -> list[Any]:
    matrix = np.arange(60_000, dtype=np.float32).reshape(300, 200)
    return [
        {
            "model": {"w": ShardedArray(matrix[rank::2], (300, 200), (rank * 150, 0)), "b": np.ones(7, np.int8)},
            "half": np.zeros(3, ml_dtypes.bfloat16),
            "none": np.empty((0, 4)),
            "rng": PerRank(np.arange(4)),
            "lr": 0.1,
        }
        for rank in range(2)
    ]


def sound(level: CompressionLevel = CompressionLevel.NONE) -> Manifest:
    """A manifest in encoded form."""
    return write_checkpoint(MemoryStorage(), "a", states(), level=level)


def tree_of(manifest: Manifest) -> Any:
    """The manifest as plain values."""
    return msgspec.json.decode(encode(manifest))


def refused(data: bytes, path: str = PATH) -> CheckpointException:
    with pytest.raises(CheckpointException) as caught:
        decode(data, path)
    assert caught.value.checkpoint_path == path
    assert len(caught.value.message) < 1_000
    return caught.value


def written(document: Any) -> bytes:
    """Any document with a correct checksum."""
    body = document if isinstance(document, bytes) else msgspec.json.encode(document)
    assert body.endswith(b"}")
    return body[:-1] + b',"checksum":"%s"}\n' % xxhash.xxh3_128_hexdigest(body[:-1]).encode()


def changed(change: Callable[[Any], object], level: CompressionLevel = CompressionLevel.NONE) -> bytes:
    """The manifest after a change, with a correct checksum."""
    document = tree_of(sound(level))
    del document["checksum"]
    change(document)
    return written(document)


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
def test_decode_gives_the_encoded_manifest(level: CompressionLevel) -> None:
    manifest = msgspec.structs.replace(
        sound(level),
        job="j",
        step=5,
        fence=ManifestFence(2, 3),
        custom={"x": [1, {"y": None}]},
        layout=CheckpointFormat.SINGLE_FILE,
    )
    assert decode(encode(manifest), PATH) == manifest


def test_every_flipped_bit_is_refused() -> None:
    data = encode(sound())
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            assert refused(bytes(damaged)).code == "checkpoint_manifest_corrupt"


def test_truncated_or_extended_data_are_refused() -> None:
    data = encode(sound())
    for length in range(len(data)):
        assert refused(data[:length]).code == "checkpoint_manifest_corrupt"
    for more in (b"\n", b"x", data):
        assert refused(data + more).code == "checkpoint_manifest_corrupt"
    assert refused(bytes(len(data))).code == "checkpoint_manifest_corrupt"


def test_a_manifest_under_another_prefix_is_refused() -> None:
    data = encode(sound())
    refused(data, "b.metadata.json")
    refused(data, "aa.metadata.json")
    assert decode(data, f"a{TOMBSTONE}").prefix == "a"


def test_an_unknown_version_is_reported_as_such() -> None:
    error = refused(changed(lambda said: said.update(version="3.0")))
    assert error.type is ExceptionType.INCOMPATIBLE_VERSION
    decode(changed(lambda said: said.update(version="1.7", something_new=[1])), PATH)


def set_to(*way: Any) -> Callable[[Any], object]:
    """A change: put the last argument at the path of the other arguments."""
    *keys, last, value = way

    def change(document: Any) -> None:
        for key in keys:
            document = document[key]
        document[last] = value

    return change


def drop(key: str) -> Callable[[Any], object]:
    return lambda document: document.pop(key)


def digests(count: int) -> str:
    return base64.b64encode(bytes(DIGEST_BYTES * count)).decode()


def deep(depth: int) -> Any:
    node: Any = 0
    for _ in range(depth):
        node = {"l": [node]}
    return node


def own_in(document: Any) -> int:
    """The number of a per-rank tensor of rank 0."""
    return int(next(iter(document["tensors"]["ranks"])))


HOSTILE: dict[str, Callable[[Any], object]] = {
    "no format": drop("format"),
    "another format": set_to("format", "tar"),
    "no prefix": drop("prefix"),
    "a prefix that leads away": set_to("prefix", "../a"),
    "a prefix that is a number": set_to("prefix", 1),
    "no ranks": set_to("world_size", 0),
    "fewer than no ranks": set_to("world_size", -1),
    "more ranks than there can be": set_to("world_size", 1 << 62),
    "a rank without a frame": set_to("states", "frame_of_rank", [0]),
    "a frame that is not there": set_to("states", "frame_of_rank", [0, 7]),
    "a frame before the first": set_to("states", "frame_of_rank", [0, -1]),
    "no states": drop("states"),
    "a time before all": set_to("created_at", -1.0),
    "a time after all": set_to("created_at", 1e300),
    "a time that is a text": set_to("created_at", "now"),
    "a layout that is not known": set_to("layout", "heap"),
    "a compression that is not known": set_to("compression", "zip"),
    "a name too few": lambda said: said["tensors"]["names"].pop(),
    "a name twice": lambda said: set_to("tensors", "names", 0, said["tensors"]["names"][1])(said),
    "a name that is too long": set_to("tensors", "names", 0, "x" * (NAME_CHARS_MAX + 1)),
    "a type that is not known": set_to("tensors", "dtypes", 0, "float33"),
    "a type that is objects": set_to("tensors", "dtypes", 0, "|O"),
    "a type that numpy would have to parse": set_to("tensors", "dtypes", 0, ",>O4s"),
    "a negative size": set_to("tensors", "shapes", 0, [-300, -200]),
    "a size beyond all": set_to("tensors", "shapes", 0, [1 << 61]),
    "sizes that are too much together": set_to("tensors", "shapes", 0, [1 << 40, 1 << 40]),
    "sizes that are too much times nothing": set_to("tensors", "shapes", 0, [0, 1 << 40, 1 << 40]),
    "a size beyond integers": set_to("tensors", "shapes", 0, [1 << 70]),
    "a size that is broken": set_to("tensors", "shapes", 0, [0.5]),
    "too many axes": set_to("tensors", "shapes", 0, [1] * (AXES_MAX + 1)),
    "a shape that has more chunks": set_to("tensors", "shapes", 0, [1 << 50]),
    "an owner that is no rank": set_to("tensors", "ranks", {"0": 2}),
    "an owner of no tensor": set_to("tensors", "ranks", {"99": 0}),
    "an owner of a tensor before the first": set_to("tensors", "ranks", {"-1": 0}),
    "what a rank had that is outside": set_to("tensors", "splits", 0, {"0": [[0, 0], [301, 200]]}),
    "what a rank had that begins before": set_to("tensors", "splits", 0, {"0": [[-1, 0], [1, 1]]}),
    "what a rank had of fewer than no rows": set_to("tensors", "splits", 0, {"0": [[9, 0], [-1, 1]]}),
    "what a rank had with an axis too few": set_to("tensors", "splits", 0, {"0": [[0], [1]]}),
    "what ranks had with other axes": set_to("tensors", "splits", 0, {"0": [[0, 0], [1, 1]], "1": [[0], [1]]}),
    "what a rank had with one axis that begins nowhere": set_to("tensors", "splits", 0, {"0": [[0, 0], [1]]}),
    "what a rank had beyond integers": set_to("tensors", "splits", 0, {"0": [[1 << 70, 0], [1, 1]]}),
    "a split without ranks": set_to("tensors", "splits", 0, {}),
    "what a rank had that is not there": set_to("tensors", "splits", 0, "2", [[0, 0], [1, 1]]),
    "a split of no tensor": set_to("tensors", "split_of", "99", 0),
    "a split of a tensor before the first": set_to("tensors", "split_of", "-1", 0),
    "a split that no tensor has": lambda said: said["tensors"]["splits"].append({"0": [[0], [0]]}),
    "a split that is not there": set_to("tensors", "split_of", "0", 1),
    "a split before the first": set_to("tensors", "split_of", "0", -1),
    "a file that is elsewhere": set_to("parts", 0, "file", "b/x.safetensors"),
    "a file that leads away": set_to("parts", 0, "file", "a/../b"),
    "a file that is at the root": set_to("parts", 0, "file", "/etc/passwd"),
    "a file without a name": set_to("parts", 0, "file", "a/"),
    "a file that is hidden": set_to("parts", 0, "file", "a/.x"),
    "a file that is the prefix": set_to("parts", 0, "file", "a"),
    "a file twice": lambda said: set_to("parts", 0, "file", said["parts"][1]["file"])(said),
    "a file of no rank": set_to("parts", 0, "rank", 2),
    "a file that is too small": lambda said: set_to("parts", 0, "size", said["parts"][0]["size"] - 1)(said),
    "a file that is too large": lambda said: set_to("parts", 0, "size", said["parts"][0]["size"] + 1)(said),
    "a file that is less than empty": set_to("parts", 0, "size", -1),
    "a file beyond all": set_to("parts", 0, "size", SIZE_MAX * 2),
    "data that begin before the file": set_to("parts", 0, "data_offset", -1),
    "data that begin behind the file": set_to("parts", 0, "data_offset", 1 << 50),
    "a piece of no tensor": set_to("parts", 0, "tensors", 0, 99),
    "a piece of a tensor before the first": set_to("parts", 0, "tensors", 0, -1),
    "a piece too many": lambda said: said["parts"][0]["tensors"].append(0),
    "a box of no piece": lambda said: said["parts"][0]["box_of"].append(0),
    "a piece of which nothing is said": lambda said: said["parts"][0]["box_of"].pop(),
    "a box that no piece has": lambda said: said["parts"][0]["boxes"].append([[0, 0], [1, 1]]),
    "a box that is not there": set_to("parts", 0, "box_of", 0, 1),
    "a box before the first": set_to("parts", 0, "box_of", 0, -2),
    "a box outside its tensor": set_to("parts", 0, "boxes", 0, [[299, 0], [2, 200]]),
    "a box before its tensor": set_to("parts", 0, "boxes", 0, [[-1, 0], [150, 200]]),
    "a box of fewer than no rows": set_to("parts", 0, "boxes", 0, [[0, 0], [-150, 200]]),
    "a box with an axis too few": set_to("parts", 0, "boxes", 0, [[0], [150]]),
    "a box with another size": set_to("parts", 0, "boxes", 0, [[0, 0], [149, 200]]),
    "a digest too few": lambda said: set_to(
        "parts", 0, "digests", digests(len(said["parts"][0]["digests"]) * 3 // 4 // DIGEST_BYTES - 1)
    )(said),
    "digests that are cut": set_to("parts", 0, "digests", base64.b64encode(bytes(17)).decode()),
    "digests that are no base64": set_to("parts", 0, "digests", "%%%"),
    "digests that are not even letters": set_to("parts", 0, "digests", "é"),
    "a digest of the header that is too short": set_to("parts", 0, "header", "AAAA"),
    "lengths of chunks that are not compressed": set_to("parts", 0, "stored", []),
    "a file beside that leads away": set_to("extra_files", {"a/../../x": 1}),
    "a file beside that is less than empty": set_to("extra_files", {"a/index.json": -1}),
    "a frame with a tensor that is not there": set_to("states", "frames", 0, {"d": {"x": 99, "y": {"o": 0}}}),
    "a frame with a tensor before the first": set_to("states", "frames", 0, {"d": {"x": -1, "y": {"o": 0}}}),
    "a frame with a rank's own tensor": lambda said: set_to("states", "frames", 0, {"l": [own_in(said), {"o": 0}]})(
        said
    ),
    "a frame with something of a rank's own": set_to("states", "frames", 0, {"l": [{"p": {"v": 1}}, {"o": 0}]}),
    "a frame that is nothing": set_to("states", "frames", 0, None),
    "a frame of a kind that is not known": set_to("states", "frames", 0, {"l": [{"pickle": "gASVDwA="}, {"o": 0}]}),
    "a frame that is too deep": set_to("states", "frames", 0, {"l": [deep(DEPTH_MAX + 5), {"o": 0}]}),
    "a frame with a number that is none": set_to("states", "frames", 0, {"l": [{"f": "0x1p999999"}, {"o": 0}]}),
    "a frame with a place twice": set_to("states", "frames", 0, {"l": [{"o": 0}, {"o": 0}]}),
    "a frame without a place": set_to("states", "frames", 0, {"l": []}),
    "a frame with another place": set_to("states", "frames", 0, {"o": 1}),
    "a frame with a place before the first": set_to("states", "frames", 0, {"o": -1}),
    "a frame with a place that is no number": set_to("states", "frames", 0, {"o": False}),
    "a frame of no rank": lambda said: said["states"]["frames"].append({"d": {}}),
    "a rank without its own": set_to("states", "own", 0, []),
    "a rank with more of its own": lambda said: said["states"]["own"][0].append({"v": 1}),
    "a rank of which nothing is said": lambda said: said["states"]["own"].pop(),
    "a rank that is not there": lambda said: said["states"]["own"].append([]),
    "another rank's own": lambda said: set_to("states", "own", 0, said["states"]["own"][1])(said),
    "a tensor of all as a rank's own": set_to("states", "own", 0, [0]),
    "a tensor that is not there as a rank's own": set_to("states", "own", 0, [99]),
    "a rank's own that is nothing": set_to("states", "own", 0, [None]),
    "a rank's own with a placeholder": set_to("states", "own", 0, [{"o": 0}]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_with_this_fault_is_refused(what: str) -> None:
    error = refused(changed(HOSTILE[what]))
    assert error.type is ExceptionType.CORRUPTED_CHECKPOINT
    assert error.code == "checkpoint_manifest_malformed"


@pytest.mark.parametrize("depth", range(DEPTH_MAX - 4, DEPTH_MAX + 3))
def test_per_rank_values_too_deep_for_their_place_are_refused(depth: int) -> None:
    node: Any = {"v": None}
    for _ in range(depth):
        node = {"l": [node]}
    data = changed(set_to("states", "own", 0, [node]))
    if depth < DEPTH_MAX:
        unflatten(decode(data, PATH).tree(0), int)
    else:
        refused(data)


def test_many_ranks_with_one_frame_take_little_memory() -> None:
    ranks, names = 200, 500
    frame = {"d": {**{f"tensor-{number}": number for number in range(names)}, "rng": {"o": 0}}}
    tensors = Tensors([f"tensor-{n}" for n in range(names)], ["uint8"] * names, [(0,)] * names)
    own = [[{"v": rank}] for rank in range(ranks)]
    data = encode(Manifest("a", 0.0, ranks, tensors, States([frame], [0] * ranks, own), []))
    assert len(data) < 100 * (ranks + names)
    tracemalloc.start()
    try:
        manifest = decode(data, PATH)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(data)
    finally:
        tracemalloc.stop()
    assert manifest.tree(7)["d"]["rng"] == {"p": {"v": 7}}


@pytest.mark.parametrize("stored", [0, 1 << 40, "longer", "positive"])
def test_an_impossible_stored_length_is_refused(stored: Any) -> None:
    def change(document: Any) -> None:
        part = document["parts"][0]
        before = part["stored"][0]
        plain = next(iter(pieces(sound(CompressionLevel.FAST), 0))).lengths[0]
        part["stored"][0] = {"longer": plain, "positive": -1}.get(stored, stored)
        part["size"] += abs(part["stored"][0]) - abs(before)

    refused(changed(change, CompressionLevel.FAST))


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]}",
        b'{"format":}',
        b"\xff}",
        b"[" * 1_000_000 + b"}",
        b'{"states":' + b"[" * 100_000 + b"}",
        b'{"a":1}' * 2,
    ],
)
def test_data_that_are_no_manifest_are_refused(body: bytes) -> None:
    refused(written(body))


@settings(max_examples=200)
@given(st.data())
def test_any_change_gives_a_manifest_or_a_typed_error(data: st.DataObject) -> None:
    document = tree_of(sound(data.draw(st.sampled_from(list(CompressionLevel)[:2]))))
    del document["checksum"]
    node: Any = document
    while isinstance(node, dict | list) and node:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or data.draw(st.integers(0, 4)) == 0:
            node[key] = data.draw(
                st.one_of(
                    st.none(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4), st.just([]), st.just({})
                )
            )
            break
        node = node[key]
    try:
        manifest = decode(written(document), PATH)
    except CheckpointException:
        return
    for number in range(len(manifest.parts)):
        list(pieces(manifest, number))


def test_a_compressed_element_larger_than_a_chunk_is_refused() -> None:
    """A few bytes could claim to decompress to any size."""

    def one_of(itemsize: int) -> bytes:
        document = tree_of(sound())
        del document["checksum"]
        document["tensors"] = {"names": ["t"], "dtypes": [f"|V{itemsize}"], "shapes": [[1]]}
        document["states"] = {"frames": [{"d": {"t": 0}}], "frame_of_rank": [0, 0], "own": [[], []]}
        document["parts"] = [
            {
                "file": "a/x",
                "rank": 0,
                "size": 1_000,
                "data_offset": 0,
                "tensors": [0],
                "boxes": [],
                "box_of": [],
                "digests": digests(1),
                "header": digests(1),
                "stored": [1_000],
            }
        ]
        return written(document)

    assert decode(one_of(CHUNK_BYTES_MAX), PATH).tensors.names == ["t"]
    assert "parts.stored" in refused(one_of(CHUNK_BYTES_MAX + 1)).message


def test_a_small_manifest_of_huge_tensors_takes_little_memory() -> None:
    """The tensors have 2**50 bytes each, and pieces claim to hold them."""
    count = 500
    document = tree_of(sound())
    del document["checksum"]
    document["tensors"] = {
        "names": [f"t{number}" for number in range(count)],
        "dtypes": ["uint8"] * count,
        "shapes": [[1 << 25, 1 << 25]] * count,
    }
    document["states"] = {"frames": [{"d": {}}], "frame_of_rank": [0, 0], "own": [[], []]}
    document["parts"] = [
        {
            "file": "a/x",
            "rank": 0,
            "size": count << 50,
            "data_offset": 0,
            "tensors": list(range(count)),
            "boxes": [[[0, 3], [1 << 25, 1]]],
            "box_of": [0] + [-1] * (count - 1),
            "digests": digests(4),
            "header": digests(1),
            "stored": [1, 1, 1, 1],
        }
    ]
    data = written(document)
    tracemalloc.start()
    try:
        refused(data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def second_half(shape: tuple[int, ...]) -> tuple[Shape, Shape]:
    """The box after the middle of every axis."""
    return tuple(size // 2 for size in shape), tuple(size - size // 2 for size in shape)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 300), max_size=3), st.sampled_from(["uint8", "float32", "<U3"])), max_size=5
    ),
    st.data(),
)
def test_pieces_follow_each_other(kinds: list[tuple[list[int], str]], data: st.DataObject) -> None:
    shapes = [tuple(shape) for shape, _ in kinds]
    tensors = Tensors([str(number) for number in range(len(kinds))], [dtype for _, dtype in kinds], shapes)
    order = data.draw(st.permutations(range(len(kinds))))
    boxes = {place: second_half(shapes[number]) for place, number in enumerate(order) if data.draw(st.booleans())}
    lengths = []
    for place, number in enumerate(order):
        itemsize = dtype_of(tensors.dtypes[number]).itemsize
        offset, shape = boxes.get(place, ((0,) * len(shapes[number]), shapes[number]))
        lengths.append(chunk_lengths(Box(offset, shape), grid_of(shapes[number], itemsize), itemsize))
    boxes_and_numbers = deduplicate_boxes(boxes, len(kinds))
    part = Part(
        "a/x",
        0,
        sum(map(sum, lengths)),
        0,
        list(order),
        *boxes_and_numbers,
        digests(sum(map(len, lengths))),
        digests(1),
    )
    manifest = decode(encode(Manifest("a", 0.0, 1, tensors, States.of([{"d": {}}]), [part])), PATH)
    found = list(pieces(manifest, 0))
    assert [piece.tensor for piece in found] == list(order)
    assert [piece.lengths for piece in found] == lengths
    assert [piece.offset for piece in found] == [sum(map(sum, lengths[:place])) for place in range(len(lengths))]
    assert [piece.first_chunk for piece in found] == [sum(map(len, lengths[:place])) for place in range(len(lengths))]
    assert len(digests_of(manifest.parts[0])) == DIGEST_BYTES * sum(map(len, lengths))


def test_equal_boxes_are_stored_once() -> None:
    one, other = ((0, 0), (1, 2)), ((1, 0), (1, 2))
    assert deduplicate_boxes({1: one, 2: other, 4: one}, 5) == ([one, other], [-1, 0, 1, -1, 0])
    assert deduplicate_boxes({}, 5) == ([], [])


def test_file_names_are_relative_to_an_inner_folder() -> None:
    manifest = write_checkpoint(MemoryStorage(), "run/b/a", states())
    found = decode(encode(manifest), "b/a.metadata.json")
    assert found.prefix == "b/a"
    assert [part.file for part in found.parts] == [part.file.removeprefix("run/") for part in manifest.parts]
    refused(encode(manifest), "un/b/a.metadata.json")
    refused(encode(manifest), "x/a.metadata.json")


@pytest.mark.parametrize("ending", [".metadata.json", ".deleted.json"])
def test_file_names_are_relative_to_an_outer_folder(ending: str) -> None:
    manifest = write_checkpoint(MemoryStorage(), "b/a", states())
    found = decode(encode(manifest), f"run/x/b/a{ending}")
    assert found.prefix == "run/x/b/a"
    assert [part.file for part in found.parts] == [f"run/x/{part.file}" for part in manifest.parts]
    assert decode(encode(found), f"run/x/b/a{ending}") == found
    refused(encode(manifest), f"run/xb/a{ending}")
    refused(encode(manifest), f"run/a{ending}")


def test_a_prefix_of_the_longest_length_is_valid() -> None:
    manifest = write_checkpoint(MemoryStorage(), "p" * 200, states())
    assert decode(encode(manifest), manifest.path) == manifest
