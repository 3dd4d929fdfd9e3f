"""``GRTrainer``: the Hugging Face Trainer with planned batches, selection on a validation metric,
averaged weights and exact resume.

Mixed precision, distribution, accumulation and clipping are the stock ones. What differs:

- One "epoch" of the stock loop is the whole run, since batches by tokens may give epochs of
  unequal length; ``state.epoch`` still counts passes over the data.
- Batches come ready for this process from ``BucketSampler``; accelerate does not deal them out.
- A validation is a function of the model, run on the main process alone.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput

from gr.data.whole_file import whole_file
from gr.model import GRForCausalLM
from gr.training.arguments import decay_names, learning_rate_factor, training_arguments
from gr.training.checkpoints import (
    checkpoint_folder,
    latest_checkpoint,
    mark_complete,
    quiet_files,
    remove_checkpoints,
)
from gr.training.collator import StreamCollator
from gr.training.ema import WeightAverage
from gr.training.events import Windows
from gr.training.recipe import SelectionRecipe, TrainingRecipe
from gr.training.sampler import BucketSampler, WindowDataset

EvaluateFn = Callable[[PreTrainedModel], dict[str, float]]

STATE_NAME = "gr_state.safetensors"


class GRTrainer(Trainer):
    """Trains a model on windows of histories.

    Args:
        model: takes ``input_ids, attention_mask, timestamps, labels, num_items_in_batch`` and
            returns a loss.
        collator: holds the events and builds batches.
        recipe: the run.
        output_dir: where checkpoints and logs go.
        evaluate: metrics of a model in evaluation mode, among them ``recipe.selection.metric``;
            without it the last weights are kept.
        callbacks: stock Trainer callbacks.
        progress: show a progress bar.

    Raises:
        ValueError: an average or a validation is asked for and processes hold shards of weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        collator: StreamCollator,
        recipe: TrainingRecipe,
        output_dir: str | os.PathLike[str],
        evaluate: EvaluateFn | None = None,
        callbacks: Iterable[TrainerCallback] = (),
        progress: bool = False,
    ) -> None:
        args = training_arguments(recipe, output_dir, progress)
        self.recipe, self.evaluate_fn = recipe, evaluate
        self.network, self.folder = model, Path(output_dir)
        self.sampler = BucketSampler(
            collator,
            recipe.windows,
            recipe.batches,
            recipe.epochs,
            recipe.seed,
            args.process_index,
            args.world_size,
        )
        if isinstance(model, GRForCausalLM):
            # Only a relative time bias may be left without a gradient, by data without a clock.
            args.ddp_find_unused_parameters = collator.events.timestamp is None
        use_cache = model.config.use_cache
        super().__init__(
            model=model,
            args=args,
            train_dataset=WindowDataset(self.sampler.num_windows),
            callbacks=list(callbacks),
        )
        # The stock Trainer turns it off for good; a saved model should generate with a cache.
        model.config.use_cache = use_cache
        self.remove_callback(PrinterCallback)
        if recipe.tensorboard and self.is_world_process_zero():
            self.add_callback(_tensorboard(output_dir))
        decay = recipe.selection.ema_decay
        if (decay or evaluate) and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                f"ema_decay: {decay}, evaluate: {evaluate}; wanted 0 and None with FSDP or "
                "DeepSpeed, where no process holds the whole weights"
            )
        self.average = WeightAverage(model, decay) if decay else None
        self.add_callback(_RunCallback(self))
        self._losses_of_parts: list[Tensor] = []
        self._step_losses = torch.zeros(0)
        self._seconds_before = 0.0
        self._started: float | None = None
        self.process_ids = [os.getpid()]
        if args.world_size > 1:
            self.process_ids = [0] * args.world_size
            dist.all_gather_object(self.process_ids, os.getpid())

    # ---- data, optimiser, schedule -----------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Windows]:
        # A batch of indices is a `Windows` here; the loader passes it on as it is.
        batches: Any = self.sampler
        collate: Any = self.sampler.collator
        return DataLoader(
            WindowDataset(self.sampler.num_windows),
            batch_sampler=batches,
            collate_fn=collate,
            pin_memory=self.args.device.type == "cuda",
        )

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decay_names(model, self.recipe.optimizer.decay)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LambdaLR:
        if self.lr_scheduler is None:
            recipe = self.recipe.optimizer
            optimizer = optimizer or self.optimizer
            assert optimizer is not None
            self.lr_scheduler = LambdaLR(
                optimizer,
                lambda step: learning_rate_factor(recipe, step, num_training_steps),
            )
            self._created_lr_scheduler = True
        scheduler: LambdaLR = self.lr_scheduler
        return scheduler

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: the stock estimate walks all modules in every step."""
        return 0

    # ---- the loss of every step --------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self._losses_of_parts.append(loss)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._collect_losses()
        super().log(logs, start_time)

    def _collect_losses(self) -> None:
        """Move the losses of finished steps to the CPU: one wait for the device, not one a step."""
        parts = self.recipe.batches.accumulation
        done = len(self._losses_of_parts) // parts * parts
        if not done:
            return
        losses = torch.stack(self._losses_of_parts[:done]).float().view(-1, parts).sum(1)
        del self._losses_of_parts[:done]
        if self.args.world_size > 1:
            # Each process scales its share by the number of processes, as its gradient is averaged.
            dist.all_reduce(losses)
            losses = losses / self.args.world_size
        self._step_losses = torch.cat([self._step_losses, losses.cpu()])

    @property
    def step_losses(self) -> list[float]:
        """Loss of every optimiser step so far, those before a resume included."""
        losses: list[float] = self._step_losses.tolist()
        return losses

    @property
    def seconds(self) -> float:
        """Wall time of training so far, validations included, and what a resume went on from."""
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._seconds_before + running

    @property
    def validations(self) -> list[dict[str, float]]:
        """Metrics of every validation so far, with ``epoch`` and ``step``."""
        return validations(self.state)

    # ---- validation and selection ------------------------------------------------------------

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Run the validation with averaged weights, if any, and log it."""
        if self.evaluate_fn is None:
            raise ValueError("evaluate: the trainer was built without an evaluation function")
        start = time.perf_counter()
        answer: list[Any] = [None]
        if self.is_world_process_zero():
            try:
                answer[0] = self._evaluate_here()
            except Exception as error:
                # Others wait for the answer below: they must hear of it before it is raised.
                answer[0] = error
        if self.args.world_size > 1:
            dist.broadcast_object_list(answer, src=0, device=self.args.device)
        if isinstance(answer[0], Exception):
            raise answer[0]
        metrics = {f"eval_{name}": float(value) for name, value in answer[0].items()}
        metrics["eval_seconds"] = time.perf_counter() - start
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    @torch.no_grad()
    def _evaluate_here(self) -> dict[str, float]:
        assert self.evaluate_fn is not None
        cuda = [self.args.device] if self.args.device.type == "cuda" else []
        self.network.eval()
        # What the evaluation draws must not shift the random numbers of training.
        with (
            torch.random.fork_rng(devices=cuda),
            self.average.in_model() if self.average else nullcontext(),
        ):
            metrics = self.evaluate_fn(self.network)
        wanted = self.recipe.selection.metric
        if wanted not in metrics:
            raise ValueError(f"selection.metric: {wanted!r}, wanted one of {sorted(metrics)}")
        if not math.isfinite(metrics[wanted]):
            raise ValueError(f"validation: {wanted} is {metrics[wanted]}, wanted a finite number")
        return metrics

    def _keep_selected(self) -> None:
        """Leave the weights in the model that the run selects."""
        step = self.state.best_global_step
        if step:
            folder = checkpoint_folder(self.folder, step)
            if not (folder / STATE_NAME).is_file():
                raise ValueError(
                    f"{folder}: the best checkpoint is gone, wanted {STATE_NAME} in it"
                )
            if self.average:
                self.average.load(_averages(load_file(folder / STATE_NAME)))
            else:
                self._load_weights(str(folder))
        if self.average:
            self.average.copy_to_model()

    # ---- running, saving, resuming -----------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, and leave the selected weights in the model.

        Args:
            resume_from_checkpoint: a checkpoint folder, or True for the latest whole one of
                ``output_dir`` (a fresh start where there is none).

        Raises:
            ValueError: the checkpoint belongs to a run with other steps.
        """
        checkpoint = resume_from_checkpoint or None
        if checkpoint is True:
            found = latest_checkpoint(self.folder)
            checkpoint = None if found is None else str(found)
        if checkpoint is not None:
            state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
            if state.max_steps != self.sampler.num_steps:
                raise ValueError(
                    f"{checkpoint}: a run of {state.max_steps} steps, wanted one of "
                    f"{self.sampler.num_steps}: the data or the recipe has changed"
                )
            if is_stale(state, self.recipe.selection):
                self.state = state
                self._load_from_checkpoint(checkpoint)
                self._keep_selected()
                return TrainOutput(state.global_step, math.nan, {})
        self._started = time.perf_counter()
        output = super().train(checkpoint, trial, ignore_keys_for_eval)
        self._seconds_before, self._started = self.seconds, None
        self._keep_selected()
        return output

    def _load_weights(self, checkpoint: str, model: Any = None) -> None:
        whole = Path(checkpoint) / "model.safetensors"
        if whole.is_file():
            # The stock version reads the configuration as a bare one, which refuses block names.
            load_model(self.network, whole)
        else:
            super()._load_from_checkpoint(checkpoint, model)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._load_weights(resume_from_checkpoint, model)
        tensors = load_file(Path(resume_from_checkpoint) / STATE_NAME)
        self._losses_of_parts = []
        self._step_losses = tensors["step_losses"]
        self._seconds_before = float(tensors["seconds"])
        if self.average:
            self.average.load(_averages(tensors))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._collect_losses()
        step = self.state.global_step
        folder = checkpoint_folder(self.folder, step)
        if self.is_world_process_zero():
            tensors = {
                "step_losses": self._step_losses,
                "seconds": torch.tensor(self.seconds, dtype=torch.float64),
            }
            for name, average in (self.average.state() if self.average else {}).items():
                tensors["average." + name] = average
            save_file(tensors, folder / STATE_NAME)
        if self.args.world_size > 1:
            dist.barrier()
        if self.is_world_process_zero():
            mark_complete(folder, step)
            remove_checkpoints(self.folder, {step, self.state.best_global_step or step})

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # The stock version adds its arguments as a pickle.
        with quiet_files():
            self.network.save_pretrained(output_dir or self.folder, state_dict=state_dict)

    def save_log(self, path: str | os.PathLike[str], **more: Any) -> None:
        """Write the loss of every step and every validation as JSON."""
        file = Path(path)
        content = {
            **more,
            "world_size": self.args.world_size,
            "process_ids": self.process_ids,
            "steps": self.state.global_step,
            "best_step": self.state.best_global_step,
            "seconds": self.seconds,
            "loss": self.step_losses,
            "validation": self.validations,
        }
        with whole_file(file) as temporary:
            temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")


class _RunCallback(TrainerCallback):
    """Decides when to validate, save and stop."""

    def __init__(self, trainer: GRTrainer) -> None:
        self.trainer = trainer
        recipe, steps_before = trainer.recipe, trainer.sampler.steps_before
        selection = recipe.selection
        epochs = {*range(selection.first, recipe.epochs + 1, selection.every), recipe.epochs}
        self.milestones = {int(steps_before[epoch]) for epoch in epochs}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        step = state.global_step
        state.epoch = self.trainer.sampler.epoch_of(step)
        if self.trainer.average:
            self.trainer.average.update(step)
        if step in self.milestones:
            control.should_evaluate = self.trainer.evaluate_fn is not None
            control.should_save = True
        elif self.trainer.recipe.save_steps and step % self.trainer.recipe.save_steps == 0:
            control.should_save = True

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if is_stale(state, self.trainer.recipe.selection):
            control.should_training_stop = True


def validations(state: TrainerState) -> list[dict[str, float]]:
    """The validations in a state's log: metrics by name, with ``epoch`` and ``step``."""
    return [
        {key.removeprefix("eval_"): value for key, value in entry.items()}
        for entry in state.log_history
        if any(key.startswith("eval_") for key in entry)
    ]


def is_stale(state: TrainerState, selection: SelectionRecipe) -> bool:
    """Whether the last ``patience`` validations brought nothing new; read from the log alone, so
    that a resumed run decides as an unbroken one."""
    values = [entry[selection.metric] for entry in validations(state)]
    if selection.patience is None or not values:
        return False
    return len(values) - 1 - values.index(max(values)) >= selection.patience


def _averages(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {n.removeprefix("average."): t for n, t in tensors.items() if n.startswith("average.")}
    if not found:
        raise ValueError("checkpoint: it has no averaged weights, wanted those of ema_decay > 0")
    return found


def _tensorboard(output_dir: str | os.PathLike[str]) -> TrainerCallback:
    # Imported here: it is slow, and wanted on one process only.
    from transformers.integrations.integration_utils import TensorBoardCallback

    callback = TensorBoardCallback()
    callback.logging_dir = os.path.join(output_dir, "tensorboard")
    return callback
