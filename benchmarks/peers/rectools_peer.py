"""RecTools' HSTUModel or SASRecModel; runs in the peers' environment.

    python -m peers.rectools_peer FOLDER rectools-hstu-sampled

Its own defaults remain wherever ``Settings`` says nothing.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

# Installed in the peers' environment only, as their lines below.
from pytorch_lightning import Trainer, seed_everything  # type: ignore[import-not-found]
from pytorch_lightning.callbacks import LambdaCallback  # type: ignore[import-not-found]
from rectools import Columns  # type: ignore[import-not-found]
from rectools.dataset import Dataset  # type: ignore[import-not-found]
from rectools.models import HSTUModel, SASRecModel  # type: ignore[import-not-found]

from peers.exchange import (
    LISTED,
    Settings,
    give_back,
    load_events,
    load_settings,
    targets_of_last,
)
from peers.watch import Watch


def dataset(events: pd.DataFrame) -> Any:
    """Events as RecTools reads them; an order becomes that many seconds."""
    columns = {
        Columns.User: events["user"],
        Columns.Item: events["item"],
        Columns.Weight: 1.0,
        Columns.Datetime: pd.to_datetime(events["time"], unit="s"),
    }
    return Dataset.construct(pd.DataFrame(columns))


def build(run: str, settings: Settings, watch: Watch) -> Any:
    """The model of a run, which reports its epochs to ``watch``."""

    def end_epoch(trainer: Any, _: Any) -> None:
        watch.epoch()
        trainer.should_stop = watch.is_over(settings.minutes)

    def trainer() -> Any:
        return Trainer(
            max_epochs=settings.epochs,
            min_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[LambdaCallback(on_train_epoch_end=end_epoch)],
        )

    loss = "sampled_softmax" if run.endswith("-sampled") else "softmax"
    options: dict[str, Any] = {
        "n_blocks": settings.layers,
        "n_heads": settings.heads,
        "n_factors": settings.width,
        "dropout_rate": settings.dropout,
        "session_max_len": settings.length,
        "loss": loss,
        "n_negatives": settings.negatives,
        "lr": settings.learning_rate,
        "batch_size": settings.batch,
        "epochs": settings.epochs,
        "get_trainer_func": trainer,
        "recommend_torch_device": "cpu",
    }
    if "-hstu-" in run:
        # Cosines without a temperature hardly train: its default is 1.
        options["lightning_module_kwargs"] = {"logits_t": settings.temperature}
        return HSTUModel(relative_time_attention=settings.has_clock, **options)
    return SASRecModel(**options)


def main() -> None:
    folder, run = Path(sys.argv[1]), sys.argv[2]
    settings = load_settings(folder)
    torch.set_num_threads(settings.threads)
    seed_everything(settings.seed, verbose=False)
    train, history = load_events(folder, "train"), load_events(folder, "history")
    requests = load_events(folder, "requests")
    watch = Watch()
    model = build(run, settings, watch)
    watch.begin()
    model.fit(dataset(train))
    watch.end()
    context = None
    if model.require_recommend_context:
        times = pd.to_datetime(requests["time"], unit="s")
        context = pd.DataFrame(
            {Columns.User: requests["user"], Columns.Datetime: times, Columns.Weight: 1.0}
        )
    shown = model.recommend(
        users=requests["user"].to_numpy(),
        dataset=dataset(history),
        k=LISTED,
        filter_viewed=True,
        context=context,
    )
    lists = np.full((len(requests), LISTED), -1, dtype=np.int64)
    rows = pd.Index(requests["user"]).get_indexer(shown[Columns.User])
    lists[rows, shown[Columns.Rank].to_numpy() - 1] = shown[Columns.Item].to_numpy()
    report = {
        **watch.report(),
        "targets": targets_of_last(train, settings.length),
        "parameters": sum(p.numel() for p in model.torch_model.parameters()),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("RecTools", "torch", "pytorch-lightning")},
    }
    give_back(folder, run, lists, report)


if __name__ == "__main__":
    main()
