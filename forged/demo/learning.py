"""What the demonstration learns: to tell three spirals apart, with a network of two layers.

Law: all of it follows from the seed and the number of the step, never from how many workers there are. Who uses which
samples of a step's batch changes nothing but the order in which numbers are added.
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
    """Points of the plane, and which spiral each is on."""

    points: Floats
    labels: Integers

    @classmethod
    def spirals(cls, seed: int) -> Samples:
        """Spirals that wind around each other, with noise."""
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
    """The samples, and in which order they come."""

    def __init__(self, seed: int = SEED) -> None:
        self.seed = seed

    @cached_property
    def samples(self) -> Samples:
        return Samples.spirals(self.seed)

    def sampler(self) -> ElasticSampler:
        """Which samples each step uses, from the first one on."""
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

    def hits(self, state: State) -> float:
        """Which part of all samples is put on the right spiral."""
        _, scores = _forward(_unpacked(state["parameters"]), self.samples.points)
        return float(np.mean(scores.argmax(axis=1) == self.samples.labels))

    def alone(self, steps: int) -> State:
        """The state behind so many steps in one process that nobody interrupts."""
        state, sampler = self.state(), self.sampler()
        self.go_on(state, sampler, steps)
        return state

    def go_on(self, state: State, sampler: ElasticSampler, steps: int) -> None:
        """Make so many more steps, in one process."""
        for _ in range(steps):
            learn(state, contribution(state, self.samples[sampler.batch(0, 1)]), LEARNING_RATE)
            sampler.advance()


def contribution(state: State, part: Samples) -> Floats:
    """What this part of a step's batch adds to the gradient, and behind it, to the loss."""
    return _gradient_and_loss(state["parameters"], part, BATCH)


def learn(state: State, summed: Floats, learning_rate: float) -> None:
    """Take the step, with the contributions of all: gradient descent with momentum."""
    state["momentum"] *= MOMENTUM
    state["momentum"] -= learning_rate * summed[:-1]
    state["parameters"] += state["momentum"]


def _shapes_and_sizes() -> list[tuple[tuple[int, ...], int]]:
    return [(shape, SIZES[name]) for name, shape in SHAPES.items()]


def _unpacked(parameters: Floats) -> dict[str, Floats]:
    """The layers, as views."""
    ends = np.cumsum(list(SIZES.values()))
    pieces = np.split(parameters, ends[:-1])
    return {name: piece.reshape(shape) for (name, shape), piece in zip(SHAPES.items(), pieces, strict=True)}


def _forward(layers: Mapping[str, Floats], points: Floats) -> tuple[Floats, Floats]:
    hidden = np.tanh(4.0 * points @ layers["hidden"] + layers["hidden_bias"])
    return hidden, hidden @ layers["out"] + layers["out_bias"]


def _gradient_and_loss(parameters: Floats, part: Samples, total: int) -> Floats:
    """The part's share of the gradient and the loss of the mean over `total` samples."""
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
