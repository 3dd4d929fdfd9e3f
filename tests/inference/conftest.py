"""Tiny random models of every family the engine serves, and slow, obvious scorers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gr.model import GRConfig, GRForCausalLM
from gr.tokenizer import Catalog, SemanticIdTokenizer

HF_KINDS = ("llama", "qwen3", "gpt2")
OWN_KINDS = ("transformer", "hstu")

MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture
def make_model() -> MakeModel:
    """make_model(kind, vocab_size, **options): random weights, wide enough to tell scores apart."""

    def make(kind: str, vocab_size: int = 48, **options: Any) -> PreTrainedModel:
        torch.manual_seed(3)
        sizes: dict[str, Any] = {
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "max_position_embeddings": 96,
            "initializer_range": 0.3,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        model: PreTrainedModel
        if kind == "gpt2":
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=vocab_size,
                    n_embd=32,
                    n_head=4,
                    n_layer=2,
                    n_positions=96,
                    initializer_range=0.3,
                    bos_token_id=1,
                    eos_token_id=None,
                    pad_token_id=0,
                    **options,
                )
            )
        elif kind in OWN_KINDS:
            sizes.pop("num_hidden_layers")
            model = GRForCausalLM(
                GRConfig(layer_types=[kind] * 2, num_key_value_heads=4, **sizes | options)
            )
        else:
            config, cls = {
                "llama": (LlamaConfig, LlamaForCausalLM),
                "qwen3": (Qwen3Config, Qwen3ForCausalLM),
            }[kind]
            extra = {"head_dim": 8} if kind == "qwen3" else {}
            model = cls(
                config(num_key_value_heads=2, intermediate_size=48, **sizes | extra | options)
            )
        model.eval()
        return model

    return make


@pytest.fixture
def brute_force() -> Callable[..., Tensor]:
    """log p(item | history) of every item by one whole forward per item: no cache, no mask."""

    @torch.no_grad()
    def score(
        model: PreTrainedModel,
        history: Tensor,
        items: Tensor,
        times: Tensor | None = None,
        asked: int | None = None,
    ) -> Tensor:
        scores = []
        for row in items:
            tokens = row[row >= 0]
            ids = torch.cat([history, tokens])[None]
            extra = {}
            if times is not None:
                assert asked is not None
                extra = {
                    "timestamps": torch.cat([times, times.new_full((len(tokens),), asked)])[None],
                    "request_times": torch.tensor([asked]),
                }
            logits = model(input_ids=ids, **extra).logits[0].float().log_softmax(-1)
            steps = logits[len(history) - 1 : -1].gather(1, tokens[:, None])
            scores.append(steps.sum())
        return torch.stack(scores)

    return score


@pytest.fixture
def item_tokens() -> Tensor:
    """60 items of three tokens, some sharing all of them."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, (4, 5, 6), (60, 3))
    return torch.from_numpy(codes + np.array([10, 20, 30]))


@pytest.fixture
def make_tokenizer() -> Callable[..., SemanticIdTokenizer]:
    """make_tokenizer(sizes, n, actions): items i0 .. with random codes and distinct popularity."""

    def make(
        sizes: tuple[int, ...] = (4, 5, 6),
        n: int = 30,
        actions: tuple[str, ...] = ("like", "dislike", "skip"),
    ) -> SemanticIdTokenizer:
        rng = np.random.default_rng(7)
        if len(sizes) == 1:
            codes = np.arange(n, dtype=np.int32)[:, None]
        else:
            codes = rng.integers(0, sizes, (n, len(sizes))).astype(np.int32)
        catalog = Catalog(
            item_ids=[f"i{i}" for i in range(n)],
            codes=codes,
            level_sizes={"item": sizes},
            popularity=rng.permutation(n).astype(np.int64),
        )
        return SemanticIdTokenizer.from_catalog(catalog, actions)

    return make
