"""A tiny world: 30 items of two levels, users of 1 to 40 events, two actions."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import torch

from gr.model import GRConfig, GRForCausalLM
from gr.tokenizer import Catalog, SemanticIdTokenizer
from gr.training import EventArrays, StreamCollator

ACTIONS = ("like", "dislike")


class World:
    """Everything a training test needs, made from a seed."""

    def __init__(self, users: int = 20, longest: int = 40, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        number = np.arange(30)
        codes = np.stack([number // 6, number % 6], axis=1).astype(np.int32)
        self.catalog = Catalog([f"i{n}" for n in number], codes, {"item": (5, 6)})
        self.tokenizer = SemanticIdTokenizer.from_catalog(self.catalog, ACTIONS)
        self.rows: list[dict[str, Any]] = []
        for user in range(users):
            count = int(rng.integers(1, longest + 1))
            self.rows.append(
                {
                    "user_id": f"u{user}",
                    "item_id": [f"i{n}" for n in rng.integers(0, 30, count)],
                    "action": [ACTIONS[n] for n in rng.integers(0, 2, count)],
                    "timestamp": np.sort(rng.integers(10**9, 10**9 + 10**6, count)).tolist(),
                }
            )

    @property
    def sequences(self) -> Any:
        return datasets.Dataset.from_list(self.rows)

    def events(
        self, positive: tuple[str, ...] = (), actions: tuple[str, ...] = ACTIONS
    ) -> EventArrays:
        return EventArrays.from_sequences(self.sequences, self.catalog, actions, positive)

    def collator(self) -> StreamCollator:
        return StreamCollator(self.events(), self.tokenizer)

    def model(self, dropout: float = 0.0, **options: Any) -> GRForCausalLM:
        torch.manual_seed(1)
        vocabulary = self.tokenizer.vocabulary
        return GRForCausalLM(
            GRConfig(
                vocab_size=vocabulary.size,
                vocabulary=vocabulary.to_dict(),
                hidden_size=8,
                num_attention_heads=1,
                layer_types=["hstu"],
                max_position_embeddings=64,
                dropout=dropout,
                **options,
            )
        )
