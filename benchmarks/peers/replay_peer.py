"""RePlay's SasRec; runs in the peers' environment.

    python -m peers.replay_peer FOLDER replay-sasrec-sampled

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
from lightning import Trainer, seed_everything  # type: ignore[import-not-found]
from lightning.pytorch.callbacks import LambdaCallback  # type: ignore[import-not-found]
from replay.data import FeatureHint, FeatureSource, FeatureType  # type: ignore[import-not-found]
from replay.data.nn import (  # type: ignore[import-not-found]
    PandasSequentialDataset,
    TensorFeatureInfo,
    TensorFeatureSource,
    TensorSchema,
)
from replay.models.nn.optimizer_utils import (  # type: ignore[import-not-found]
    FatOptimizerFactory,
)
from replay.models.nn.sequential import SasRec  # type: ignore[import-not-found]
from replay.models.nn.sequential.sasrec import (  # type: ignore[import-not-found]
    SasRecPredictionDataset,
    SasRecTrainingDataset,
)
from torch.utils.data import DataLoader

from peers.exchange import (
    Settings,
    best_unseen,
    give_back,
    load_events,
    load_settings,
    targets_of_last,
)
from peers.watch import Watch


def schema(settings: Settings) -> Any:
    """One feature: the items; the number after the last is padding."""
    return TensorSchema(
        [
            TensorFeatureInfo(
                name="item",
                feature_type=FeatureType.CATEGORICAL,
                is_seq=True,
                feature_hint=FeatureHint.ITEM_ID,
                feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item")],
                cardinality=settings.items,
                padding_value=settings.items,
                embedding_dim=settings.width,
            )
        ]
    )


def sequences(events: pd.DataFrame, settings: Settings) -> Any:
    """One row a user, events oldest first, as RePlay reads them."""
    rows = events.groupby("user")["item"].agg(list).reset_index()
    return PandasSequentialDataset(schema(settings), "user", "item", rows)


def fit(run: str, events: pd.DataFrame, settings: Settings, watch: Watch) -> Any:
    """The trained model of a run, which reports its epochs to ``watch``."""

    def end_epoch(trainer: Any, _: Any) -> None:
        watch.epoch()
        trainer.should_stop = watch.is_over(settings.minutes)

    model = SasRec(
        schema(settings),
        block_count=settings.layers,
        head_count=settings.heads,
        hidden_size=settings.width,
        max_seq_len=settings.length,
        dropout_rate=settings.dropout,
        loss_type="CE",
        loss_sample_count=settings.negatives if run.endswith("-sampled") else None,
        optimizer_factory=FatOptimizerFactory(
            learning_rate=settings.learning_rate, betas=settings.betas
        ),
    )
    windows = SasRecTrainingDataset(sequences(events, settings), settings.length)
    trainer = Trainer(
        max_epochs=settings.epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[LambdaCallback(on_train_epoch_end=end_epoch)],
    )
    trainer.fit(model, DataLoader(windows, settings.batch, shuffle=True))
    return model


def main() -> None:
    folder, run = Path(sys.argv[1]), sys.argv[2]
    settings = load_settings(folder)
    torch.set_num_threads(settings.threads)
    seed_everything(settings.seed, verbose=False)
    train, history = load_events(folder, "train"), load_events(folder, "history")
    watch = Watch()
    watch.begin()
    model = fit(run, train, settings, watch)
    watch.end()
    model.eval()
    asked = SasRecPredictionDataset(sequences(history, settings), settings.length)
    scores = np.zeros((settings.users, settings.items), dtype=np.float32)
    with torch.no_grad():
        for batch in DataLoader(asked, settings.batch):
            scores[batch.query_id[:, 0].numpy()] = model.predict(batch).numpy()
    report = {
        **watch.report(),
        "targets": targets_of_last(train, settings.length),
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("replay-rec", "torch", "lightning")},
    }
    give_back(folder, run, best_unseen(scores, history), report)


if __name__ == "__main__":
    main()
