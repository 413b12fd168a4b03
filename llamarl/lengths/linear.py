"""A linear model of how long a prompt's rollouts are, over the tokens of the prompt.

Owns: the features and the fit. Does not own: which pairs it is fitted to (`ranker.py`). Invariant:
memory and time do not grow with the number of pairs, and no prompt is kept.

With x the features of a prompt and y its length relative to the mean, the weights w minimise

    sum_i d_i (w . x_i - y_i)^2 + RIDGE |w|^2,

where d_i halves with every `half_life` prompts that came later. The normal equations are summed as
pairs come in and are solved by conjugate gradients from the last weights: milliseconds for a step's
prompts, where a small language model would need a device of its own. All of it is numpy's own loops
(`einsum`): LAPACK would start a thread per core, and these would fight for the cores with
generators and trainer. Lengths are not taken as logarithms: a prompt whose rollouts are a short
guess or a long calculation has a low mean logarithm, and makes its step late nevertheless.
"""

from collections.abc import Sequence

import numpy as np

NUM_BUCKETS = 512  # token ids are hashed into as many counts
NUM_FEATURES = NUM_BUCKETS + 3
RIDGE = 3.0
TOLERANCE = 1e-3  # of the solution
MAX_ITERATIONS = 100
FACTOR = np.uint64(0x9E3779B97F4A7C15)

Ids = tuple[int, ...]


def features(prompts: Sequence[Ids]) -> np.ndarray:
    """float64 [prompts, NUM_FEATURES]: a constant, the logarithm and the square root of the number
    of tokens, and how often each hashed token occurs, as a vector of length 1."""
    sizes = np.array([len(prompt) for prompt in prompts])
    ids = np.array([token for prompt in prompts for token in prompt], np.uint64)
    buckets = (ids * FACTOR >> np.uint64(40)) % np.uint64(NUM_BUCKETS)
    places = np.repeat(np.arange(len(prompts)), sizes) * NUM_BUCKETS + buckets.astype(np.int64)
    counts = np.bincount(places, minlength=len(prompts) * NUM_BUCKETS)
    bags = np.sqrt(counts).reshape(len(prompts), NUM_BUCKETS)
    bags /= np.maximum(np.sqrt(sizes)[:, None], 1.0)
    return np.column_stack([np.ones(len(prompts)), np.log1p(sizes), np.sqrt(sizes), bags])


def sum_up(x: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """x'x, x'y and the number of pairs, from features and `targets` float64 [prompts]."""
    return np.einsum("ni,nj->ij", x, x), np.einsum("ni,n->i", x, targets), len(x)


class LinearModel:
    """`fit` may run beside `predict`, which uses the weights of the last fit."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._gram = np.zeros((NUM_FEATURES, NUM_FEATURES))  # sum of d x x'
        self._moment = np.zeros(NUM_FEATURES)  # sum of d x y
        self._weights: np.ndarray = np.zeros(NUM_FEATURES)

    def fit(self, sums: tuple[np.ndarray, np.ndarray, int]) -> None:
        """Learn from more prompts: what `sum_up` makes of them."""
        gram, moment, count = sums
        decay = 0.5 ** (count / self._half_life)
        self._gram = decay * self._gram + gram
        self._moment = decay * self._moment + moment
        matrix = self._gram + RIDGE * np.eye(NUM_FEATURES)
        self._weights = solve(matrix, self._moment, self._weights)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """float64 [prompts], from their features; zeros before the first fit."""
        return np.einsum("ni,i->n", x, self._weights)


def solve(matrix: np.ndarray, target: np.ndarray, start: np.ndarray) -> np.ndarray:
    """x with matrix x = target, nearly: conjugate gradients from `start`, scaled by the diagonal.

    `matrix` float64 [n, n] must be symmetric and positive definite.
    """
    x, scale = start.copy(), 1.0 / np.diagonal(matrix)
    residual = target - np.einsum("ij,j->i", matrix, x)
    direction = scaled = scale * residual
    size = np.einsum("i,i", residual, scaled)
    least = TOLERANCE**2 * np.einsum("i,i", target, scale * target)
    for _ in range(MAX_ITERATIONS):
        if size <= least:
            break
        image = np.einsum("ij,j->i", matrix, direction)
        step = size / np.einsum("i,i", direction, image)
        x += step * direction
        residual = residual - step * image
        scaled = scale * residual
        before, size = size, np.einsum("i,i", residual, scaled)
        direction = scaled + size / before * direction
    return x
