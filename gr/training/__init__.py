"""Training: windows of histories, planned batches, the Trainer, and the stages that use them.

Read ``recipe.py`` first, then ``train.py``.
"""

from gr.training.collator import StreamCollator
from gr.training.events import EventArrays, Windows, cut_windows
from gr.training.recipe import (
    BatchRecipe,
    DataRecipe,
    IdsRecipe,
    OptimizerRecipe,
    Recipe,
    SelectionRecipe,
    TrainingRecipe,
    WindowRecipe,
)
from gr.training.sampler import BucketSampler
from gr.training.stochastic_length import StochasticLength
from gr.training.trainer import GRTrainer

__all__ = [
    "BatchRecipe",
    "BucketSampler",
    "DataRecipe",
    "EventArrays",
    "GRTrainer",
    "IdsRecipe",
    "OptimizerRecipe",
    "Recipe",
    "SelectionRecipe",
    "StochasticLength",
    "StreamCollator",
    "TrainingRecipe",
    "WindowRecipe",
    "Windows",
    "cut_windows",
]
