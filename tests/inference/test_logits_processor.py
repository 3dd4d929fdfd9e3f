"""The processor inside stock ``generate``: beams, greedy and sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gr.inference import (
    Backbone,
    RowFilter,
    TrieLogitsProcessor,
    build_filter,
    prefill,
    retrieve,
)
from gr.tokenizer.trie import ItemTrie

Make = Callable[..., Any]
PROMPT = torch.tensor([[1, 5, 9, 40], [7, 44, 2, 3], [1, 1, 30, 21]])


@pytest.mark.parametrize("kind", ["llama", "hstu"])
@pytest.mark.parametrize("width", [3, 40])
def test_beams_equal_our_own_even_under_a_chat_configuration(
    kind: str, width: int, make_model: Make, item_tokens: Tensor
) -> None:
    model, trie = make_model(kind), ItemTrie(item_tokens)
    for name, value in {
        "do_sample": True,
        "top_k": 2,
        "top_p": 0.1,
        "temperature": 0.3,
        "repetition_penalty": 9.0,
        "encoder_repetition_penalty": 3.0,
        "encoder_no_repeat_ngram_size": 1,
        "renormalize_logits": True,
        "guidance_scale": 2.0,
        "begin_suppress_tokens": item_tokens[:5, 0].tolist(),
        "forced_eos_token_id": 2,
    }.items():
        setattr(model.generation_config, name, value)
    excluded = [np.array([0, 1]), np.arange(50), np.arange(60)]
    keep = build_filter(trie, excluded)
    processor = TrieLogitsProcessor(trie, PROMPT.shape[1], keep=keep)
    out = model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **processor.generate_options(),
    )
    prefix = prefill(Backbone(model), PROMPT, torch.full((3,), 4))
    row_Bk, score_Bk = retrieve(prefix, trie, width, width, keep)
    for row in range(3):
        expected = {}
        for item, score in zip(row_Bk[row].tolist(), score_Bk[row].tolist(), strict=True):
            if item >= 0:
                expected[tuple(item_tokens[item].tolist())] = score
        got = {}
        for at in range(row * width, (row + 1) * width):
            if out.sequences_scores[at] > -1e8:
                tokens = tuple(out.sequences[at, 4:].tolist())
                got[tokens] = float(out.sequences_scores[at])
        # A shared ID is several of our k items and one stock beam, so ours may end earlier.
        assert expected.keys() <= got.keys()
        for key, score in expected.items():
            assert score == pytest.approx(got[key], abs=1e-4)
    assert not expected  # everything is excluded for the last row


@pytest.mark.parametrize("sample", [False, True])
def test_greedy_and_sampling_stay_in_the_permitted_set(
    sample: bool, make_model: Make, item_tokens: Tensor
) -> None:
    """With the warpers of a chat configuration left on: they may shrink the set, never widen it."""
    torch.manual_seed(0)
    model, trie = make_model("llama"), ItemTrie(item_tokens)
    keep = build_filter(trie, None, [np.array([3, 4, 5, 6]), np.array([7]), np.arange(60)])
    permitted = [{3, 4, 5, 6}, {7}, set(range(60))]
    processor = TrieLogitsProcessor(trie, PROMPT.shape[1], keep=keep)
    warpers = {"top_k": 3, "top_p": 0.7, "temperature": 1.5} if sample else {}
    repeats = 5 if sample else 1
    out = model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        do_sample=sample,
        num_return_sequences=repeats,
        max_new_tokens=3,
        logits_processor=[processor],
        **warpers,
    )
    for at, tokens in enumerate(out[:, 4:]):
        matches = set(torch.nonzero((item_tokens == tokens).all(1))[:, 0].tolist())
        assert matches & permitted[at // repeats]


def test_mixed_lengths_end_with_their_token(make_model: Make) -> None:
    items = torch.tensor([[10, -1], [11, 20], [11, 21], [12, -1]])
    trie = ItemTrie(items)
    with pytest.raises(ValueError, match="different lengths need a token to end with"):
        TrieLogitsProcessor(trie, 2)
    processor = TrieLogitsProcessor(trie, 2, eos_token_id=2)
    scores = torch.zeros(4, 30)
    rows = torch.tensor([[5, 5, 10], [5, 5, 11], [5, 5, 12], [5, 5, 13]])
    open_tokens = [torch.nonzero(row == 0)[:, 0].tolist() for row in processor(rows, scores)]
    assert open_tokens == [[2], [20, 21], [2], []]
    model = make_model("llama")
    model.generation_config.min_new_tokens = 3  # what it holds back is the end of an item
    out = model.generate(
        PROMPT[:, :2],
        attention_mask=torch.ones(3, 2),
        num_beams=4,
        num_return_sequences=4,
        eos_token_id=2,
        **processor.generate_options(),
    )
    legal = {(10, 2), (12, 2), (11, 20, 2), (11, 21, 2)}
    for row in range(3):
        answers = out[4 * row : 4 * row + 4, 2:].tolist()
        assert {tuple(tokens[: tokens.index(2) + 1]) for tokens in answers} == legal


def test_wrong_use_is_named(item_tokens: Tensor) -> None:
    trie = ItemTrie(item_tokens)
    with pytest.raises(ValueError, match="prompt_length is 9"):
        TrieLogitsProcessor(trie, 9)(PROMPT, torch.zeros(3, 48))
    with pytest.raises(ValueError, match="wanted max_new_tokens"):
        TrieLogitsProcessor(trie, 1)(PROMPT, torch.zeros(3, 48))
    two = build_filter(trie, [np.array([1]), np.array([2])])
    with pytest.raises(ValueError, match="a multiple of the filter's 2 requests"):
        TrieLogitsProcessor(trie, 4, keep=two)(PROMPT, torch.zeros(3, 48))
    with pytest.raises(ValueError, match="scores have 35 columns: wanted 36 or more"):
        TrieLogitsProcessor(trie, 4)(PROMPT, torch.zeros(3, 35))
    with pytest.raises(ValueError, match="keep is over 7 items: wanted the trie's 60"):
        TrieLogitsProcessor(trie, 4, keep=RowFilter.everything(7, trie.device))
