"""Exponential moving average of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """``a ← d a + (1 − d) w`` after every step, with d = min(decay, (1 + t) / (10 + t)).

    The ramp lets the average forget the first weights, which say nothing; t counts steps from 1.
    Only weights that learn are averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        # The parameters, not their storage: wrapping a model for several processes may move it.
        self.weights: list[Tensor] = [parameter for _, parameter in named]
        self.average: list[Tensor] = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimiser step ``step``, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, self.weights, 1.0 - decay)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Overwrite the model's weights with the average."""
        torch._foreach_copy_(self.weights, self.average)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model holds the average inside, and its own weights again after."""
        own = [weight.detach().clone() for weight in self.weights]
        self.copy_to_model()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, own)

    def state(self) -> dict[str, Tensor]:
        """The averages by parameter name."""
        return dict(zip(self.names, self.average, strict=True))

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what ``state`` returned.

        Raises:
            ValueError: a name is missing.
        """
        missing = [name for name in self.names if name not in state]
        if missing:
            raise ValueError(f"average: no weights for {missing[0]!r}, wanted all of {self.names}")
        for name, average in zip(self.names, self.average, strict=True):
            average.copy_(state[name])
