from __future__ import annotations

from pathlib import Path

import pytest

from forged.memory.traces import Buffer, TraceFileInvalid, plan, read_trace
from forged.memory.traces.trace_files import parse_trace
from tests.memory.traces.buffers import MINIMALLOC, PUBLIC, check_packing, minimalloc, with_public_traces
from tests.memory.traces.snapshots import BASE, entry, segment, snapshot

CSV = "id,lower,upper,size\n0,1,3,16\nweights,0,9,8\n"
RMM = """Thread,Time,Action,Pointer,Size,Stream
7,11:32:15.100000,allocate,0x7f01,512,0x0
7,11:32:15.100001,allocate failure,0x0,1099511627776,0x0
8,11:32:15.100002,allocate,0x7f02,256,0x1
7,11:32:15.100003,free,0x7f01,512,0x0
7,11:32:15.100004,allocate,0x7f01,128,0x0
8,11:32:15.100005,free,0x7f00,64,0x1
"""


def test_the_content_tells_the_format(tmp_path: Path) -> None:
    torch = snapshot([[entry("alloc", 0, 512)]], [])
    for content, name in ((CSV.encode(), "lifetimes"), (RMM.encode(), "rmm"), (torch, "torch")):
        path = tmp_path / "trace.dat"
        path.write_bytes(content)
        assert read_trace(path).format == name


def test_lifetimes_are_read_in_any_order_of_columns() -> None:
    assert parse_trace(CSV.encode()).buffers == [Buffer(0, 1, 3, 16), Buffer("weights", 0, 9, 8)]
    other = "size , offset,id,upper,lower\r\n16,5,0,3,1\r\n\r\n"
    assert parse_trace(other.encode()).buffers == [Buffer(0, 1, 3, 16)]


def test_ids_that_are_equal_as_numbers_only_stay_different() -> None:
    buffers = parse_trace(b"id,lower,upper,size\n1,0,1,1\n01,0,1,1\n").buffers
    assert [buffer.id for buffer in buffers] == [1, "01"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("1,0,5", "line 3: there are 3 values, and 4 columns"),
        ("1,0,x,5", "line 3: upper must be an integer, got 'x'"),
        ("1,0,1_0,5", "line 3: upper must be an integer, got '1_0'"),
        ("1,5,5,8", "line 3: upper of buffer 1 must be greater than lower, 5, got 5"),
        ("1,0,5,0", "line 3: size of buffer 1 must be at least 1, got 0"),
        ("0,0,5,8", "line 3: the id '0' is that of line 2 too"),
        (",0,5,8", "line 3: the id is empty"),
        ("1,0,5," + "9" * 5000, "line 3: size must be an integer, got '999"),
    ],
)
def test_a_wrong_line_is_named(line: str, problem: str) -> None:
    with pytest.raises(TraceFileInvalid) as caught:
        parse_trace(f"id,lower,upper,size\n0,0,1,1\n{line}\n".encode())
    assert caught.value.message.startswith(problem)
    assert caught.value.fix
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "line 1: the columns are unknown, got ''"),
        (b"a,b\n1,2\n", "line 1: the columns are unknown, got 'a,b'"),
        (b"id,lower,upper,size,gaps\n", "line 1: unknown column 'gaps'"),
        (b"id,lower,upper,size,size\n", "line 1: column size must be there once"),
        (b"id,lower,upper,size\n\xff", "byte 20: the file is neither text nor a pickle"),
    ],
)
def test_a_file_of_no_known_format_is_refused(content: bytes, problem: str) -> None:
    with pytest.raises(TraceFileInvalid) as caught:
        parse_trace(content)
    assert caught.value.message.startswith(problem)


def test_rmm_log_has_the_buffers_by_address_and_number() -> None:
    assert parse_trace(RMM.encode()).buffers == [
        Buffer("0x7f00", 0, 5, 64),
        Buffer("0x7f01", 1, 3, 512),
        Buffer("0x7f02", 2, 6, 256),
        Buffer("0x7f01#2", 4, 6, 128),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("7,11:32,allocate,0x7f02,1,0x0", "line 8: 0x7f02 is allocated and not released before"),
        ("7,11:32,resize,0x7f02,1,0x0", "line 8: Action must be allocate, free or allocate failure, got 'resize'"),
        ("7,11:32,free,here,1,0x0", "line 8: Pointer must be an address, got 'here'"),
        ("7,11:32,free,0x7f02,-1,0x0", "line 8: Size must be at least 0, got -1"),
        ("7,11:32,free", "line 8: there are 3 values, and 6 columns"),
    ],
)
def test_a_wrong_line_of_an_rmm_log_is_named(line: str, problem: str) -> None:
    with pytest.raises(TraceFileInvalid) as caught:
        parse_trace(f"{RMM}{line}\n".encode())
    assert caught.value.message == problem


def test_request_of_a_release_ends_a_buffer_if_its_completion_was_not_recorded() -> None:
    trace = [entry("alloc", 0, 512), entry("free_requested", 0, 512), entry("alloc", 0, 256)]
    assert parse_trace(snapshot([trace], [])).buffers == [
        Buffer("0x7f0000000000", 1, 2, 512),
        Buffer("0x7f0000000000#2", 3, 4, 256),
    ]


def test_torch_snapshot_has_the_recorded_buffers_and_those_in_use_before() -> None:
    trace = [
        entry("segment_alloc", 0, 2048),
        entry("alloc", 0, 512),
        entry("free_requested", 0, 512),
        entry("free_completed", 0, 512),
        entry("alloc", 0, 256),
        entry("free_completed", 4096, 1024),
    ]
    segments = [segment((256, "active_allocated"), (256, "inactive"), (1536, "active_allocated"))]
    assert parse_trace(snapshot([trace], segments)).buffers == [
        Buffer(f"{BASE + 4096:#x}", 0, 4, 1024),
        Buffer(f"{BASE + 512:#x}", 0, 5, 1536),
        Buffer(f"{BASE:#x}", 1, 2, 512),
        Buffer(f"{BASE:#x}#2", 3, 5, 256),
    ]


def test_torch_snapshot_of_several_devices_needs_a_choice() -> None:
    data = snapshot([[entry("alloc", 0, 512)], [], [entry("alloc", 0, 256)]], [segment((8, "inactive"), device=2)])
    with pytest.raises(TraceFileInvalid, match="it has the devices 0, 2"):
        parse_trace(data)
    with pytest.raises(TraceFileInvalid, match="it has no device 1"):
        parse_trace(data, device=1)
    assert [buffer.size for buffer in parse_trace(data, device=2).buffers] == [256]


@with_public_traces
def test_public_traces_are_read() -> None:
    counts = {path.name: len(read_trace(path).buffers) for path in sorted(PUBLIC.glob("*.csv"))}
    assert counts["somas_pangu_2.6B.csv"] == 18_692
    assert all(counts.values())


@with_public_traces
@pytest.mark.parametrize("name", MINIMALLOC)
def test_plan_packs_each_minimalloc_trace_into_its_capacity(name: str) -> None:
    buffers = read_trace(minimalloc(name)).buffers
    found = plan(buffers, 1_048_576)
    check_packing(buffers, found.offsets)
    assert found.height <= 1_048_576
