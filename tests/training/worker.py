"""A small run that is killed; ``python -m tests.training.worker FOLDER STEP``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gr.training import (
    BatchRecipe,
    GRTrainer,
    OptimizerRecipe,
    SelectionRecipe,
    TrainingRecipe,
    WindowRecipe,
)
from tests.training.world import World


class KillAt(TrainerCallback):
    """Ends the process as a power cut would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def resumable(output: Path, callbacks: list[TrainerCallback] | None = None) -> GRTrainer:
    """A run with everything random that training has: dropout, cuts, hidden actions, an average."""
    world = World()
    recipe = TrainingRecipe(
        epochs=3,
        seed=5,
        save_steps=4,
        log_steps=3,
        tensorboard=False,
        windows=WindowRecipe(
            max_events=12, context=3, random_cuts=True, bare_windows=0.3, shuffle_ties=True
        ),
        batches=BatchRecipe(tokens=300),
        optimizer=OptimizerRecipe(learning_rate=0.01, warmup_steps=3),
        selection=SelectionRecipe(metric="score", ema_decay=0.9),
    )

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        torch.rand(3)  # draws that must not reach the training
        return {"score": -float(sum(p.abs().sum() for p in model.parameters()))}

    return GRTrainer(
        world.model(dropout=0.3), world.collator(), recipe, output, evaluate, callbacks or []
    )


def main() -> None:
    """``FOLDER STEP``: a run that is killed after that step."""
    torch.set_num_threads(1)
    resumable(Path(sys.argv[1]), [KillAt(int(sys.argv[2]))]).train()


if __name__ == "__main__":
    main()
