"""Ranking: candidates on one cached history, beside a whole forward per candidate.

    python benchmarks/rank.py

Three ways to p(action | history, candidate) for every candidate, on a Llama and on our HSTU:

- ours: ``prefill``, then ``action_log_probs``, ``microbatch`` candidates in one pass;
- one by one: a forward of history and candidate for each candidate;
- repeated: the same in batches, the history repeated in each row.

Their scores are compared first, and differing ones end the run. docs/benchmarks.md explains the
numbers. Nothing is computed in this process: see ``measuring.in_fresh_process``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from breakdown import BareProducts, Stopwatch, model_parts, model_points
from figures import draw_ranking
from gr.inference import Backbone, Prefix, action_log_probs, prefill
from gr.model import GRConfig, GRForCausalLM
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
TOLERANCE = 1e-5  # between two log-probabilities of one action
BACKBONES = ("llama", "hstu")
BATCHES = (32, 64)  # rows of the repeated history


@dataclass(frozen=True)
class Case:
    """What is asked, of which model; weights, histories and candidates follow from the seed."""

    backbone: str = "llama"
    users: int = 1
    history: int = 400
    candidates: int = 1024
    microbatch: int = 64
    levels: int = 4
    codes: int = 256
    actions: int = 3
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    intermediate: int = 688
    seed: int = 0


QUICK = Case(
    history=40, candidates=48, microbatch=8, codes=16, layers=2, hidden=32, heads=2, intermediate=64
)


class Workload:
    """A case with its model, histories and candidates."""

    def __init__(self, case: Case) -> None:
        logging.set_verbosity_error()
        self.case = case
        coded = SPECIAL + case.levels * case.codes
        torch.manual_seed(case.seed)
        sizes: dict[str, Any] = {
            "vocab_size": coded + case.actions,
            "hidden_size": case.hidden,
            "num_attention_heads": case.heads,
            "num_key_value_heads": case.heads,
            "max_position_embeddings": 512,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        model: LlamaForCausalLM | GRForCausalLM
        if case.backbone == "llama":
            layers, width = case.layers, case.intermediate
            config = LlamaConfig(num_hidden_layers=layers, intermediate_size=width, **sizes)
            model = LlamaForCausalLM(config)
        else:
            model = GRForCausalLM(GRConfig(layer_types=["hstu"] * case.layers, **sizes))
        self.model = model.eval()
        self.actions = torch.arange(coded, coded + case.actions)
        self.history = torch.randint(SPECIAL, coded, (case.users, case.history))
        shape = (case.users, case.candidates, case.levels)
        first = SPECIAL + case.codes * torch.arange(case.levels)
        self.candidates = torch.randint(case.codes, shape) + first
        # An event every few hours, and the request a day after the last: HSTU reads the clock.
        self.times: Tensor | None = None
        self.asked: Tensor | None = None
        if case.backbone == "hstu":
            self.times = 1_700_000_000 + torch.randint(1, 20_000, self.history.shape).cumsum(1)
            self.asked = self.times[:, -1] + 86_400

    def prefill(self) -> Prefix:
        case, lengths = self.case, torch.full((len(self.history),), self.history.shape[1])
        room = min(case.microbatch, case.candidates) * case.levels
        return prefill(
            Backbone(self.model), self.history, lengths, self.times, self.asked, room=room
        )

    def rank(self, prefix: Prefix) -> Tensor:
        return action_log_probs(prefix, self.candidates, self.actions, self.case.microbatch)

    def smaller(self) -> Workload:
        """The same model, asked about two candidates, to load what is loaded on first use."""
        other = Workload.__new__(Workload)
        other.__dict__.update(self.__dict__)
        other.candidates = self.candidates[:, :2]
        return other


# ---- the ways ------------------------------------------------------------------------------------


def ours(work: Workload) -> Tensor:
    """log p(action | history, candidate), float32 [users, candidates, actions], as all of these."""
    return work.rank(work.prefill())


@torch.no_grad()
def repeated(work: Workload, rows: int) -> Tensor:
    """Whole sequences, ``rows`` in a batch; no cache is kept and one position gets logits."""
    users, candidates, levels = work.candidates.shape
    scores = []
    for user in range(users):
        for start in range(0, candidates, rows):
            tokens = work.candidates[user, start : start + rows]
            history = work.history[user].expand(len(tokens), -1)
            clock: dict[str, Tensor] = {}
            if work.times is not None and work.asked is not None:
                asked = work.asked[user].expand(len(tokens))
                past = work.times[user].expand(len(tokens), -1)
                times = torch.cat([past, asked[:, None].expand(-1, levels)], dim=1)
                clock = {"timestamps": times, "request_times": asked}
            output = work.model(
                input_ids=torch.cat([history, tokens], dim=1),
                use_cache=False,
                logits_to_keep=1,
                **clock,
            )
            scores.append(output.logits[:, -1, work.actions].log_softmax(-1))
    return torch.cat(scores).view(users, candidates, -1)


def answer(work: Workload, method: str) -> Tensor:
    if method == "ours":
        return ours(work)
    return repeated(work, 1 if method == "one_by_one" else int(method.removeprefix("repeated_")))


METHODS = ("ours", "one_by_one", *(f"repeated_{rows}" for rows in BATCHES))


def largest_difference(name: str, got: list[Any], wanted: list[Any]) -> float:
    """The largest difference between two log-probabilities.

    Raises:
        RuntimeError: it is above the tolerance, or a score is no number.
    """
    largest = 0.0
    for mine, other in zip(got, wanted, strict=True):
        apart = (
            largest_difference(name, mine, other) if isinstance(mine, list) else abs(mine - other)
        )
        if not apart <= TOLERANCE:
            raise RuntimeError(f"{name}: scores differ by {apart:.2g}, wanted at most {TOLERANCE}")
        largest = max(largest, apart)
    return largest


# ---- what runs in processes of its own -----------------------------------------------------------


def ready(case: Case, *methods: str) -> Workload:
    """A workload on which each method has scored two candidates, so that all is loaded."""
    work = Workload(case)
    for method in methods:
        answer(work.smaller(), method)
    return work


def first_call(case: Case, method: str) -> dict[str, Any]:
    """Scores, seconds and memory of one call."""
    call = measured(answer, ready(case, method), method)
    return {
        "scores": call.result.tolist(),
        "seconds": call.seconds,
        "memory_mb": call.memory_mb,
    }


def ours_repeatedly(case: Case, repeats: int) -> dict[str, Any]:
    """Scores and memory of the first call, the median time of those after it."""
    work = ready(case, "ours")
    call = measured(ours, work)
    whole, held = [], []
    for _ in range(repeats):
        read, prefix = timed(work.prefill)
        ranked, _ = timed(work.rank, prefix)
        whole.append(read + ranked)
        held.append(ranked)
    return {
        "seconds": median(whole),
        "held_prefix": median(held),
        "memory_mb": call.memory_mb,
        "scores": call.result.tolist(),
    }


def in_detail(case: Case, repeats: int) -> dict[str, Any]:
    """Where ours spends its time, and what its matrix products cost by themselves."""
    work = ready(case, "ours")
    new = case.microbatch * case.levels
    passes = -(-case.candidates // case.microbatch)
    bare = BareProducts(work.model, case.users, new, case.history + new, case.microbatch)
    whole, after, products = [], [], []
    watches = []
    for repeat in range(repeats + 1):
        read, prefix = timed(work.prefill)
        ranked, _ = timed(work.rank, prefix)
        step, _ = timed(bare)
        watch = Stopwatch()
        with watch.watching(*model_points(work.model)):
            with watch.section("prefill"):
                prefix = work.prefill()
            with watch.section("rank"):
                work.rank(prefix)
        if repeat:  # the first one warms up
            watches.append(watch)
            whole.append(read + ranked)
            after.append(ranked)
            products.append(step)
    watch = sorted(watches, key=lambda watch: watch.total)[len(watches) // 2]
    step = median(after) / passes
    return {
        "prefill": model_parts(watch, "prefill"),
        "model steps": model_parts(watch, "append"),
        "action scores": {"tokens, parents, log-softmax": watch.sum("rank", leaf="rank")},
        "seconds_watched": watch.total,
        "seconds_unwatched": median(whole),
        "steps": passes,
        "step_seconds": step,
        "step_matmul_seconds": median(products),
        "step_over_matmul": step / median(products),
    }


# ---- the run -------------------------------------------------------------------------------------


def checked(case: Case, methods: Sequence[str]) -> dict[str, Any]:
    """The first call of every method, whose scores are found to be the same."""
    calls = {}
    for method in methods:
        progress(f"{case.backbone}, users: {case.users}, {method}: scores, seconds, memory")
        calls[method] = in_fresh_process(first_call, case, method)
    scores = {method: call.pop("scores") for method, call in calls.items()}
    return {
        "max_score_diff": max(
            largest_difference(method, scores[method], scores["ours"]) for method in methods[1:]
        ),
        "seconds": {method: call["seconds"] for method, call in calls.items()},
        "memory_mb": {method: call["memory_mb"] for method, call in calls.items()},
    }


def beside_others(case: Case, methods: Sequence[str], repeats: int) -> dict[str, Any]:
    """Ours beside whole sequences, which take minutes: the call compared is the one timed."""
    found = checked(case, methods)
    again = in_fresh_process(ours_repeatedly, case, repeats)
    seconds = found["seconds"]
    seconds["ours"], seconds["held_prefix"] = again["seconds"], again["held_prefix"]
    batches = [seconds[name] for name in methods if name.startswith("repeated")]
    found["speedup_repeated"] = min(batches) / seconds["ours"]
    if "one_by_one" in methods:
        found["speedup_one_by_one"] = seconds["one_by_one"] / seconds["ours"]
    return found


def sweep(case: Case, name: str, values: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Ours at several values of one size; the scores of a candidate stay what they were."""
    points: list[dict[str, Any]] = []
    first: list[Any] | None = None
    for value in values:
        progress(f"{case.backbone}, sweep: {name} {value}")
        changed: dict[str, Any] = {name: value}
        point = in_fresh_process(ours_repeatedly, replace(case, **changed), repeats)
        scores = point.pop("scores")
        if name == "microbatch":
            first = first or scores
            point["max_score_diff"] = largest_difference(f"microbatch {value}", scores, first)
        points.append({**changed, **point})
    return points


