from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from gr.model import GRForCausalLM
from gr.training import (
    BatchRecipe,
    BucketSampler,
    GRTrainer,
    OptimizerRecipe,
    SelectionRecipe,
    TrainingRecipe,
    WindowRecipe,
)
from gr.training.arguments import decay_names, learning_rate_factor
from gr.training.checkpoints import complete_checkpoints, latest_checkpoint, mark_complete
from gr.training.ema import WeightAverage
from tests.training.worker import resumable
from tests.training.world import World

RECIPE = TrainingRecipe(
    epochs=2,
    log_steps=4,
    tensorboard=False,
    windows=WindowRecipe(max_events=12, context=3, random_cuts=True),
    batches=BatchRecipe(tokens=400),
    optimizer=OptimizerRecipe(learning_rate=0.01, warmup_steps=3, weight_decay=0.1),
    selection=SelectionRecipe(metric="score"),
)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _scores(values: Iterable[float], seen: list[Any]) -> Callable[[nn.Module], dict[str, float]]:
    """An evaluation that answers with prepared scores and keeps the weights it was shown."""
    answers = iter(values)

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not model.training
        seen.append(_weights(model))
        return {"score": next(answers)}

    return evaluate


def test_a_run_equals_a_plain_loop(world: World, tmp_path: Path) -> None:
    """Losses and final weights against AdamW, clipping and a schedule written out."""
    trainer = GRTrainer(world.model(), world.collator(), RECIPE, tmp_path)
    trainer.train()

    model, collator = world.model(), world.collator()
    sampler = BucketSampler(collator, RECIPE.windows, RECIPE.batches, RECIPE.epochs, RECIPE.seed)
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.98),
    )

    def factor(step: int) -> float:
        if step < 3:
            return (step + 1) / 3
        done = (step - 3) / (sampler.num_steps - 4)
        return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2

    schedule = LambdaLR(optimizer, factor)
    losses = []
    model.train()
    for windows in sampler:
        loss = model(**collator(windows)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert trainer.step_losses == pytest.approx(losses, abs=1e-5)
    for name, weight in _weights(model).items():
        torch.testing.assert_close(trainer.network.get_parameter(name), weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("parts", [2, 5])
def test_accumulation_equals_one_large_batch(world: World, tmp_path: Path, parts: int) -> None:
    runs = []
    for accumulation in (1, parts):
        batches = replace(RECIPE.batches, accumulation=accumulation)
        folder = tmp_path / str(accumulation)
        trainer = GRTrainer(
            world.model(), world.collator(), replace(RECIPE, batches=batches), folder
        )
        trainer.train()
        runs.append(trainer)
    whole, split = runs
    assert split.step_losses == pytest.approx(whole.step_losses, abs=1e-5)
    for name, weight in _weights(whole.network).items():
        # Adam divides by gradients near zero, which rounding moves: the weights may differ more.
        torch.testing.assert_close(split.network.get_parameter(name), weight, atol=1e-4, rtol=0)


def test_the_best_validation_is_kept(world: World, tmp_path: Path) -> None:
    seen: list[Any] = []
    recipe = replace(RECIPE, epochs=4)
    evaluate = _scores([0.1, 0.4, 0.3, 0.2], seen)
    trainer = GRTrainer(world.model(), world.collator(), recipe, tmp_path, evaluate)
    trainer.train()
    assert [entry["score"] for entry in trainer.validations] == [0.1, 0.4, 0.3, 0.2]
    assert [entry["epoch"] for entry in trainer.validations] == [1, 2, 3, 4]
    assert _same(_weights(trainer.network), seen[1])
    best = int(trainer.sampler.steps_before[2])
    assert sorted(complete_checkpoints(tmp_path)) == [best, trainer.sampler.num_steps]
    assert trainer.network.config.use_cache
    assert not list(tmp_path.rglob("training_args.bin"))


def test_patience_stops_and_a_resume_does_not_go_on(world: World, tmp_path: Path) -> None:
    seen: list[Any] = []
    recipe = replace(RECIPE, epochs=9, selection=SelectionRecipe("score", patience=2))
    evaluate = _scores([0.1, 0.4, 0.3, 0.4, 0.9], seen)
    trainer = GRTrainer(world.model(), world.collator(), recipe, tmp_path, evaluate)
    trainer.train()
    assert [entry["score"] for entry in trainer.validations] == [0.1, 0.4, 0.3, 0.4]
    assert _same(_weights(trainer.network), seen[1])
    again = GRTrainer(world.model(), world.collator(), recipe, tmp_path, evaluate)
    again.train(resume_from_checkpoint=True)
    assert again.validations == trainer.validations
    assert again.step_losses == trainer.step_losses
    assert _same(_weights(again.network), seen[1])


def test_validations_come_when_asked(world: World, tmp_path: Path) -> None:
    selection = SelectionRecipe("score", first=2, every=2)
    recipe = replace(RECIPE, epochs=5, selection=selection)
    evaluate = _scores([0.1, 0.2, 0.3], [])
    trainer = GRTrainer(world.model(), world.collator(), recipe, tmp_path, evaluate)
    trainer.train()
    assert [entry["epoch"] for entry in trainer.validations] == [2, 4, 5]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"HR@10": 0.1}, r"selection.metric: 'score', wanted one of \['HR@10'\]"),
        ({"score": math.nan}, "validation: score is nan, wanted a finite number"),
    ],
)
def test_a_useless_validation_is_refused(
    world: World, tmp_path: Path, metrics: dict[str, float], message: str
) -> None:
    trainer = GRTrainer(world.model(), world.collator(), RECIPE, tmp_path, lambda _: metrics)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_averaged_weights_follow_the_formula_and_become_the_model(
    world: World, tmp_path: Path
) -> None:
    seen: list[Any] = []
    selection = SelectionRecipe("score", ema_decay=0.6)
    recipe = replace(RECIPE, epochs=3, selection=selection)
    evaluate = _scores([0.1, 0.9, 0.2], seen)
    average: dict[str, Tensor] = {}
    expected: list[dict[str, Tensor]] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            average.update(_weights(given["model"]))

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            step = state.global_step
            decay = min(0.6, (1 + step) / (10 + step))
            for name, weight in _weights(given["model"]).items():
                average[name] = decay * average[name] + (1 - decay) * weight
            if step in trainer.sampler.steps_before[1:]:
                expected.append({n: w.clone() for n, w in average.items()})

    trainer = GRTrainer(world.model(), world.collator(), recipe, tmp_path, evaluate, [Watch()])
    trainer.train()
    for shown, wanted in zip(seen, expected, strict=True):
        for name in wanted:
            torch.testing.assert_close(shown[name], wanted[name], atol=1e-6, rtol=0)
    assert _same(_weights(trainer.network), seen[1])


