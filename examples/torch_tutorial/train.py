"""A small transformer learns to write sentences, letter by letter; run it with `forged launch -n 4 train.py`."""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import forged.torch as ft

LENGTH = 64
GLOBAL_BATCH = 24


def text(sentences: int = 6000) -> str:
    """Sentences of a small grammar, the same in each process."""
    chance = random.Random(0)
    words = [
        "the a one",
        "small old quick",
        "worker daemon model",
        "sends keeps reads",
        "the a one",
        "step batch tensor",
    ]
    return "".join(" ".join(chance.choice(some.split()) for some in words) + ".\n" for _ in range(sentences))


class Letters(torch.utils.data.Dataset[torch.Tensor]):
    """Overlapping parts of a text, as numbers of letters."""

    def __init__(self, text: str) -> None:
        self.letters = sorted(set(text))
        self.numbers = torch.tensor([self.letters.index(letter) for letter in text])

    def __len__(self) -> int:
        return (len(self.numbers) - 1) // LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.numbers[index * LENGTH : (index + 1) * LENGTH + 1]


class Transformer(nn.Module):
    """Predicts the next letter."""

    def __init__(self, letters: int, width: int = 64) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.position = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        hidden = self.letter(letters) + self.position
        logits: torch.Tensor = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoints", default="checkpoints")
    options = parser.parse_args()

    # In float32 the rounding of sums over fewer workers grows to a visible difference within some hundred steps.
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    dataset = Letters(text())
    model = Transformer(len(dataset.letters))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = ft.State(model=model, opt=opt)
    with ft.join(state=state, checkpoints=ft.Checkpoints(options.checkpoints, every=100, keep=2)) as run:
        print(f"process {os.getpid()}", flush=True)
        net = run.ddp(model)
        loader = run.loader(dataset, GLOBAL_BATCH, drop_last=True)
        for step in run.steps(options.steps):
            with step:
                letters = loader.next()
                loss = functional.cross_entropy(net(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())
                loss.backward()
                # The mean over the global batch: 24 samples are divided evenly among 1, 2, 3 or 4 workers.
                mean = loss.detach() / run.world_size
                dist.all_reduce(mean)
                step.commit()
                opt.step()
                opt.zero_grad()
            if not step.aborted and run.rank == 0:
                run.log(loss=mean)
                print(f"step {int(step)} loss {mean.item():.12f} workers {run.world_size}", flush=True)


if __name__ == "__main__":
    main()
