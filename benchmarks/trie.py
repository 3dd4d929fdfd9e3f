"""The trie by itself: building it, and what a beam step costs outside the model.

    python benchmarks/trie.py
    python benchmarks/trie.py --sizes 10000 10000000

Catalogues are random: items of 4 tokens with 256 codes each, and one with an uneven choice of codes
(log-normal), since clusters are never of one size; and one of 10,000 items of one token each. For
each, one process builds the trie from its tokens and popularity, and says what that took and what
it keeps. Then 16 users search it with 50 beams. In the place of a model stand logits that are ready
when they are asked for, so all of the time is the search's own: log-softmax over the vocabulary,
children, constraint, top-k. ``ms`` are per step, the median of all calls and the best one; an item
of 4 tokens takes 4 steps.

Constraints: 100 excluded items per user ("seen"), a subset shared by all users (half of the items,
"stock"), "both", and 1,000 items of each user's own without the 100 ("own"). What a constraint adds
to a step should not grow with the catalogue, nor should the time to make the filter of one call.
Options of beams: a temperature ("warm"), sampling ("drawn"), and at most two items for each first
token ("spread").
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from breakdown import Stopwatch
from gr.data.whole_file import whole_file
from gr.inference import (
    BeamOptions,
    ItemSubset,
    Prefix,
    RowFilter,
    beam_search,
    build_filter,
)
from gr.tokenizer.trie import ItemTrie
from measuring import (
    RESULTS,
    ROOT,
    commit,
    in_fresh_process,
    machine,
    measured,
    print_table,
    progress,
)

USERS, BEAMS, LEVELS, CODES, SPECIAL = 16, 50, 4, 256, 6
SEEN, OWN = 100, 1000


class Catalogue(NamedTuple):
    """How one is drawn: items, tokens of each, codes of a token, and whether codes are uneven."""

    items: int
    levels: int
    codes: int
    uneven: bool = False

    @property
    def name(self) -> str:
        kind = "uneven " if self.uneven else ""
        return f"{self.items:,} {kind}× {self.levels}"

    @property
    def vocabulary(self) -> int:
        return SPECIAL + self.levels * self.codes

    def tokens(self) -> Tensor:
        """int64 [n, M], made level by level: a second copy would be in the measured process."""
        rng = np.random.default_rng(0)
        tokens = np.empty((self.items, self.levels), dtype=np.int64)
        for level in range(self.levels):
            if self.levels == 1:
                tokens[:, level] = rng.permutation(self.items)
            elif self.uneven:
                share = rng.lognormal(0, 1, self.codes)
                tokens[:, level] = rng.choice(self.codes, self.items, p=share / share.sum())
            else:
                tokens[:, level] = rng.integers(0, self.codes, self.items, dtype=np.int16)
            tokens[:, level] += SPECIAL + level * self.codes
        return torch.from_numpy(tokens)


class Answers:
    """A prefix and its branches, with random logits that are ready beforehand."""

    def __init__(self, vocabulary: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._drawn = torch.randn(USERS, BEAMS, vocabulary, generator=generator)
        self._steps, self.num_rows, self.device = steps, USERS, torch.device("cpu")
        self.logits_BV = self._drawn[:, 0].contiguous()
        self.num_nodes = 0
        self._ready: list[Tensor] = []

    def renew(self) -> None:
        """What a search overwrites, for the next one."""
        self._ready = [self._drawn.clone() for _ in range(self._steps - 1)]

    def branch(self) -> Answers:
        return self

    def append(self, token_BN: Tensor, parent_BN: Tensor) -> Tensor:
        width = token_BN.shape[1]
        # Fewer beams get logits as contiguous as a model's.
        return self._ready.pop()[:, :width].contiguous()


def built(catalogue: Catalogue) -> tuple[ItemTrie, dict[str, Any]]:
    """The trie, with what building it took."""
    tokens = catalogue.tokens()
    popularity = torch.from_numpy(np.random.default_rng(1).integers(0, 1000, catalogue.items))
    build = measured(ItemTrie, tokens, popularity)
    trie = build.result
    arrays = [trie.order, trie.token, trie.child_ptr, trie.row_lo, trie.row_hi]
    return trie, {
        "seconds": build.seconds,
        "memory_mb": build.memory_mb,
        "tokens_mb": tokens.nbytes / 1e6,
        "trie_mb": sum(array.nbytes for array in arrays) / 1e6,
        "tables_mb": sum(table.child.nbytes for table in trie._dense) / 1e6,
        "nodes": trie.num_nodes,
        "dense_levels": trie.dense_levels,
        "widest": list(trie.level_degree),
    }


def searched(catalogue: Catalogue, repeats: int) -> dict[str, Any]:
    """Building the trie of a catalogue, then beam searches along it."""
    trie, build = built(catalogue)
    rng = np.random.default_rng(2)
    n = trie.num_items
    answers = Answers(catalogue.vocabulary, catalogue.levels)
    prefix = cast(Prefix, answers)
    stock = ItemSubset(trie, rng.random(n) < 0.5)
    seen: list[npt.NDArray[np.int64]] = [rng.integers(0, n, SEEN) for _ in range(USERS)]
    own = [rng.integers(0, n, OWN) for _ in range(USERS)]
    plain = BeamOptions()
    cases: dict[str, tuple[Callable[[], RowFilter], BeamOptions]] = {
        "all": (lambda: RowFilter.everything(n, trie.device), plain),
        "seen": (lambda: build_filter(trie, seen), plain),
        "stock": (lambda: build_filter(trie, None, stock), plain),
        "both": (lambda: build_filter(trie, seen, stock), plain),
        "own": (lambda: build_filter(trie, seen, list(own)), plain),
        "warm": (lambda: RowFilter.everything(n, trie.device), BeamOptions(temperature=2.0)),
        "drawn": (lambda: RowFilter.everything(n, trie.device), BeamOptions(seed=0)),
        "spread": (lambda: RowFilter.everything(n, trie.device), BeamOptions(max_per_prefix=2)),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    making: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 2):  # two to warm up
        for name, (make, options) in cases.items():
            answers.renew()
            start = time.perf_counter()
            keep = make()
            middle = time.perf_counter()
            beam_search(prefix, trie, BEAMS, keep, options)
            end = time.perf_counter()
            if repeat > 1:
                making[name].append(1000 * (middle - start))
                times[name].append(1000 * (end - middle) / catalogue.levels)
    return {
        "build": build,
        "step_ms": {name: median(each) for name, each in times.items()},
        "step_ms_best": {name: min(each) for name, each in times.items()},
        "making_ms": {name: median(each) for name, each in making.items()},
        "parts_ms": parts(answers, trie, build_filter(trie, seen, stock), repeats),
    }


def parts(answers: Answers, trie: ItemTrie, keep: RowFilter, repeats: int) -> dict[str, float]:
    """Milliseconds of a step by part, the mean of all steps: with "both"."""
    search = importlib.import_module("gr.inference.retrieve")
    points = [
        (ItemTrie, "fan_out", "children"),
        (search, "_gains", "log-softmax"),
        (RowFilter, "count", "constraint"),
        (torch.Tensor, "topk", "top-k"),
    ]
    watch = Stopwatch()
    for _ in range(repeats):
        answers.renew()
        with watch.watching(*points), watch.section("other"):
            beam_search(cast(Prefix, answers), trie, BEAMS, keep)
    steps = repeats * trie.levels
    names = ("children", "log-softmax", "constraint", "top-k")
    found = {name: 1000 * watch.sum("other", leaf=name) / steps for name in names}
    return {**found, "other": 1000 * watch.sum("other", leaf="other") / steps}


def show(results: dict[str, dict[str, Any]]) -> None:
    columns = ("items × tokens", "seconds", "peak MB", "keeps MB", "tables MB", "nodes", "dense")
    rows = []
    for name, result in results.items():
        build = result["build"]
        sizes = [f"{build[key]:,.0f}" for key in ("memory_mb", "trie_mb", "tables_mb", "nodes")]
        rows.append([name, f"{build['seconds']:.2f}", *sizes, str(build["dense_levels"])])
    print_table("Building", columns, rows)
    for title, key in (
        ("ms per step, median", "step_ms"),
        ("ms per step, best", "step_ms_best"),
        ("ms to make the filter", "making_ms"),
        ("ms per step by part, with stock and seen", "parts_ms"),
    ):
        cases = list(next(iter(results.values()))[key])
        if key == "making_ms":
            cases = cases[1:5]
        rows = [
            [name, *(f"{result[key][case]:.2f}" for case in cases)]
            for name, result in results.items()
        ]
        print_table(title, ("items × tokens", *cases), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[10_000, 100_000, 1_000_000, 10_000_000],
        metavar="N",
        help="items of the even catalogues (default: 10000 to 10000000)",
    )
    parser.add_argument("--repeats", type=int, default=30, help="searches of each kind")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of trie.json (default: benchmarks/results)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, to see that the benchmark works; its numbers mean nothing",
    )
    given = parser.parse_args()
    sizes, repeats = given.sizes, given.repeats
    output: Path = given.output or RESULTS
    if given.quick:
        sizes, repeats, output = [2000], 1, given.output or ROOT / "runs" / "benchmarks"
    output.mkdir(parents=True, exist_ok=True)
    catalogues = [Catalogue(size, LEVELS, CODES) for size in sizes]
    catalogues.append(Catalogue(min(sizes), LEVELS, CODES, uneven=True))
    catalogues.append(
        Catalogue(2000 if given.quick else 10_000, 1, 2000 if given.quick else 10_000)
    )
    results = {}
    for catalogue in catalogues:
        progress(catalogue.name)
        results[catalogue.name] = in_fresh_process(searched, catalogue, repeats)
    show(results)
    content = {
        "config": {
            "users": USERS,
            "beams": BEAMS,
            "seen": SEEN,
            "own": OWN,
            "repeats": repeats,
            "quick": given.quick,
        },
        "machine": machine(),
        "commit": commit(),
        "catalogues": results,
    }
    with whole_file(output / "trie.json") as temporary:
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
    print(output / "trie.json")


if __name__ == "__main__":
    main()
