"""Elastic training with torch: start a daemon (`forged run`), then this script as often as you like.

python examples/torch_ddp.py [ENDPOINT [FOLDER]]

Kill a process, start another one, press Ctrl-C: the rest trains on. Started anew, it resumes from the last checkpoint.
"""

import sys

import torch
from torch.utils.data import TensorDataset

import forged.torch as ft

ENDPOINT = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:7433"
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "torch_checkpoints"

torch.manual_seed(0)
inputs = torch.randn(4096, 16)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

run = ft.join(
    ENDPOINT,
    job="torch",
    state=ft.State(model=model, opt=opt),
    checkpoints=ft.Checkpoints(FOLDER, every=50, keep=3),
)
with run:
    net = run.ddp(model)
    loader = run.loader(dataset, global_batch=64, num_workers=1)
    for step in run.steps(300):
        with step:
            batch, wanted = loader.next()
            loss = (net(batch) - wanted).square().mean()
            loss.backward()
            step.commit()
            opt.step()
            opt.zero_grad()
            if step % 50 == 0 and run.rank == 0:
                print(f"step {int(step)}: loss {loss.item():.4f} with {run.world_size} workers", flush=True)
