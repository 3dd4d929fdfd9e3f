"""A served recommender under the protocols: whole-catalogue retrieval, and action probabilities.

Every row is asked at the time of its target, which a service knows as the time of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gr.data import Event
from gr.eval.protocol import RankingResult, RetrievalProtocol, RetrievalResult
from gr.eval.protocol import evaluate_ranking as evaluate_probabilities
from gr.eval.protocol import evaluate_retrieval as evaluate_scores
from gr.eval.rows import EvaluationBatch, EvaluationSet

if TYPE_CHECKING:
    from datasets import Dataset

    from gr.inference import Recommender


def histories_of(
    batch: EvaluationBatch, actions: Sequence[str], has_clock: bool
) -> list[list[Event]]:
    """The histories of a batch as events.

    Args:
        actions: actions the model has words for; any other is passed on as unknown.
        has_clock: False where the data's times are an order, which no model may read as seconds.
    """
    if batch.item_ids is None:
        raise ValueError("the batch has no item ids: build the rows with EvaluationSet.from_rows")
    known = set(actions)
    histories = []
    for at, items in enumerate(batch.item_ids):
        blank: list[Any] = [None] * len(items)
        names = blank if batch.actions is None else batch.actions[at]
        times = blank if batch.timestamps is None or not has_clock else batch.timestamps[at]
        histories.append(
            [
                Event(item, name if name in known else None, time)
                for item, name, time in zip(items, names, times, strict=True)
            ]
        )
    return histories


def evaluate_recommender(
    recommender: Recommender,
    rows: Any,
    has_clock: bool = True,
    protocol: RetrievalProtocol | None = None,
    num_beams: int | None = None,
    bare: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> RetrievalResult:
    """Retrieval quality on split rows, by exact scores of every item, or by beams as served.

    Args:
        rows: validation or test part of a split.
        num_beams: None scores the whole catalogue; a number retrieves with that many beams.
        bare: ask with item ids alone, without actions and times.

    Raises:
        ValueError: beams under a protocol that excludes seen items but keeps a seen target: a
            served list never shows it.
    """
    protocol = protocol or RetrievalProtocol()
    if num_beams is not None and protocol.exclude_seen and protocol.seen_target == "keep":
        raise ValueError(
            f"num_beams is {num_beams} with seen_target='keep': served lists leave out all seen "
            "items, wanted num_beams=None (exact scores) or exclude_seen=False"
        )
    actions = recommender.vocabulary.actions

    def answer(batch: EvaluationBatch) -> Tensor | list[Any]:
        histories: list[Any] = histories_of(batch, actions, has_clock)
        times = batch.request_times if has_clock else None
        if bare:
            histories = [[event.item_id for event in history] for history in histories]
            times = None
        if num_beams is None:
            return recommender.score_catalog(histories, times)
        depth = max(*protocol.ks, protocol.curve_k)
        return recommender.retrieve(
            histories,
            min(depth, num_beams),
            num_beams,
            exclude_seen=protocol.exclude_seen,
            request_times=times,
        )

    evaluated = EvaluationSet.from_rows(rows, recommender.catalog)
    return evaluate_scores(answer, evaluated, protocol, progress=progress)


def one_request(validation: Dataset, test: Dataset) -> Dataset:
    """Both held-out events of every leave-one-out user as candidates of one request.

    The request is made at the time of the validation event, with the history before it. Asked one
    after the other, the second would know how the first went; and since a user counts in GAUC only
    where the two went differently, that knowledge points the wrong way.

    Raises:
        ValueError: the two parts are not about the same users in the same order.
    """
    from datasets import concatenate_datasets

    if validation["user_id"][:] != test["user_id"][:]:
        raise ValueError("validation and test are of other users: wanted the parts of one split")
    known = validation.remove_columns(["target_item_id", "target_action"])
    later = concatenate_datasets(
        [known, test.select_columns(["target_item_id", "target_action"])], axis=1
    )
    return concatenate_datasets([validation, later.select_columns(validation.column_names)])


def evaluate_actions(
    recommender: Recommender, rows: Any, action: str = "like", has_clock: bool = True
) -> RankingResult:
    """AUC, GAUC and NE of p(action) for the target item of each row.

    The label is whether the target's own action was ``action``. Targets that the catalogue does
    not know have no probability and are left out; the counts say how many events remain.

    Args:
        rows: as in `EvaluationSet.from_rows`, with ``target_action``.

    Raises:
        ValueError: rows without ``target_action``, the model has no such action, or only one label
            occurs.
    """
    evaluated = EvaluationSet.from_rows(rows, recommender.catalog)
    vocabulary = recommender.vocabulary.actions
    assert evaluated.source is not None
    scores: list[float] = []
    happened: list[bool] = []
    for start, batch in evaluated.batches(256):
        part = evaluated.source[slice(start, start + len(batch))]
        if "target_action" not in part:
            raise ValueError(f"evaluation rows need the column 'target_action', got {sorted(part)}")
        targets = [str(item) for item in part["target_item_id"]]
        happened += [name == action for name in part["target_action"]]
        answers = recommender.rank(
            histories_of(batch, vocabulary, has_clock),
            [[target] for target in targets],
            action,
            batch.request_times if has_clock else None,
        )
        scores += [answer[0].score if answer else float("nan") for answer in answers]
    probability: npt.NDArray[np.float64] = np.array(scores)
    label = np.array(happened)
    known = evaluated.targets >= 0
    return evaluate_probabilities(
        probability[known], label[known], evaluated.user_ids[known].tolist()
    )