def main() -> None:
    quick, output = arguments(__doc__ or "")
    base, repeats = (QUICK, 2) if quick else (Case(), 3)
    many_users = 2 if quick else 4
    candidates = (16, 48) if quick else (64, 256, 1024, 4096, 8192)
    microbatches = (4, 16) if quick else (16, 32, 64, 128, 256, 512, 1024)
    config = asdict(base) | {"backbone": list(BACKBONES), "quick": quick, "repeats": repeats}
    about = {"config": config, "machine": machine(), "commit": commit()}
    backbones: dict[str, dict[str, Any]] = {}
    for backbone in BACKBONES:
        case = replace(base, backbone=backbone)
        found = beside_others(case, METHODS, repeats)
        progress(f"{backbone}: where the time goes")
        found["breakdown"] = in_fresh_process(in_detail, case, repeats)
        # A quarter of the candidates for each of four users: as many sequences as for one.
        many = replace(case, users=many_users, candidates=case.candidates // many_users)
        found[f"users_{many_users}"] = beside_others(many, ("ours", METHODS[2]), repeats)
        found["sweeps"] = {
            "candidates": sweep(case, "candidates", candidates, repeats),
            "microbatch": sweep(case, "microbatch", microbatches, repeats),
        }
        found["max_score_diff"] = max(
            found["max_score_diff"],
            found[f"users_{many_users}"]["max_score_diff"],
            *(point["max_score_diff"] for point in found["sweeps"]["microbatch"]),
        )
        backbones[backbone] = found
    shown = ("speedup_one_by_one", "speedup_repeated")
    result = {
        **{key: backbones["llama"][key] for key in shown},
        "max_score_diff": max(found["max_score_diff"] for found in backbones.values()),
        "backbones": backbones,
        **about,
    }
    report(result, many_users)
    write("rank", output, result, draw_ranking(result))


def report(result: dict[str, Any], many_users: int) -> None:
    rows, parts = [], []
    for backbone, found in result["backbones"].items():
        for users, values in ((1, found), (many_users, found[f"users_{many_users}"])):
            seconds, memory = values["seconds"], values["memory_mb"]
            for method in memory:
                ratio = f"{seconds[method] / seconds['ours']:.1f}x"
                name = f"{backbone}, users: {users}, {method}"
                rows.append([name, f"{seconds[method]:.3f}", f"{memory[method]:.0f}", ratio])
        breakdown = found["breakdown"]
        whole = breakdown["seconds_watched"]
        parts += [
            [f"{backbone}, {phase}: {part}", f"{1e3 * value:.1f}", f"{value / whole:.1%}"]
            for phase in ("prefill", "model steps", "action scores")
            for part, value in breakdown[phase].items()
        ]
        unwatched = f"{1e3 * whole:.1f} ({1e3 * breakdown['seconds_unwatched']:.1f})"
        parts.append([f"{backbone}, all (without the stopwatch)", unwatched, ""])
        over = f"{breakdown['step_over_matmul']:.2f}"
        parts.append([f"{backbone}, step over bare products", over, ""])
    print_table("Ranking: the same scores", ["method", "seconds", "extra MB", "time / ours"], rows)
    print_table("Where ours spends its time", ["part", "ms", "share"], parts)


if __name__ == "__main__":
    main()
