"""A memory snapshot that PyTorch's own code makes of a profile of the CPU is read as a trace."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch.cuda import _memory_viz
from torch.profiler import ProfilerActivity, profile

from forged.memory.traces import events, plan, read_trace, replay

WIDTH = 256


def test_snapshot_of_a_profiled_training_is_replayed_and_planned(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters())
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, record_shapes=True, with_stack=True) as profiled:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(64, WIDTH)).sum().backward()
            optimizer.step()
    snapshot = _memory_viz._profile_to_snapshot(profiled)
    file = tmp_path / "snapshot.pickle"
    with file.open("wb") as written:
        pickle.dump(snapshot, written)
    trace = read_trace(file)
    assert trace.format == "torch"
    sizes = [buffer.size for buffer in trace.buffers]
    # Weights, their gradients, and the two moments of each.
    assert sizes.count(4 * WIDTH * WIDTH) >= 4
    planned, replayed = plan(trace.buffers), replay(events(trace.buffers))
    assert planned.peak <= planned.height <= replayed.height
