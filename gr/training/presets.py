"""Recipes with a name. ``gr recipe NAME`` prints one as JSON, to keep or to change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gr.training.recipe import (
    BatchRecipe,
    DataRecipe,
    EmbeddingRecipe,
    IdsRecipe,
    OptimizerRecipe,
    Recipe,
    SelectionRecipe,
    TrainingRecipe,
    WindowRecipe,
)

# MovieLens' half of the scale: 4 and 5 stars are a like.
LIKES = (("like", 4.0, None), ("dislike", None, 4.0))

# Residual k-means over what is watched together and what the items are called.
SEMANTIC_IDS = IdsRecipe(
    levels=(32, 1024),
    embeddings=(
        EmbeddingRecipe("cooccurrence", window=None),
        EmbeddingRecipe("cooccurrence", window=10),
        EmbeddingRecipe("text", weight=0.09, dimension=48),
    ),
    collisions="reassign",
    actions=("like", "dislike"),
)

# Cosine logits over a temperature, as in HSTU's published retrieval recipe; embeddings times √D.
HSTU = {
    "hidden_size": 64,
    "num_attention_heads": 1,
    "embedding_scale": 8.0,
    "dropout": 0.3,
    "final_norm": "none",
    "item_loss": "level",
    "l2_normalize": True,
}

HSTU_SID = Recipe(
    name="hstu-sid",
    data=DataRecipe(actions_from_value=LIKES),
    ids=SEMANTIC_IDS,
    model={
        **HSTU,
        # HSTU reads times; transformer layers around it learn faster from few users. Chosen on five
        # held-out events of every user before the last one.
        "layer_types": ["transformer", "hstu", "transformer"],
        "intermediate_size": 128,
        "block_options": {"hstu": {"norm_length": 304.0}},
        "head_bias": True,
        "logit_temperature": 0.06,
        "action_loss_weight": 0.5,
        "dropout": 0.1,
    },
    training=TrainingRecipe(
        epochs=14,
        threads=1,
        windows=WindowRecipe(max_events=100, random_cuts=True, bare_windows=0.1, shuffle_ties=True),
        batches=BatchRecipe(tokens=1024),
        optimizer=OptimizerRecipe(learning_rate=3e-3),
        selection=SelectionRecipe(every=3, first=8, ema_decay=0.998),
    ),
)

HSTU_ATOMIC = Recipe(
    name="hstu-atomic",
    data=DataRecipe(actions_from_value=LIKES),
    ids=IdsRecipe(kind="atomic", embeddings=()),
    model={
        **HSTU,
        "layer_types": ["hstu"] * 2,
        "block_options": {"hstu": {"norm_length": 203.0}},
        "logit_temperature": 0.05,
    },
    training=TrainingRecipe(
        epochs=14,
        threads=1,
        windows=WindowRecipe(max_events=200, random_cuts=True, shuffle_ties=True),
        batches=BatchRecipe(tokens=1024),
        optimizer=OptimizerRecipe(learning_rate=3e-3),
        selection=SelectionRecipe(every=7, first=7, ema_decay=0.998),
    ),
)

# For a table of user, item and time and nothing else.
HSTU_SID_ITEMS = replace(
    HSTU_SID,
    name="hstu-sid-items",
    data=DataRecipe(),
    ids=replace(SEMANTIC_IDS, embeddings=SEMANTIC_IDS.embeddings[:2], actions=()),
    model={**HSTU_SID.model, "block_options": {"hstu": {"norm_length": 203.0}}},
)

PRESETS: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (HSTU_SID, HSTU_SID_ITEMS, HSTU_ATOMIC)
}

DESCRIPTIONS: dict[str, str] = {
    "hstu-sid": "semantic IDs and actions through HSTU and transformer blocks: retrieves and ranks",
    "hstu-sid-items": "the same for a table of user, item and time: retrieves only",
    "hstu-atomic": "one token per item through HSTU blocks: the classic sequential model",
}


def find_recipe(name_or_path: str) -> Recipe:
    """A preset by name, or a JSON file.

    Raises:
        FileNotFoundError: neither.
        ValueError: a file that is no recipe; the message names it.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if not Path(name_or_path).is_file():
        raise FileNotFoundError(
            f"{name_or_path}: no such recipe, wanted one of {[*PRESETS]} or a JSON file"
        )
    return Recipe.load(name_or_path)
