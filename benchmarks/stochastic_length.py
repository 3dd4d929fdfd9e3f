"""How much stochastic length leaves out, beside HSTU's Table 3.

The paper's lengths are not public. Here they are normal with mean 3,000 and deviation 1,200, at
least 1: the two numbers were chosen so that α = 2, which cuts nothing but what exceeds the longest
length, comes near the paper's row. The other rows then follow from the rule alone, with no more
fitting. Results go to stochastic_length.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from gr.data.whole_file import whole_file
from gr.training.stochastic_length import StochasticLength, sparsity
from measuring import RESULTS, ROOT, commit, machine, print_table

MEAN, DEVIATION = 3000.0, 1200.0
LONGEST = (1024, 2048, 4096, 8192)
# HSTU, Table 3 (30 days of history): 1 − mean length / longest length, in per cent. Quoted from
# memory of the paper: check there before building on a digit.
PUBLISHED = {
    1.6: (71.5, 76.1, 80.5, 84.4),
    1.7: (56.1, 63.6, 69.8, 75.6),
    1.8: (40.2, 45.3, 54.1, 66.4),
    1.9: (17.2, 21.0, 36.3, 64.1),
    2.0: (3.1, 6.6, 29.1, 64.1),
}


def simulated(count: int, seed: int) -> list[dict[str, float]]:
    """One row for each α and longest length; sparsities in per cent."""
    drawn = np.random.default_rng(seed).normal(MEAN, DEVIATION, size=count)
    lengths = np.maximum(drawn.round(), 1).astype(np.int64)
    rows = []
    for alpha, published in PUBLISHED.items():
        for longest, paper in zip(LONGEST, published, strict=True):
            found = sparsity(lengths, longest, StochasticLength(alpha), seed)
            rows.append(
                {
                    "alpha": alpha,
                    "max_events": longest,
                    "sparsity": round(100 * found.tokens, 2),
                    "pair_sparsity": round(100 * found.pairs, 2),
                    "published_sparsity": paper,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of stochastic_length.json (default: benchmarks/results)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few sequences, to see that the benchmark works; its numbers are rough",
    )
    given = parser.parse_args()
    usual = ROOT / "runs" / "benchmarks" if given.quick else RESULTS
    output: Path = given.output or usual
    output.mkdir(parents=True, exist_ok=True)
    count, seed = 2_000 if given.quick else 1_000_000, 0
    rows = simulated(count, seed)
    table = []
    for alpha in PUBLISHED:
        mine = [row for row in rows if row["alpha"] == alpha]
        cells = [f"{row['sparsity']:.1f} ({row['published_sparsity']:.1f})" for row in mine]
        table.append([f"{alpha}", *cells])
    print_table(
        "Sparsity in per cent, simulated (published in HSTU, Table 3)",
        ["α", *[f"N = {longest:,}" for longest in LONGEST]],
        table,
    )
    content = {
        "config": {
            "sequences": count,
            "lengths": f"normal({MEAN:g}, {DEVIATION:g}), rounded, at least 1",
            "seed": seed,
            "quick": given.quick,
        },
        "machine": machine(),
        "commit": commit(),
        "rows": rows,
    }
    with whole_file(output / "stochastic_length.json") as temporary:
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
    print(output / "stochastic_length.json")


if __name__ == "__main__":
    main()
