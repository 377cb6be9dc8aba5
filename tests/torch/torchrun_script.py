"""A script of torch alone: it reduces until one of its ranks finds the file that the command line names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(stop_file: Path) -> None:
    dist.init_process_group("gloo")
    print(f"world of {dist.get_world_size()}: rank {dist.get_rank()}, pid {os.getpid()}.", flush=True)
    is_over = torch.zeros(1)
    while not is_over:
        is_over = torch.tensor([float(stop_file.exists())])
        dist.all_reduce(is_over)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
