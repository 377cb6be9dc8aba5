"""The transformer that the torch benchmarks train, and the lines that their training processes exchange.

Runs in the peers' environment. It imports nothing of forged, because the processes of torchrun and torchft use it.

`python -m benchmarks.torch_model MILLISECONDS` writes the number of samples whose step takes so long on this machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 256, 64, 4, 2, 32
SAMPLES = 2
"""The samples of one rank and step, where a benchmark does not say otherwise."""
RATE = 1e-3
TRIED_SAMPLES, TRIED_STEPS = (1, 2, 4, 8, 16, 32, 64, 128), 20


class Transformer(torch.nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def model_and_optimizer() -> tuple[Transformer, torch.optim.Optimizer]:
    """The same at all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Transformer()
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)


def loss_of(model: torch.nn.Module, step: int, rank: int, samples: int = SAMPLES) -> torch.Tensor:
    """The loss of a rank's batch of a step."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
    found = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


def say_ready() -> None:
    """Tell the benchmark that this process can begin."""
    sys.stdout.write(f"ready {os.getpid()}\n")
    sys.stdout.flush()


def wait_for_go() -> None:
    """Wait until the benchmark says to go on."""
    sys.stdin.readline()


def say_step(step: int, generation: int, world: int, rank: int) -> None:
    """Report a committed step."""
    sys.stdout.write(f"{step} {generation} {world} {time.monotonic()} {rank}\n")
    sys.stdout.flush()


def _step_ms(samples: int) -> float:
    model, optimizer = model_and_optimizer()
    times = []
    for step in range(TRIED_STEPS):
        start = time.perf_counter()
        loss_of(model, step, 0, samples).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def main() -> None:
    """Write the number of samples of the longest step that is not longer than the argument."""
    limit = float(sys.argv[1])
    fitting = [samples for samples in TRIED_SAMPLES if _step_ms(samples) <= limit]
    print(max(fitting, default=TRIED_SAMPLES[0]))


if __name__ == "__main__":
    main()
