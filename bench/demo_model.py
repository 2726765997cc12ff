"""A small classifier in NumPy: one hidden layer, softmax, gradient descent with momentum."""

from __future__ import annotations

import numpy as np

from bench.demo_data import CLASSES, Features, Labels


class Classifier:
    """Collects samples and trains on each full batch. The same samples in the same order give
    the same losses."""

    def __init__(self, inputs: int, batch: int, hidden: int = 48, rate: float = 0.02) -> None:
        rng = np.random.default_rng(3)
        self._weights = [
            rng.normal(0, 1 / np.sqrt(inputs), (inputs, hidden)).astype(np.float32),
            rng.normal(0, 1 / np.sqrt(hidden), (hidden, CLASSES)).astype(np.float32),
        ]
        self._speeds = [np.zeros_like(weight) for weight in self._weights]
        self._batch = batch
        self._rate = rate
        self._waiting: list[tuple[Features, Labels]] = []
        self._losses: list[float] = []

    def add(self, features: Features, labels: Labels) -> None:
        self._waiting.append((features, labels))
        if sum(len(labels) for _features, labels in self._waiting) < self._batch:
            return
        rows = np.concatenate([features for features, _labels in self._waiting])
        wanted = np.concatenate([labels for _features, labels in self._waiting])
        self._waiting.clear()
        for start in range(0, len(wanted) - self._batch + 1, self._batch):
            part = slice(start, start + self._batch)
            self._losses.append(self._step(rows[part], wanted[part]))

    def take_loss(self) -> float:
        """The mean loss since the last call; ends an epoch."""
        loss = float(np.mean(self._losses))
        self._losses.clear()
        self._waiting.clear()
        return loss

    def _step(self, rows: Features, wanted: Labels) -> float:
        first, second = self._weights
        hidden = np.maximum(rows @ first, 0)
        scores = hidden @ second
        scores -= scores.max(axis=1, keepdims=True)
        shares = np.exp(scores)
        shares /= shares.sum(axis=1, keepdims=True)
        each = np.arange(len(wanted))
        loss = -np.log(shares[each, wanted] + 1e-9).mean()
        shares[each, wanted] -= 1
        error = shares / len(wanted)
        gradients = [rows.T @ (error @ second.T * (hidden > 0)), hidden.T @ error]
        for weight, speed, gradient in zip(self._weights, self._speeds, gradients, strict=True):
            speed *= 0.9
            speed -= self._rate * gradient
            weight += speed
        return float(loss)