def test_an_average_leaves_the_training_weights_alone(world: World) -> None:
    model = world.model()
    average = WeightAverage(model, 0.5)
    own = _weights(model)
    with torch.no_grad():
        average.average[0].add_(1.0)
    with average.in_model():
        assert not _same(_weights(model), own)
    assert _same(_weights(model), own)
    with pytest.raises(ValueError, match=r"no weights for 'model\.embed_tokens\.weight'"):
        average.load({})


def test_validation_does_not_change_training(world: World, tmp_path: Path) -> None:
    losses = []
    for evaluate in (None, lambda _: {"score": float(torch.rand(()))}):
        folder = tmp_path / str(evaluate is None)
        trainer = GRTrainer(world.model(0.3), world.collator(), RECIPE, folder, evaluate)
        trainer.train()
        losses.append(trainer.step_losses)
    assert losses[0] == losses[1]


def test_a_run_that_dies_while_saving_resumes_from_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = resumable(tmp_path / "whole")
    whole.train()

    marked: list[int] = []
    real = mark_complete

    def dies(checkpoint: Path, step: int) -> None:
        marked.append(step)
        if len(marked) == 3:
            raise KeyboardInterrupt
        real(checkpoint, step)

    monkeypatch.setattr("gr.training.trainer.mark_complete", dies)
    with pytest.raises(KeyboardInterrupt):
        resumable(tmp_path / "cut").train()
    monkeypatch.undo()
    assert (tmp_path / "cut" / f"checkpoint-{marked[2]}" / "trainer_state.json").is_file()
    latest = latest_checkpoint(tmp_path / "cut")
    assert latest is not None and latest.name == f"checkpoint-{marked[1]}"
    resumed = resumable(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.step_losses == whole.step_losses
    assert _same(_weights(resumed.network), _weights(whole.network))


def test_a_resume_may_share_the_work_differently(world: World, tmp_path: Path) -> None:
    """Half a run in whole batches, the other half in parts: as with another number of processes."""
    recipe = replace(RECIPE, epochs=3)
    whole = GRTrainer(world.model(), world.collator(), recipe, tmp_path / "whole")
    whole.train()

    class Stop(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    cut = tmp_path / "cut"
    GRTrainer(world.model(), world.collator(), recipe, cut, callbacks=[Stop()]).train()
    parts = replace(recipe, batches=replace(recipe.batches, accumulation=3))
    resumed = GRTrainer(world.model(), world.collator(), parts, cut)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.step_losses == pytest.approx(whole.step_losses, abs=1e-5)


def test_a_checkpoint_of_another_run_is_refused(world: World, tmp_path: Path) -> None:
    GRTrainer(world.model(), world.collator(), RECIPE, tmp_path).train()
    longer = GRTrainer(world.model(), world.collator(), replace(RECIPE, epochs=5), tmp_path)
    with pytest.raises(ValueError, match="the data or the recipe has changed"):
        longer.train(resume_from_checkpoint=True)


def test_tensorboard_and_the_log_file(world: World, tmp_path: Path) -> None:
    import json

    recipe = replace(RECIPE, tensorboard=True)
    evaluate = _scores([0.1, 0.2], [])
    trainer = GRTrainer(world.model(), world.collator(), recipe, tmp_path, evaluate)
    trainer.train()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("eval/score")] == pytest.approx([0.1, 0.2])
    trainer.save_log(tmp_path / "log.json", dataset="tiny")
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["dataset"] == "tiny" and log["world_size"] == 1
    assert len(log["loss"]) == log["steps"] == trainer.sampler.num_steps
    assert log["validation"][1]["score"] == 0.2 and log["best_step"] == log["steps"]


def test_which_parameters_decay(world: World) -> None:
    model: GRForCausalLM = world.model(tie_word_embeddings=False)
    matrices = set(decay_names(model, ["matrices"]))
    assert matrices == {
        "lm_head.weight",
        "model.layers.0.uvqk_proj.weight",
        "model.layers.0.o_proj.weight",
    }
    assert decay_names(model, ["embeddings"]) == ["model.embed_tokens.weight"]
    assert "model.layers.0.o_proj.bias" in decay_names(model, ["vectors"])
    everything = decay_names(model, ["matrices", "embeddings", "vectors"])
    assert everything == [name for name, _ in model.named_parameters()]


def test_learning_rates() -> None:
    recipe = OptimizerRecipe(warmup_steps=4, final_ratio=0.1)
    rates = [learning_rate_factor(recipe, step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[4:]))
    linear = replace(recipe, schedule="linear")
    assert learning_rate_factor(linear, 4, 21) == 1.0
    assert learning_rate_factor(linear, 12, 21) == pytest.approx(0.55)
    assert learning_rate_factor(replace(recipe, schedule="constant"), 19, 20) == 1.0
