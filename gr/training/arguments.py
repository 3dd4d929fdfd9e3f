"""A recipe in the terms of the stock Trainer: arguments, learning rate, weight decay."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import torch
from torch import nn
from transformers import TrainingArguments

from gr.training.recipe import OptimizerRecipe, TrainingRecipe

NEVER = 2**31  # steps between events that a callback decides about instead


def training_arguments(
    recipe: TrainingRecipe, output_dir: str | os.PathLike[str], progress: bool = False
) -> TrainingArguments:
    """The stock arguments of a recipe."""
    optimizer = recipe.optimizer
    return TrainingArguments(
        output_dir=os.fspath(output_dir),
        num_train_epochs=1,
        gradient_accumulation_steps=recipe.batches.accumulation,
        learning_rate=optimizer.learning_rate,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        seed=recipe.seed,
        full_determinism=recipe.deterministic,
        bf16=recipe.precision == "bf16",
        eval_strategy="no",
        metric_for_best_model=recipe.selection.metric,
        greater_is_better=True,
        save_strategy="steps",
        save_steps=NEVER,
        logging_steps=recipe.log_steps,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=not progress,
        remove_unused_columns=False,
        label_names=["labels"],
        use_cpu=not torch.cuda.is_available(),
    )


def learning_rate_factor(recipe: OptimizerRecipe, step: int, num_steps: int) -> float:
    """Rate of step ``step`` (counted from 0) over the peak rate."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    if recipe.schedule == "constant":
        return 1.0
    done = (step - recipe.warmup_steps) / max(num_steps - 1 - recipe.warmup_steps, 1)
    done = min(done, 1.0)
    fall = 0.5 * (1 + math.cos(math.pi * done)) if recipe.schedule == "cosine" else 1 - done
    return recipe.final_ratio + (1 - recipe.final_ratio) * fall


def decay_names(model: nn.Module, kinds: Iterable[str]) -> list[str]:
    """Names of the parameters of the given kinds; see ``OptimizerRecipe.decay``."""
    wanted = set(kinds)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    names = []
    for name, parameter in model.named_parameters():
        kind = "vectors" if parameter.ndim < 2 else "matrices"
        if id(parameter) in tables:
            kind = "embeddings"
        if kind in wanted:
            names.append(name)
    return names
