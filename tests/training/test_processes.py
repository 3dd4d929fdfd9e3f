"""What needs processes of its own: a kill, and two of them training together."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gr.data import read_table
from gr.inference import Recommender
from gr.training import BatchRecipe
from gr.training.checkpoints import latest_checkpoint
from gr.training.train import train
from tests.training.test_train import RECIPE, write_events
from tests.training.worker import resumable

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    """As in the worker: sums in another order would not be bit-equal."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_killed_run_ends_bit_equal_to_an_unbroken_one(tmp_path: Path) -> None:
    whole = resumable(tmp_path / "whole")
    whole.train()
    # Any step behind the first checkpoint will do; another one each time finds more than one.
    step = random.SystemRandom().randint(5, whole.sampler.num_steps - 1)
    cut = tmp_path / "cut"
    done = _launch("-m", "tests.training.worker", str(cut), str(step))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert latest_checkpoint(cut) is not None, f"killed at step {step}"
    resumed = resumable(cut)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.step_losses == whole.step_losses, f"killed at step {step}"
    assert [v["score"] for v in resumed.validations] == [v["score"] for v in whole.validations]
    for (name, a), (_, b) in zip(
        resumed.network.named_parameters(), whole.network.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), f"{name}, killed at step {step}"


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    """The command line under torchrun against the same run in this process, dropout 0."""
    batches = BatchRecipe(tokens=300, accumulation=2)
    recipe = replace(RECIPE, training=replace(RECIPE.training, batches=batches))
    events = write_events(tmp_path)
    recipe = replace(recipe, ids=replace(recipe.ids, embeddings=recipe.ids.embeddings[:1]))
    recipe.save(tmp_path / "recipe.json")
    one = train(read_table(events), recipe, tmp_path / "one")
    done = _launch(
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("-m", "gr.training.train", "--recipe", str(tmp_path / "recipe.json")),
        *("--data", str(events), "--output", str(tmp_path / "two")),
    )
    assert done.returncode == 0, done.stderr
    log = json.loads((tmp_path / "two" / "train_log.json").read_text())
    assert one.trainer.args.world_size == 1
    assert log["world_size"] == 2 and len(set(log["process_ids"])) == 2
    assert len(log["loss"]) == one.trainer.sampler.num_steps > 4
    assert log["loss"] == pytest.approx(one.trainer.step_losses, abs=1e-5)
    scores = [v["NDCG@10"] for v in one.trainer.validations]
    assert [v["NDCG@10"] for v in log["validation"]] == pytest.approx(scores, abs=1e-6)
    a, b = (Recommender.from_pretrained(tmp_path / n / "model").model for n in ("one", "two"))
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=0, msg=name)
