from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from gr.training import BatchRecipe, BucketSampler, StochasticLength, WindowRecipe, Windows
from tests.training.world import World

RANDOM = WindowRecipe(max_events=7, context=2, random_cuts=True, bare_windows=0.3)
FIXED = WindowRecipe(max_events=7, context=2)
TOKENS = BatchRecipe(tokens=120)
SEQUENCES = BatchRecipe(tokens=None, sequences=5)


def _keys(windows: Windows) -> list[tuple[int, ...]]:
    columns = (windows.start, windows.stop, windows.first_target, windows.bare)
    return [tuple(int(v) for v in row) for row in zip(*columns, strict=True)]


def _batches(sampler: BucketSampler) -> list[list[tuple[int, ...]]]:
    return [_keys(batch) for batch in sampler]


@pytest.mark.parametrize("windows", [RANDOM, FIXED])
@pytest.mark.parametrize("batches", [TOKENS, SEQUENCES])
def test_every_epoch_covers_every_event_once(
    world: World, windows: WindowRecipe, batches: BatchRecipe
) -> None:
    sampler = BucketSampler(world.collator(), windows, batches, epochs=3, seed=1)
    found = _batches(sampler)
    assert len(found) == len(sampler) == sampler.num_steps
    events = sampler.collator.events
    for epoch in range(3):
        part = found[sampler.steps_before[epoch] : sampler.steps_before[epoch + 1]]
        targets = Counter(
            event for batch in part for _, stop, first, _ in batch for event in range(first, stop)
        )
        assert targets == Counter(range(len(events)))
    assert sampler.num_windows == sum(map(len, found))


def test_epochs_differ_and_a_seed_repeats_them(world: World) -> None:
    collator = world.collator()
    first = _batches(BucketSampler(collator, RANDOM, TOKENS, 2, seed=1))
    assert first == _batches(BucketSampler(collator, RANDOM, TOKENS, 2, seed=1))
    assert first != _batches(BucketSampler(collator, RANDOM, TOKENS, 2, seed=2))
    sampler = BucketSampler(collator, FIXED, SEQUENCES, 2, seed=1)
    batches = _batches(sampler)
    half = int(sampler.steps_before[1])
    assert batches[:half] != batches[half:]


def test_a_token_budget_holds_and_lengths_are_alike(world: World) -> None:
    sampler = BucketSampler(world.collator(), FIXED, TOKENS, 2, seed=0)
    padded = used = 0
    for batch in sampler:
        lengths = sampler.collator.lengths(batch)
        assert len(lengths) * lengths.max() <= 120
        padded, used = padded + len(lengths) * int(lengths.max()), used + int(lengths.sum())
    assert used / padded > 0.85


def test_windows_longer_than_the_budget_come_alone(world: World) -> None:
    batches = BatchRecipe(tokens=5)
    sampler = BucketSampler(world.collator(), FIXED, batches, 1, seed=0)
    assert {len(batch) for batch in sampler if sampler.collator.lengths(batch).max() > 2} == {1}


@pytest.mark.parametrize("batches", [TOKENS, SEQUENCES])
@pytest.mark.parametrize(("processes", "parts"), [(2, 1), (3, 1), (1, 2), (2, 4)])
def test_processes_and_accumulation_share_the_steps_of_one(
    world: World, batches: BatchRecipe, processes: int, parts: int
) -> None:
    collator = world.collator()
    split = BatchRecipe(batches.tokens, batches.sequences, parts)
    shares = [
        _batches(BucketSampler(collator, RANDOM, split, 2, 3, rank, processes))
        for rank in range(processes)
    ]
    assert len({len(share) for share in shares}) == 1
    assert all(batch for share in shares for batch in share)
    joined = []
    for step in range(len(shares[0]) // parts):
        windows = [
            window
            for share in shares
            for batch in share[step * parts : (step + 1) * parts]
            for window in batch
        ]
        # A part without work has one window without a target, and nothing else.
        joined.append(Counter(w for w in windows if w[2] < w[1]))
    one = BucketSampler(collator, RANDOM, batches, 2, 3)
    assert joined == [Counter(batch) for batch in _batches(one)]


def test_skipping_batches_is_all_a_resume_needs(world: World) -> None:
    collator = world.collator()
    whole = _batches(BucketSampler(collator, RANDOM, TOKENS, 3, 1))
    rest = islice(BucketSampler(collator, RANDOM, TOKENS, 3, 1), 5, None)
    assert [_keys(batch) for batch in rest] == whole[5:]


def test_epoch_of_counts_parts_of_epochs(world: World) -> None:
    sampler = BucketSampler(world.collator(), RANDOM, TOKENS, 3, 1)
    first, second = (int(n) for n in sampler.steps_before[1:3])
    assert sampler.epoch_of(0) == 0
    assert sampler.epoch_of(first) == 1
    assert sampler.epoch_of(first + 1) == pytest.approx(1 + 1 / (second - first))
    assert sampler.epoch_of(sampler.num_steps) == 3


def test_bare_windows_come_at_the_asked_rate() -> None:
    collator = World(users=300, longest=5).collator()
    options = WindowRecipe(max_events=7, bare_windows=0.25)
    sampler = BucketSampler(collator, options, TOKENS, 4, 0)
    bare = np.concatenate([batch.bare for batch in sampler])
    # 1200 draws: four standard deviations are .05.
    assert abs(bare.mean() - 0.25) < 0.05


def test_ties_are_drawn_anew_in_every_epoch_whatever_the_processes() -> None:
    collator = World(users=30).collator()
    options = replace(RANDOM, shuffle_ties=True)
    draws = [batch.tie_draw for batch in BucketSampler(collator, options, TOKENS, 3, 1)]
    every = np.concatenate([draw for draw in draws if draw is not None])
    assert len(np.unique(every)) == len(every) > 30
    sharded = [
        batch.tie_draw
        for rank in range(2)
        for batch in BucketSampler(collator, options, TOKENS, 3, 1, rank, 2)
        if batch.first_target[0] < batch.stop[0]
    ]
    assert set(np.concatenate([d for d in sharded if d is not None])) == set(every)
    assert all(batch.tie_draw is None for batch in BucketSampler(collator, RANDOM, TOKENS, 1, 1))


def test_stochastic_length_cuts_long_windows_anew_in_every_epoch(world: World) -> None:
    collator = world.collator()
    whole = WindowRecipe(max_events=40)
    options = replace(whole, stochastic_length=StochasticLength(1.5, "random"))
    limit = StochasticLength(1.5).threshold(40)
    epochs: list[list[tuple[int, ...]]] = [[], []]
    sampler = BucketSampler(collator, options, BatchRecipe(tokens=400), 2, seed=3)
    for number, batch in enumerate(sampler):
        epoch = int(number >= sampler.steps_before[1])
        built = collator(batch)
        assert built["input_ids"].shape[1] == collator.lengths(batch).max()
        assert (built["attention_mask"].sum(1).numpy() == collator.lengths(batch)).all()
        position, count = batch.positions()
        for start, stop, n, events in zip(
            batch.start, batch.stop, count, np.split(position, np.cumsum(count)[:-1]), strict=True
        ):
            assert n in {stop - start, limit} and (np.diff(events) > 0).all()
            assert events.min() >= start and events.max() < stop
            epochs[epoch].append(tuple(events.tolist()))
    assert any(len(events) == limit for events in epochs[0])
    assert sorted(epochs[0]) != sorted(epochs[1])
    again = BucketSampler(collator, options, BatchRecipe(tokens=400), 2, seed=3)
    assert sum(len(batch) for batch in again) == sum(map(len, epochs))
