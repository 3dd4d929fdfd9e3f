"""What a layer keeps for its backward pass: HSTU against the transformer, and against the paper.

    python benchmarks/activation_memory.py

Counted are the bytes of all storages that autograd saves, each once, without parameters. A layer's
share is what two layers save minus what one saves, so that what layers share (masks, distances,
time buckets) does not count. It is per token and in units of D bytes: a tensor [N, D] in bfloat16
is 2 D, in float32 4 D. The paper counts bfloat16 (HSTU, §3.3) and gets 14 D for HSTU (2 input,
2 normed input, 4 q and k, 4 u and v, 2 A v) and 33 D for a transformer whose feed-forward layer is
4 D wide, with one matrix in and one out. Ours is gated, with two matrices in; 8/3 D wide it has the
parameters of the paper's. Whatever the paper does not count, a fused kernel has to make again.

HSTU's scores are kept while they are small and made again beyond that (see
``gr.kernels.hstu_attention.pointwise``); both are measured. ``parts`` in the JSON lists the saved
tensors of a layer.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gr.data.whole_file import whole_file
from gr.kernels.hstu_attention import pointwise
from gr.model import GRConfig
from gr.model.blocks import BLOCKS
from gr.model.layout import causal_layout
from measuring import RESULTS, ROOT, commit, machine, print_table, progress

PAPER = {"hstu": 14.0, "transformer": 33.0}
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
DAY = 86_400


class Form(NamedTuple):
    """A layer to measure: its block and options, whether scores may be kept, d_ff / D."""

    block: str
    options: dict[str, Any]
    keep_scores: bool = False
    feed_forward: float = 4.0


FORMS = {
    "transformer": Form("transformer", {}),
    "transformer, FFN 8/3 D": Form("transformer", {}, feed_forward=8 / 3),
    "hstu": Form("hstu", {}),
    "hstu, scores kept": Form("hstu", {}, keep_scores=True),
    "hstu, ranking": Form(
        "hstu",
        {
            "activation": "u",
            "affine_norm": True,
            "scale_scores": True,
            "bias": "none",
            "concat_output": True,
        },
    ),
}


def saved_by(run: Callable[[], Tensor], parameters: Sequence[Tensor]) -> Counter[str]:
    """Bytes of the storages that ``run`` saves, by the dtype and shape under which they are saved.

    The graph of the result has to be alive while bytes are counted, so ``run`` returns it.
    """
    seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    total: Counter[str] = Counter()
    # Held, so that no later tensor gets the same address.
    held = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.append(x)
            total[f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"] += storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        held.append(run())
    return total


@contextmanager
def scores_kept(keep: bool) -> Iterator[None]:
    limit = pointwise.KEEP_BYTES
    pointwise.KEEP_BYTES = 2**62 if keep else 0
    try:
        yield
    finally:
        pointwise.KEEP_BYTES = limit


def layer_memory(
    form: Form, config: GRConfig, batch: int, length: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Units of D bytes per token and layer, and what they are made of."""
    block, options = BLOCKS[form.block]
    torch.manual_seed(0)
    layers = [block(config, options(**form.options), layer).to(dtype) for layer in range(2)]
    for parameter in (p for layer in layers for p in layer.parameters()):
        nn.init.normal_(parameter, std=0.02)
    mask = torch.ones(batch, length, dtype=torch.int64)
    layout = causal_layout(mask, length, torch.arange(length).expand(batch, -1) * DAY)

    def saved(count: int) -> Counter[str]:
        # A gradient of the input is wanted, as in every layer of a model.
        x = torch.randn(batch, length, config.hidden_size, dtype=dtype, requires_grad=True)

        def run() -> Tensor:
            out = x * 1.0
            for layer in layers[:count]:
                out = layer(out, layout)
            return out

        return saved_by(run, [p for layer in layers for p in layer.parameters()])

    with scores_kept(form.keep_scores):
        one, two = saved(1), saved(2)
    unit = batch * length * config.hidden_size
    parts = {name: (two[name] - one[name]) / unit for name in two if two[name] != one[name]}
    return {
        "units": sum(parts.values()),
        "parts": dict(sorted(parts.items(), key=lambda part: -part[1])),
    }


def measure(width: int, heads: int, batch: int, length: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, form in FORMS.items():
        progress(name)
        results[name] = {}
        for dtype in SHORT:
            for dropout in (0.0, 0.1):
                config = GRConfig(
                    hidden_size=width,
                    num_attention_heads=heads,
                    layer_types=[form.block],
                    max_position_embeddings=length,
                    intermediate_size=round(form.feed_forward * width),
                    dropout=dropout,
                )
                key = SHORT[dtype] + (" drop" if dropout else "")
                results[name][key] = layer_memory(form, config, batch, length, dtype)
    return results


def show(results: dict[str, Any]) -> None:
    settings = [*results["transformer"]]
    rows = []
    for name, found in results.items():
        units = [f"{found[setting]['units']:.1f}" for setting in settings]
        rows.append([name, *units, f"{PAPER[FORMS[name].block]:.0f}"])
    columns = ("", *settings, "paper")
    print_table("Saved for the backward pass, D bytes per token and layer", columns, rows)
    setting = settings[0]
    rows = [
        [
            name,
            *(
                f"{results[name][setting]['units'] / results[other][setting]['units']:.2f}"
                for other in results
                if other.startswith("hstu")
            ),
        ]
        for name in results
        if name.startswith("transformer")
    ]
    columns = (f"{setting}: layer over", *(name for name in results if name.startswith("hstu")))
    print_table(f"How much more a transformer keeps (the paper: {33 / 14:.2f})", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256, metavar="D")
    parser.add_argument("--heads", type=int, default=4, metavar="H")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="tokens of a row")
    parser.add_argument("--batch", type=int, default=2, metavar="B", help="rows")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of activation_memory.json (default: benchmarks/results)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, to see that the benchmark works; its numbers mean nothing",
    )
    given = parser.parse_args()
    sizes = {
        "width": given.width,
        "heads": given.heads,
        "batch": given.batch,
        "length": given.length,
    }
    output: Path = given.output or RESULTS
    if given.quick:
        sizes = {"width": 16, "heads": 2, "batch": 1, "length": 32}
        output = given.output or ROOT / "runs" / "benchmarks"
    output.mkdir(parents=True, exist_ok=True)
    results = measure(**sizes)
    show(results)
    content = {
        "config": {**sizes, "quick": given.quick},
        "machine": machine(),
        "commit": commit(),
        "paper": PAPER,
        "layers": results,
    }
    with whole_file(output / "activation_memory.json") as temporary:
        text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")
    print(output / "activation_memory.json")


if __name__ == "__main__":
    main()
