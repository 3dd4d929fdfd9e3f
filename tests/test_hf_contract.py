"""The properties every block must have, run once per block.

1 padding and batch mates; 2 cache; 3 candidates; 4 causality; 5 the Hugging Face round trips.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import gr
from gr.model import GRConfig, GRForCausalLM, Layout, causal_layout
from gr.model.blocks import BLOCKS
from gr.model.hf_cache import CACHE_NAME, cache_kwargs, new_cache, output_cache
from gr.tokenizer.vocabulary import SidVocabulary

VOCABULARY = SidVocabulary({"item": (7, 5)}, ("like", "dislike"))
# The published ranking form of HSTU is the same block with every flag turned.
RANKING = {
    "activation": "u",
    "affine_norm": True,
    "scale_scores": True,
    "bias": "none",
    "concat_output": True,
}
VARIANTS: dict[str, dict[str, Any]] = {"ranking": RANKING, "softmax": {"attention": "softmax"}}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in BLOCKS),
    *(("hstu", options) for options in VARIANTS.values()),
]
LORA_TARGETS = {"hstu": ["uvqk_proj", "o_proj"], "transformer": ["q_proj", "v_proj", "down_proj"]}

case = pytest.mark.parametrize(
    ("block", "options"), CASES, ids=[*BLOCKS, *(f"hstu-{name}" for name in VARIANTS)]
)


def make(block: str, options: dict[str, Any], seed: int = 0, **changes: Any) -> GRForCausalLM:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY.end,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "layer_types": [block] * 2,
        "block_options": {block: options},
        "max_position_embeddings": 32,
        "initializer_range": 0.2,
        "vocabulary": VOCABULARY.to_dict(),
    }
    if block == "hstu":
        settings["block_options"] = {"hstu": {"norm_length": 8.0, **options}}
    model: GRForCausalLM = GRForCausalLM(GRConfig(**(settings | changes))).eval()
    return model


def batch(rows: int = 3, length: int = 9, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, VOCABULARY.end, (rows, length), generator=generator)
    gaps = torch.randint(0, 90_000, (rows, length), generator=generator)
    return ids, 1_600_000_000 + gaps.cumsum(1)


@case
@torch.no_grad()
def test_padding_side_amount_and_batch_mates_do_not_matter(
    block: str, options: dict[str, Any]
) -> None:
    model = make(block, options)
    ids, times = batch(1, 6)
    mates, mate_times = batch(2, 11, seed=3)
    alone = model(input_ids=ids, timestamps=times).logits[0]
    for left, right in itertools.product((0, 1, 5), repeat=2):
        width = left + 6 + right
        pad = torch.nn.functional.pad
        mask = pad(torch.ones(1, 6), (left, right))
        padded, stamps = pad(ids, (left, right)), pad(times, (left, right))
        wide = max(width, 11)
        rows = torch.cat([pad(padded, (0, wide - width)), pad(mates, (0, wide - 11))])
        row_times = torch.cat([pad(stamps, (0, wide - width)), pad(mate_times, (0, wide - 11))])
        masks = torch.cat([pad(mask, (0, wide - width)), pad(torch.ones(2, 11), (0, wide - 11))])
        logits = model(input_ids=rows, attention_mask=masks, timestamps=row_times).logits
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits[0, left : left + 6], alone, atol=1e-5, rtol=0)


@case
@torch.no_grad()
def test_cached_prefix_and_appended_tokens_equal_the_full_forward(
    block: str, options: dict[str, Any]
) -> None:
    model = make(block, options)
    ids, times = batch()
    asked = times[:, -1] + 50
    full = model(input_ids=ids, timestamps=times, request_times=asked).logits
    for cut in (1, 4, 8):
        cache = new_cache()
        start = model(
            input_ids=ids[:, :cut],
            timestamps=times[:, :cut],
            request_times=times[:, cut],
            use_cache=True,
            **cache_kwargs(model, cache),
        )
        assert output_cache(start) is cache
        rest = model(
            input_ids=ids[:, cut:],
            timestamps=times,
            request_times=asked,
            use_cache=True,
            **cache_kwargs(model, cache),
        )
        both = torch.cat([start.logits, rest.logits], dim=1)
        torch.testing.assert_close(both, full, atol=1e-5, rtol=0)


def rank_with_branches(
    model: GRForCausalLM, ids: Tensor, times: Tensor, candidates_BCM: Tensor, asked: Tensor
) -> Tensor:
    """Logits [B, C, M, V] of candidates appended as branches of one shared prefix."""
    rows, count, levels = candidates_BCM.shape
    cache = new_cache()
    model(
        input_ids=ids,
        timestamps=times,
        request_times=asked,
        use_cache=True,
        **cache_kwargs(model, cache),
    )
    prefix = ids.shape[1]
    nodes = count * levels
    own = torch.arange(nodes)
    same = own[:, None] // levels == own[None, :] // levels
    branch = (same & (own[None, :] <= own[:, None])).expand(rows, -1, -1)
    depth = torch.cat([torch.arange(prefix), prefix + own % levels]).expand(rows, -1)
    asked_nodes = asked[:, None].expand(-1, nodes)
    layout = Layout(
        position_BK=depth,
        valid_BK=torch.ones(rows, prefix + nodes, dtype=torch.bool),
        num_queries=nodes,
        time_BK=torch.cat([times, asked_nodes], dim=1),
        query_time_BQ=asked_nodes,
        branch_BQA=branch,
    )
    out = model(
        input_ids=candidates_BCM.flatten(1),
        layout=layout,
        use_cache=True,
        **cache_kwargs(model, cache),
    )
    logits: Tensor = out.logits.unflatten(1, (count, levels))
    return logits


@case
@torch.no_grad()
def test_candidates_do_not_see_each_other(block: str, options: dict[str, Any]) -> None:
    model = make(block, options)
    ids, times = batch(2, 7)
    asked = times[:, -1] + 3600
    candidates = torch.randint(
        6, VOCABULARY.end, (2, 5, 2), generator=torch.Generator().manual_seed(5)
    )
    scores = rank_with_branches(model, ids, times, candidates, asked)
    order = [0, 3, 2, 1, 4]
    swapped = rank_with_branches(model, ids, times, candidates[:, order], asked)
    torch.testing.assert_close(swapped, scores[:, order], atol=1e-5, rtol=0)
    micro = torch.cat(
        [rank_with_branches(model, ids, times, part, asked) for part in candidates.split(2, dim=1)],
        1,
    )
    torch.testing.assert_close(micro, scores, atol=1e-5, rtol=0)
    for one in range(5):
        tokens = torch.cat([ids, candidates[:, one]], dim=1)
        stamps = torch.cat([times, asked[:, None].expand(-1, 2)], dim=1)
        plain = model(input_ids=tokens, timestamps=stamps, request_times=asked).logits[:, -2:]
        torch.testing.assert_close(scores[:, one], plain, atol=1e-5, rtol=0)


@case
@torch.no_grad()
def test_a_future_token_changes_nothing_before_it(block: str, options: dict[str, Any]) -> None:
    model = make(block, options)
    ids, times = batch()
    before = model(input_ids=ids, timestamps=times).logits
    changed, later = ids.clone(), times.clone()
    changed[:, 6] = (ids[:, 6] - 5) % 10 + 6
    later[:, 7:] += 1_000_000
    after = model(input_ids=changed, timestamps=later).logits
    # Token 6 is new, and token 7's time is what token 6 is asked at: outputs 0-5 must not move.
    torch.testing.assert_close(after[:, :6], before[:, :6], atol=0, rtol=0)
    assert (after[:, 6] - before[:, 6]).abs().max() > 1e-4


@case
def test_round_trip_and_auto_classes(block: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = make(block, options, l2_normalize=True, logit_temperature=0.05, head_bias=True)
    # Every row is somebody's, the padding row of a tied head too.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids, times = batch()
    expected = model(input_ids=ids, timestamps=times).logits
    model.save_pretrained(tmp_path)
    assert [path.suffix for path in tmp_path.glob("*model*")] == [".safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, gr.GRForCausalLM)
    torch.testing.assert_close(
        loaded(input_ids=ids, timestamps=times).logits, expected, atol=0, rtol=0
    )
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.layer_types == model.config.layer_types
    assert config.block_options == model.config.block_options
    base = AutoModel.from_pretrained(tmp_path)
    hidden = base(input_ids=ids, timestamps=times).last_hidden_state
    torch.testing.assert_close(
        hidden, model.model(input_ids=ids, timestamps=times).last_hidden_state, atol=0, rtol=0
    )


@case
@torch.no_grad()
def test_generate_is_greedy_search_by_hand(block: str, options: dict[str, Any]) -> None:
    model = make(block, options)
    ids, times = batch(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    asked = times[:, -1] + 777
    got = model.generate(
        input_ids=ids,
        attention_mask=mask,
        timestamps=times,
        request_times=asked,
        max_new_tokens=4,
        do_sample=False,
    )
    tokens, stamps = ids, times
    for _ in range(4):
        logits = model(
            input_ids=tokens, attention_mask=mask, timestamps=stamps, request_times=asked
        ).logits
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        stamps = torch.cat([stamps, asked[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
    assert torch.equal(got, tokens)
    beams = model.generate(
        input_ids=ids, timestamps=times, max_new_tokens=3, num_beams=3, do_sample=False
    )
    assert beams.shape == (2, 8)


@case
def test_gradient_checkpointing_gives_the_same_gradients(
    block: str, options: dict[str, Any]
) -> None:
    ids, times = batch()
    gradients = []
    for checkpointing in (False, True):
        model = make(block, options).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=ids, timestamps=times, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradients[1][name] is not None, name
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-5)


@case
def test_bfloat16_stays_near_float64(block: str, options: dict[str, Any]) -> None:
    ids, times = batch()
    exact = make(block, options).double()(input_ids=ids, timestamps=times).logits
    single = make(block, options)
    eager = single(input_ids=ids, timestamps=times).logits
    assert (eager.double() - exact).abs().max() < 1e-4 * exact.abs().max()
    half = make(block, options).bfloat16()
    logits = half(input_ids=ids, timestamps=times).logits
    assert logits.dtype == torch.bfloat16
    # 2 layers round about 2^-8 of each intermediate; ten roundings bound the drift.
    assert (logits.double() - exact).abs().max() < 10 * 2**-8 * exact.abs().max()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = single.train()(input_ids=ids, timestamps=times, labels=ids).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in single.parameters() if p.grad is not None)


@case
@torch.no_grad()
def test_torch_compile_traces_without_a_break(block: str, options: dict[str, Any]) -> None:
    model = make(block, options)
    ids, times = batch()
    expected = model(input_ids=ids, timestamps=times).logits
    # "eager" runs the traced graph as it is, so this needs no C++ compiler.
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(input_ids=ids, timestamps=times).logits, expected, atol=1e-6, rtol=0
    )


@case
def test_lora_trains_saves_loads_and_merges(
    block: str, options: dict[str, Any], tmp_path: Path
) -> None:
    ids, times = batch()
    base = make(block, options)
    frozen = {name: p.detach().clone() for name, p in base.named_parameters()}
    adapter = get_peft_model(base, LoraConfig(r=2, target_modules=LORA_TARGETS[block]))
    optimizer = torch.optim.AdamW([p for p in adapter.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(15):
        loss = adapter.train()(input_ids=ids, timestamps=times, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = adapter.eval()(input_ids=ids, timestamps=times).logits
    adapter.save_pretrained(str(tmp_path))
    for name, p in make(block, options).named_parameters():
        assert torch.equal(p, frozen[name])
    again = PeftModel.from_pretrained(make(block, options), tmp_path).eval()
    torch.testing.assert_close(
        again(input_ids=ids, timestamps=times).logits, trained, atol=1e-6, rtol=0
    )
    merged = again.merge_and_unload()
    torch.testing.assert_close(
        merged(input_ids=ids, timestamps=times).logits, trained, atol=1e-5, rtol=0
    )


def test_a_layout_spelled_out_equals_the_mask() -> None:
    model = make("hstu", {})
    ids, times = batch()
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [1] * 6 + [0] * 3])
    layout = causal_layout(mask, 9, times)
    torch.testing.assert_close(
        model(input_ids=ids, layout=layout).logits,
        model(input_ids=ids, attention_mask=mask, timestamps=times).logits,
        atol=0,
        rtol=0,
    )
    assert CACHE_NAME in ("cache", "past_key_values")


def test_an_adapter_on_the_head_counts_and_learns() -> None:
    """The loss never calls the head's module, so it must ask it for its matrix."""
    ids, times = batch()
    cases: list[dict[str, Any]] = [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["o_proj"], "trainable_token_indices": [8, 9]},
    ]
    for targets in cases:
        base = make("hstu", {}, item_loss="level", head_bias=True, tie_word_embeddings=False)
        adapter = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, **targets))
        adapter(input_ids=ids, timestamps=times, labels=ids).loss.backward()
        for name, parameter in adapter.named_parameters():
            assert not parameter.requires_grad or parameter.grad is not None, name
        with torch.no_grad():
            got = adapter.eval()(input_ids=ids, timestamps=times).logits
            merged = adapter.merge_and_unload()
            expected = merged(input_ids=ids, timestamps=times).logits
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_an_enlarged_vocabulary_changes_no_logit() -> None:
    ids, times = batch()
    model = make("hstu", {}, item_loss="level", head_bias=True)
    before = model(input_ids=ids, timestamps=times).logits
    model.resize_token_embeddings(VOCABULARY.end + 5, mean_resizing=False)
    after = model(input_ids=ids, timestamps=times).logits
    torch.testing.assert_close(after[..., : VOCABULARY.end], before)
    assert after[..., VOCABULARY.end :].isneginf().all()


def test_embeddings_in_place_of_tokens_are_refused_where_tokens_decide() -> None:
    ids, _ = batch()
    model = make("hstu", {}, item_loss="level")
    with pytest.raises(ValueError, match="inputs_embeds: with item_loss 'level'"):
        model(inputs_embeds=model.model.embed_tokens(ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["lstm"]}, "layer_types: unknown block 'lstm'"),
        ({"layer_types": ["hstu"], "num_hidden_layers": 4}, "num_hidden_layers: 4, wanted None or"),
        ({"num_attention_heads": 3}, "num_attention_heads: 3, wanted a divisor of hidden_size 16"),
        ({"layer_types": ["transformer"], "head_dim": 3}, "head_dim: 3, wanted an even number"),
        ({"vocab_size": 5}, "vocab_size: 5, wanted at least the 20 of 'vocabulary'"),
    ],
)
def test_sizes_that_do_not_agree_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("hstu", {}, **changes)
