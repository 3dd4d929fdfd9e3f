"""Which windows go into which batch, for a whole run, on every process.

A step's batch is planned globally and then dealt out to processes and accumulation parts, so a run
takes the same steps over the same data whatever the number of processes, and any step can be
reached again from (seed, epoch) alone. Legend: n windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from torch.utils.data import Dataset, Sampler

from gr.training.collator import StreamCollator
from gr.training.events import IntArray, Windows, cut_windows
from gr.training.recipe import BatchRecipe, WindowRecipe
from gr.training.stochastic_length import kept_events


class WindowDataset(Dataset[Windows]):
    """Lets a ``DataLoader`` pass whole ``Windows`` from the sampler to the collator."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, windows: Windows) -> Windows:
        return windows


class BucketSampler(Sampler[Windows]):
    """Batches of windows of similar length, for all epochs of a run one after another.

    Args:
        collator: knows the events and how many tokens a window has.
        windows, batches: how to cut and how large; sizes are those of one optimiser step, over
            all processes together.
        epochs: number of passes over the data.
        seed: with the epoch, decides cuts, bare windows, batches and their order.
        rank, world_size: this process and the number of them.
    """

    def __init__(
        self,
        collator: StreamCollator,
        windows: WindowRecipe,
        batches: BatchRecipe,
        epochs: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.collator, self.windows, self.batches = collator, windows, batches
        self.epochs, self.seed = epochs, seed
        self.rank, self.world_size = rank, world_size
        self.parts = world_size * batches.accumulation
        self._plan = lru_cache(maxsize=1)(self._make_plan)
        # Without drawn cuts and with batches of a fixed number of sequences all epochs are equal.
        varies = windows.random_cuts or batches.tokens is not None or windows.stochastic_length
        plans = [self._plan(epoch) for epoch in range(epochs if varies else min(epochs, 1))]
        sizes = [(len(plan), sum(map(len, plan))) for plan in plans]
        if not varies:
            sizes = sizes * epochs
        steps = np.zeros(epochs + 1, dtype=np.int64)
        np.cumsum([size[0] for size in sizes], out=steps[1:])
        self.steps_before: IntArray = steps
        self.num_windows = sum(size[1] for size in sizes)

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return int(self.steps_before[-1])

    def epoch_of(self, step: int) -> float:
        """Epochs done after ``step`` optimiser steps, the last one in part."""
        if step >= self.num_steps:
            return float(self.epochs)
        epoch = int(np.searchsorted(self.steps_before, step, side="right")) - 1
        before, after = self.steps_before[epoch : epoch + 2]
        return epoch + float((step - before) / (after - before))

    def __len__(self) -> int:
        return self.num_steps * self.batches.accumulation

    def __iter__(self) -> Iterator[Windows]:
        for epoch in range(self.epochs):
            for batch in self._plan(epoch):
                for part in range(self.batches.accumulation):
                    # Strided, since a batch is ordered by length: parts get equal work.
                    mine = np.arange(part * self.world_size + self.rank, len(batch), self.parts)
                    yield batch.take(mine) if len(mine) else _idle(batch)

    def _make_plan(self, epoch: int) -> list[Windows]:
        rng = np.random.default_rng([self.seed, epoch])
        options = self.windows
        windows = cut_windows(
            self.collator.events.offsets,
            options.max_events,
            options.context,
            rng if options.random_cuts else None,
        )
        bare = rng.random(len(windows)) < options.bare_windows
        draw = None
        if options.shuffle_ties:
            draw = rng.integers(2**64, size=len(windows), dtype=np.uint64)
        kept = None
        if options.stochastic_length is not None:
            kept = kept_events(
                windows.start,
                windows.stop,
                rng.integers(2**64, size=len(windows), dtype=np.uint64),
                options.max_events,
                options.stochastic_length,
                self.collator.events.timestamp,
            )
        windows = replace(windows, bare=bare, tie_draw=draw, kept=kept)
        lengths = self.collator.lengths(windows)
        # A little noise, so that windows of one length do not meet the same others every epoch.
        noise = 1.0 + self.batches.length_noise * rng.random(len(lengths))
        order = np.argsort(-lengths * noise, kind="stable")
        if self.batches.tokens is not None:
            bounds = _token_bounds(lengths[order], self.batches.tokens)
        else:
            assert self.batches.sequences is not None
            bounds = [*range(0, len(order), self.batches.sequences), len(order)]
        pieces = [order[a:b] for a, b in pairwise(bounds)]
        return [windows.take(pieces[i]) for i in rng.permutation(len(pieces))]


def _idle(batch: Windows) -> Windows:
    """One event without a target, for a part that a small batch leaves nothing for."""
    first = batch.start[:1]
    one = batch.take(np.zeros(1, dtype=np.int64))
    return replace(one, stop=first + 1, first_target=first + 1, kept=None)


def _token_bounds(lengths: IntArray, tokens: int) -> list[int]:
    """Ends of batches of at most ``tokens`` padded tokens; a longer window is a batch alone."""
    bounds, at = [0], 0
    while at < len(lengths):
        most = max(int(tokens // lengths[at]), 1)
        longest = np.maximum.accumulate(lengths[at : at + most])
        fits = int((longest * np.arange(1, len(longest) + 1) <= tokens).sum())
        at = min(at + max(fits, 1), len(lengths))
        bounds.append(at)
    return bounds
