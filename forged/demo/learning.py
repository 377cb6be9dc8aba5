"""The model of the demo: a network with two layers that classifies the points of three spirals.

The result depends only on the seed and the number of steps. The number of workers changes only the order of summation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from forged.data.sampling.sampler import ElasticSampler

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
State = dict[str, Any]

SEED = 7
CLASSES = 3
PER_CLASS = 800
SAMPLES = CLASSES * PER_CLASS
TURNS = 7.0
NOISE = 0.3
HIDDEN = 32
BATCH = 240
MOMENTUM = 0.9
LEARNING_RATE = 0.05
SHAPES: Mapping[str, tuple[int, ...]] = {
    "hidden": (2, HIDDEN),
    "hidden_bias": (HIDDEN,),
    "out": (HIDDEN, CLASSES),
    "out_bias": (CLASSES,),
}
SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}


@dataclass(frozen=True)
class Samples:
    """Points in the plane, and the spiral of each."""

    points: Floats
    labels: Integers

    @classmethod
    def spirals(cls, seed: int) -> Samples:
        """Intertwined spirals with noise."""
        noise = np.random.default_rng(seed).normal(0.0, NOISE, CLASSES * PER_CLASS)
        labels = np.repeat(np.arange(CLASSES), PER_CLASS)
        radius = np.tile(np.linspace(0.05, 1.0, PER_CLASS), CLASSES)
        angle = TURNS * radius + labels * (2 * np.pi / CLASSES) + noise
        return cls(np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=1), labels)

    def __getitem__(self, which: Integers) -> Samples:
        return Samples(self.points[which], self.labels[which])

    def __len__(self) -> int:
        return len(self.labels)


class Task:
    """The samples, their order, and training in one process."""

    def __init__(self, seed: int = SEED) -> None:
        self.seed = seed

    @cached_property
    def samples(self) -> Samples:
        return Samples.spirals(self.seed)

    def sampler(self) -> ElasticSampler:
        """The sampler, at the first step."""
        return ElasticSampler(SAMPLES, BATCH, self.seed)

    def state(self) -> State:
        """The state before the first step."""
        source = np.random.default_rng(self.seed)
        weights = [source.normal(0.0, 1.0 / np.sqrt(shape[0]), size).ravel() for shape, size in _shapes_and_sizes()]
        parameters = np.concatenate(weights)
        return {"parameters": parameters, "momentum": np.zeros_like(parameters)}

    def loss(self, state: State) -> float:
        """The mean loss over all samples."""
        return float(_gradient_and_loss(state["parameters"], self.samples, len(self.samples))[-1])

    def accuracy(self, state: State) -> float:
        """The fraction of samples that is classified correctly."""
        _, scores = _forward(_unpacked(state["parameters"]), self.samples.points)
        return float(np.mean(scores.argmax(axis=1) == self.samples.labels))

    def train_alone(self, steps: int) -> State:
        """The state after an uninterrupted run of `steps` steps in this process."""
        state, sampler = self.state(), self.sampler()
        self.train_on(state, sampler, steps)
        return state

    def train_on(self, state: State, sampler: ElasticSampler, steps: int) -> None:
        """Make `steps` more steps in this process."""
        for _ in range(steps):
            learn(state, contribution(state, self.samples[sampler.batch(0, 1)]), LEARNING_RATE)
            sampler.advance()


def contribution(state: State, part: Samples) -> Floats:
    """The contribution of a part of the batch to the gradient, followed by that to the loss."""
    return _gradient_and_loss(state["parameters"], part, BATCH)


def learn(state: State, summed: Floats, learning_rate: float) -> None:
    """Apply the summed contributions: gradient descent with momentum."""
    state["momentum"] *= MOMENTUM
    state["momentum"] -= learning_rate * summed[:-1]
    state["parameters"] += state["momentum"]


def _shapes_and_sizes() -> list[tuple[tuple[int, ...], int]]:
    return [(shape, SIZES[name]) for name, shape in SHAPES.items()]


def _unpacked(parameters: Floats) -> dict[str, Floats]:
    """The layers as views."""
    ends = np.cumsum(list(SIZES.values()))
    pieces = np.split(parameters, ends[:-1])
    return {name: piece.reshape(shape) for (name, shape), piece in zip(SHAPES.items(), pieces, strict=True)}


def _forward(layers: Mapping[str, Floats], points: Floats) -> tuple[Floats, Floats]:
    hidden = np.tanh(4.0 * points @ layers["hidden"] + layers["hidden_bias"])
    return hidden, hidden @ layers["out"] + layers["out_bias"]


def _gradient_and_loss(parameters: Floats, part: Samples, total: int) -> Floats:
    """The part's contribution to gradient and loss of the mean over `total` samples."""
    layers = _unpacked(parameters)
    hidden, scores = _forward(layers, part.points)
    scores -= scores.max(axis=1, keepdims=True)
    log_likelihoods = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows = np.arange(len(part))
    loss = -log_likelihoods[rows, part.labels].sum() / total
    error = np.exp(log_likelihoods)
    error[rows, part.labels] -= 1.0
    error /= total
    before_tanh = (error @ layers["out"].T) * (1.0 - hidden**2)
    gradient = {
        "hidden": 4.0 * part.points.T @ before_tanh,
        "hidden_bias": before_tanh.sum(axis=0),
        "out": hidden.T @ error,
        "out_bias": error.sum(axis=0),
    }
    return np.concatenate([*(gradient[name].ravel() for name in SHAPES), [loss]])
