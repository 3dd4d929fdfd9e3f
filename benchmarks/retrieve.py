"""Retrieval: ours beside stock ``generate``, on the same weights, histories and catalogue.

    python benchmarks/retrieve.py

Three ways to the same answer, the 50 best items of every user by a beam search along the trie:

- ours: ``prefill``, then ``retrieve``;
- stock: ``generate`` with ``prefix_allowed_tokens_fn``, a plain Python dict from prefix to tokens;
- processor: ``generate`` with our ``TrieLogitsProcessor``.

Their answers are compared first, and differing ones end the run. docs/benchmarks.md explains the
numbers. Nothing is computed in this process: see ``measuring.in_fresh_process``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from breakdown import BareProducts, Stopwatch, model_parts, model_points, retrieval_points
from figures import draw_retrieval
from gr.inference import Backbone, Prefix, TrieLogitsProcessor, prefill, retrieve
from gr.tokenizer.trie import ItemTrie
from measuring import (
    arguments,
    commit,
    in_fresh_process,
    machine,
    measured,
    print_table,
    progress,
    timed,
    write,
)

SPECIAL = 16  # token ids before the first code
POSITIONS = 2048  # of the model; the longest history of the sweeps fits
TOLERANCE = 1e-4  # between two scores of one item, and between scores that tie

Answers = list[dict[tuple[int, ...], float]]  # per user: semantic ID -> score


@dataclass(frozen=True)
class Case:
    """What is asked, of which model; weights, histories and items follow from the seed."""

    users: int = 16
    history: int = 400
    beams: int = 50
    items: int = 10_000
    levels: int = 4
    codes: int = 256
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    intermediate: int = 688
    seed: int = 0


QUICK = Case(
    users=4, history=40, beams=8, items=500, codes=16, layers=2, hidden=32, heads=2, intermediate=64
)


class Workload:
    """A case with its model, histories and trie."""

    def __init__(self, case: Case) -> None:
        logging.set_verbosity_error()
        self.case = case
        vocabulary = SPECIAL + case.levels * case.codes
        torch.manual_seed(case.seed)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=case.hidden,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.heads,
            intermediate_size=case.intermediate,
            max_position_embeddings=POSITIONS,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        self.model = LlamaForCausalLM(config).eval()
        self.history = torch.randint(SPECIAL, vocabulary, (case.users, case.history))
        # Distinct items, each a number written with the codes of its levels as digits.
        rng = np.random.default_rng(case.seed)
        numbers = np.unique(rng.integers(0, case.codes**case.levels, 2 * case.items))
        numbers = rng.permutation(numbers)[: case.items]
        codes = np.stack([numbers // case.codes**n % case.codes for n in range(case.levels)], 1)
        first = SPECIAL + case.codes * np.arange(case.levels)
        self.items = torch.from_numpy(codes + first)
        self.trie = ItemTrie(self.items)

    @cached_property
    def legal(self) -> dict[tuple[int, ...], list[int]]:
        """The trie as a Python dict: which tokens may come after each prefix."""
        after: dict[tuple[int, ...], set[int]] = {}
        for item in self.items.tolist():
            for depth in range(len(item)):
                after.setdefault(tuple(item[:depth]), set()).add(item[depth])
        return {prefix: sorted(tokens) for prefix, tokens in after.items()}

    def prefill(self) -> Prefix:
        case, lengths = self.case, torch.full((len(self.history),), self.history.shape[1])
        room = case.beams * (case.levels - 1)
        return prefill(Backbone(self.model), self.history, lengths, room=room)

    def retrieve(self, prefix: Prefix) -> tuple[Tensor, Tensor]:
        return retrieve(prefix, self.trie, k=self.case.beams, num_beams=self.case.beams)

    def smaller(self) -> Workload:
        """The same model and trie, asked a tiny question, to load what is loaded on first use."""
        other = Workload.__new__(Workload)
        other.__dict__.update(self.__dict__)
        other.case, other.history = replace(self.case, beams=2), self.history[:1, :8]
        return other


# ---- the three ways ------------------------------------------------------------------------------


def ours(work: Workload) -> tuple[Tensor, Tensor]:
    return work.retrieve(work.prefill())


def stock(work: Workload) -> Any:
    start, legal = work.history.shape[1], work.legal

    def allowed(_: int, sequence: Tensor) -> list[int]:
        # Where there are more beams than children, some are outside the trie; they score -inf.
        return legal.get(tuple(sequence[start:].tolist()), [0])

    return _generate(
        work,
        prefix_allowed_tokens_fn=allowed,
        max_new_tokens=work.case.levels,
        length_penalty=0.0,
        early_stopping=False,
    )


def processor(work: Workload) -> Any:
    constraint = TrieLogitsProcessor(work.trie, work.history.shape[1])
    return _generate(work, **constraint.generate_options())


def _generate(work: Workload, **options: Any) -> Any:
    return work.model.generate(
        work.history,
        attention_mask=torch.ones_like(work.history),
        num_beams=work.case.beams,
        num_return_sequences=work.case.beams,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )


METHODS: dict[str, Callable[[Workload], Any]] = {
    "ours": ours,
    "stock": stock,
    "processor": processor,
}


def answers(work: Workload, result: Any) -> Answers:
    """What a method returned, as Python values; beams outside the trie are left out."""
    found: Answers = [{} for _ in work.history]
    if isinstance(result, tuple):
        for user, (rows, scores) in enumerate(zip(*result, strict=True)):
            for row, score in zip(rows.tolist(), scores.tolist(), strict=True):
                if row >= 0:
                    found[user][tuple(work.items[row].tolist())] = score
        return found
    generated = result.sequences[:, work.history.shape[1] :].tolist()
    for at, score in enumerate(result.sequences_scores.tolist()):
        if score > -1e8:
            found[at // work.case.beams][tuple(generated[at])] = score
    return found


def largest_difference(name: str, got: Answers, wanted: Answers) -> float:
    """The largest difference between two scores of one item.

    Raises:
        RuntimeError: it is above the tolerance, or an item is in one answer only though it does
            not tie with the last item of the other.
    """
    largest = 0.0
    for user, (mine, other) in enumerate(zip(got, wanted, strict=True)):
        if not mine or not other:
            raise RuntimeError(f"{name}: user {user} has {len(mine)} items, ours {len(other)}")
        for left, right in ((mine, other), (other, mine)):
            for item in left.keys() - right.keys():
                behind = left[item] - min(right.values())
                if abs(behind) > TOLERANCE or len(left) != len(right):
                    raise RuntimeError(
                        f"{name}: user {user}, item {item} is in one answer only, {behind:+.2g} "
                        "from the last of the other: wanted the same items up to ties"
                    )
        difference = max(abs(mine[item] - other[item]) for item in mine.keys() & other.keys())
        largest = max(largest, difference)
    if largest > TOLERANCE:
        raise RuntimeError(f"{name}: scores differ by {largest:.2g}, wanted at most {TOLERANCE}")
    return largest


# ---- what runs in processes of its own -----------------------------------------------------------


def ready(case: Case, *methods: str) -> Workload:
    """A workload on which each method has answered a tiny question, so that all is loaded."""
    work = Workload(case)
    if "stock" in methods:
        _ = work.legal
    for method in methods:
        METHODS[method](work.smaller())
    return work


def first_call(case: Case, method: str) -> dict[str, Any]:
    """Answers, seconds and memory of one call."""
    work = ready(case, method)
    call = measured(METHODS[method], work)
    return {
        "answers": answers(work, call.result),
        "seconds": call.seconds,
        "memory_mb": call.memory_mb,
    }


def ours_in_parts(case: Case, repeats: int) -> dict[str, Any]:
    """Answers and memory of the first call; medians of a request, its prefill, a held prefix."""
    work = ready(case, "ours")
    call = measured(ours, work)
    times = {name: median(values) for name, values in time_ours(work, repeats).items()}
    return {**times, "memory_mb": call.memory_mb, "answers": answers(work, call.result)}


def time_ours(work: Workload, repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"seconds": [], "prefill": [], "held_prefix": []}
    ours(work)
    for _ in range(repeats):
        read, prefix = timed(work.prefill)
        found, _ = timed(work.retrieve, prefix)
        again, _ = timed(work.retrieve, prefix)
        times["seconds"].append(read + found)
        times["prefill"].append(read)
        times["held_prefix"].append(again)
    return times


def side_by_side(case: Case, repeats: int, stock_repeats: int) -> dict[str, list[float]]:
    """Seconds of every method, taking turns."""
    work = ready(case, *METHODS)
    times: dict[str, list[float]] = {name: [] for name in (*METHODS, "prefill", "held_prefix")}
    for _ in range(stock_repeats):
        for other in ("stock", "processor"):
            mine = time_ours(work, repeats)
            times["ours"] += mine["seconds"]
            times["prefill"] += mine["prefill"]
            times["held_prefix"] += mine["held_prefix"]
            times[other].append(timed(METHODS[other], work)[0])
    return times


def in_detail(case: Case, repeats: int) -> dict[str, Any]:
    """Where ours spends its time, and what its matrix products cost by themselves."""
    work = ready(case, "ours")
    widths = [min(case.beams, width) for width in work.trie.level_width[:-1]]
    keys = [case.history + sum(widths[: at + 1]) for at in range(len(widths))]
    bare = [
        BareProducts(work.model, case.users, new, total, new)
        for new, total in zip(widths, keys, strict=True)
    ]
    plain: dict[str, list[float]] = {"seconds": [], "after_prefill": [], "products": []}
    watches: list[Stopwatch] = []
    for repeat in range(repeats + 1):
        times = time_ours(work, 1)
        products = sum(timed(step)[0] for step in bare)
        watch = Stopwatch()
        with watch.watching(*model_points(work.model), *retrieval_points()):
            with watch.section("prefill"):
                prefix = work.prefill()
            with watch.section("retrieve"):
                work.retrieve(prefix)
        if repeat:  # the first one warms up
            watches.append(watch)
            plain["seconds"] += times["seconds"]
            plain["after_prefill"].append(times["seconds"][0] - times["prefill"][0])
            plain["products"].append(products)
    watch = sorted(watches, key=lambda watch: watch.total)[len(watches) // 2]
    trie = {
        "children of beams": watch.sum("retrieve", leaf="children"),
        "filter counts": watch.sum("retrieve", leaf="count"),
        # All that a search does outside the functions named here.
        "lookups and gathers": watch.sum("retrieve", leaf="retrieve"),
    }
    scores = {name: watch.sum("retrieve", leaf=name) for name in ("log-softmax", "top-k")}
    step = median(plain["after_prefill"]) / len(bare)
    step_products = median(plain["products"]) / len(bare)
    return {
        "trie_share": sum(trie.values()) / watch.total,
        "step_over_matmul": step / step_products,
        "breakdown": {
            "prefill": model_parts(watch, "prefill"),
            "model steps": model_parts(watch, "append"),
            "trie": trie,
            "choosing": scores,
            "seconds_watched": watch.total,
            "seconds_unwatched": median(plain["seconds"]),
            "steps": len(bare),
            "step_seconds": step,
            "step_matmul_seconds": step_products,
        },
    }


# ---- the run -------------------------------------------------------------------------------------


def sweep_values(quick: bool) -> dict[str, tuple[int, ...]]:
    if quick:
        return {"beams": (2, 8), "history": (10, 40), "users": (1, 4), "items": (100, 500)}
    return {
        "beams": (10, 50, 100, 200, 400),
        "history": (100, 200, 400, 800, 1600),
        "users": (1, 4, 16, 64),
        "items": (1_000, 10_000, 100_000, 1_000_000),
    }


# Stock takes about a minute at the default sizes, so it is swept only where it is cheaper.
STOCK_TOO = {("beams", 10), ("history", 100), ("users", 1), ("users", 4)}


def sweep(base: Case, quick: bool, repeats: int) -> dict[str, list[dict[str, Any]]]:
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for name, values in sweep_values(quick).items():
        sweeps[name] = []
        for value in values:
            progress(f"sweep: {name} {value}")
            point: dict[str, Any] = {name: value}
            case = replace(base, **point)
            point["ours"] = in_fresh_process(ours_in_parts, case, repeats)
            expected = point["ours"].pop("answers")
            if (name, value) in STOCK_TOO and value != getattr(base, name):
                point["stock"] = in_fresh_process(first_call, case, "stock")
                difference = largest_difference("stock", point["stock"].pop("answers"), expected)
                point["max_score_diff"] = difference
            sweeps[name].append(point)
    return sweeps


def main() -> None:
    quick, output = arguments(__doc__ or "")
    case, repeats, stock_repeats = (QUICK, 2, 1) if quick else (Case(), 5, 2)
    config = {**asdict(case), "k": case.beams, "quick": quick}
    config |= {"repeats": repeats, "stock_repeats": stock_repeats}
    about = {"config": config, "machine": machine(), "commit": commit()}
    calls = {}
    for name in METHODS:
        progress(f"{name}: answers and memory")
        calls[name] = in_fresh_process(first_call, case, name)
    difference = max(
        largest_difference(name, calls[name]["answers"], calls["ours"]["answers"])
        for name in ("stock", "processor")
    )
    progress(f"the answers are the same (scores within {difference:.1g}); timing")
    times = in_fresh_process(side_by_side, case, repeats, stock_repeats)
    seconds = {name: median(values) for name, values in times.items()}
    memory = {name: call["memory_mb"] for name, call in calls.items()}
    progress("where the time goes")
    detail = in_fresh_process(in_detail, case, 3 * repeats)
    result = {
        "speedup": seconds["stock"] / seconds["ours"],
        "speedup_processor": seconds["processor"] / seconds["ours"],
        "memory_ratio": memory["ours"] / memory["stock"],
        "max_score_diff": difference,
        **detail,
        "seconds": seconds,
        "seconds_all": times,
        "memory_mb": memory,
        "sweeps": sweep(case, quick, 2 if quick else 3),
        **about,
    }
    report(result)
    write("retrieve", output, result, draw_retrieval(result))


def report(result: dict[str, Any]) -> None:
    seconds, memory = result["seconds"], result["memory_mb"]
    rows = [
        [name, f"{seconds[name]:.3f}", f"{memory[name]:.0f}"]
        + [f"{values[name] / values['ours']:.1f}x" for values in (seconds, memory)]
        for name in METHODS
    ]
    rows.append(["ours, prefix held", f"{seconds['held_prefix']:.3f}", "", "", ""])
    columns = ["method", "seconds", "extra MB", "time / ours", "memory / ours"]
    print_table("Retrieval: the same answers", columns, rows)
    breakdown = result["breakdown"]
    parts = [
        [f"{phase}: {part}", f"{1e3 * value:.1f}", f"{value / breakdown['seconds_watched']:.1%}"]
        for phase in ("prefill", "model steps", "trie", "choosing")
        for part, value in breakdown[phase].items()
    ]
    watched, unwatched = breakdown["seconds_watched"], breakdown["seconds_unwatched"]
    parts.append(
        ["all (without the stopwatch)", f"{1e3 * watched:.1f} ({1e3 * unwatched:.1f})", ""]
    )
    print_table("Where ours spends its time", ["part", "ms", "share"], parts)
    print_table(
        "In short",
        ["key", "value"],
        [
            [key, f"{result[key]:.3g}"]
            for key in (
                "speedup",
                "speedup_processor",
                "memory_ratio",
                "max_score_diff",
                "trie_share",
                "step_over_matmul",
            )
        ],
    )


if __name__ == "__main__":
    main()
