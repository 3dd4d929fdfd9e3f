"""A served recommender under the protocols, against plain forward passes of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import datasets
import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.metrics import roc_auc_score

from gr.data import Event
from gr.eval import (
    EvaluationBatch,
    RankingResult,
    RetrievalProtocol,
    auc,
    evaluate_actions,
    evaluate_ranking,
    evaluate_recommender,
    histories_of,
    one_request,
)
from gr.inference import Recommender
from gr.model import GRConfig, GRForCausalLM
from gr.tokenizer import Catalog, SemanticIdTokenizer

ACTIONS = ("like", "dislike", "skip")
ITEMS = 24
T0 = 10**9


@pytest.fixture(scope="module")
def recommender() -> Recommender:
    """24 items of two levels, each with an ID of its own; HSTU, which reads times."""
    number = np.arange(ITEMS)
    codes = np.stack([number % 4, number // 4], axis=1).astype(np.int32)
    catalog = Catalog([f"i{n}" for n in number], codes, {"item": (4, 6)})
    tokenizer = SemanticIdTokenizer.from_catalog(catalog, ACTIONS)
    torch.manual_seed(0)
    config = GRConfig(
        vocab_size=tokenizer.vocabulary.size,
        vocabulary=tokenizer.vocabulary.to_dict(),
        hidden_size=16,
        num_attention_heads=2,
        layer_types=["hstu", "hstu"],
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    return Recommender(GRForCausalLM(config).eval(), tokenizer, batch_size=3)


def make_rows(seed: int = 1) -> list[dict[str, Any]]:
    """Ten rows of six users: histories of 0 to 8 events, with a repeat and unknown items."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for row in range(10):
        count = row % 9
        items = [f"i{n}" for n in rng.choice(ITEMS, count + 1, replace=False)]
        rows.append(
            {
                "user_id": f"u{row % 6}",
                "item_id": items[:-1],
                "action": [ACTIONS[n] for n in rng.integers(0, 3, count)],
                "timestamp": (T0 + np.sort(rng.integers(0, 10**6, count))).tolist(),
                "target_item_id": items[-1],
                "target_action": ACTIONS[row % 3],
                "target_timestamp": T0 + 2 * 10**6 + row,
            }
        )
    rows[4]["target_item_id"] = rows[4]["item_id"][0]  # seen before
    rows[5]["item_id"][2] = "nobody knows"
    rows[7]["target_item_id"] = "nobody knows"
    return rows


@dataclass
class Plain:
    """Scores of one row from whole forward passes: no cache, no batch, no constraint."""

    recommender: Recommender

    def item_tokens(self, item: str) -> list[int]:
        vocabulary, catalog = self.recommender.vocabulary, self.recommender.catalog
        codes = catalog.codes[catalog.item_ids.index(item)].tolist()
        return [vocabulary.level_start("item", at) + code for at, code in enumerate(codes)]

    def logits(self, row: dict[str, Any], item: str, clock: bool) -> torch.Tensor:
        """float32 [M + 1, V]: before each token of the item, and after it."""
        vocabulary = self.recommender.vocabulary
        events = zip(row["item_id"], row["action"], row["timestamp"], strict=True)
        known = [e for e in events if e[0] in self.recommender.catalog]
        ids = [vocabulary.special_token("[BOS]")]
        times = [known[0][2] if known else row["target_timestamp"]]
        for seen, action, time in known:
            tokens = [*self.item_tokens(seen), vocabulary.action_token(action)]
            ids += tokens
            times += [time] * len(tokens)
        tokens = self.item_tokens(item)
        begin = len(ids) - 1
        ids, times = ids + tokens, times + [row["target_timestamp"]] * len(tokens)
        asked = torch.tensor([row["target_timestamp"]])
        stamps = torch.tensor([times])
        if not clock:  # all at once
            asked, stamps = torch.zeros_like(asked), torch.zeros_like(stamps)
        with torch.no_grad():
            out = self.recommender.model(
                input_ids=torch.tensor([ids]), timestamps=stamps, request_times=asked
            )
        return cast(torch.Tensor, out.logits[0, begin:].float())

    def scores(self, row: dict[str, Any], clock: bool) -> npt.NDArray[np.float64]:
        """log p(item | history) of every item."""
        found = []
        for item in self.recommender.catalog.item_ids:
            tokens = torch.tensor(self.item_tokens(item))
            steps = self.logits(row, item, clock).log_softmax(-1)[:-1]
            found.append(float(steps.gather(1, tokens[:, None]).sum()))
        return np.array(found)

    def probability(self, row: dict[str, Any], action: str, clock: bool) -> float:
        """p(action | history, target item) among the actions."""
        last = self.logits(row, row["target_item_id"], clock)[-1]
        actions = [self.recommender.vocabulary.action_token(name) for name in ACTIONS]
        return float(last[actions].softmax(-1)[ACTIONS.index(action)])


def rank_by_hand(scores: npt.NDArray[np.float64], row: dict[str, Any]) -> int | None:
    """Place of the target among unseen items, from 1; None where it is not among them."""
    unseen = [n for n in range(ITEMS) if f"i{n}" not in row["item_id"]]
    order = sorted(unseen, key=lambda n: -scores[n])
    names = [f"i{n}" for n in order]
    return names.index(row["target_item_id"]) + 1 if row["target_item_id"] in names else None


@pytest.mark.parametrize("clock", [True, False])
def test_exact_scores_rank_as_plain_forwards_do(recommender: Recommender, clock: bool) -> None:
    rows = make_rows()
    plain = Plain(recommender)
    with pytest.warns(UserWarning, match="nobody knows"):
        result = evaluate_recommender(recommender, rows, has_clock=clock)
    ranks = [rank_by_hand(plain.scores(row, clock), row) for row in rows]
    assert ranks[4] is None and ranks[7] is None and sum(r is not None for r in ranks) == 8
    for k in (1, 5, 10):
        hits = [float(r is not None and r <= k) for r in ranks]
        gains = [1 / np.log2(1 + r) if r is not None and r <= k else 0.0 for r in ranks]
        assert result.per_row[f"HR@{k}"].tolist() == hits
        assert result.per_row[f"NDCG@{k}"] == pytest.approx(gains)
    assert result.counts["unknown_targets"] == 1
    assert result.counts["seen_targets"] == 1
    assert result.counts["unknown_history"] == 1
    assert result.counts["users"] == 6


def test_the_clock_matters_to_this_model(recommender: Recommender) -> None:
    """Or the tests of ``has_clock`` could not fail."""
    row = make_rows()[6]
    plain = Plain(recommender)
    assert np.abs(plain.scores(row, True) - plain.scores(row, False)).max() > 1e-3


def test_beams_that_hold_everything_give_the_same_numbers(recommender: Recommender) -> None:
    rows = datasets.Dataset.from_list(make_rows())
    with pytest.warns(UserWarning, match="nobody knows"):
        exact = evaluate_recommender(recommender, rows)
        served = evaluate_recommender(recommender, rows, num_beams=50)
    for name, values in exact.per_row.items():
        assert served.per_row[name].tolist() == pytest.approx(values.tolist()), name
    assert served.counts["seen_removed"] == 0
    with pytest.warns(UserWarning, match="nobody knows"):
        narrow = evaluate_recommender(recommender, rows, num_beams=2)
    assert narrow.per_row["HR@10"].sum() < exact.per_row["HR@10"].sum()


def test_beams_cannot_show_a_seen_target(recommender: Recommender) -> None:
    keep = RetrievalProtocol(seen_target="keep")
    with pytest.raises(ValueError, match="num_beams is 50 with seen_target='keep'"):
        evaluate_recommender(recommender, make_rows(), protocol=keep, num_beams=50)
    everything = RetrievalProtocol(exclude_seen=False)
    with pytest.warns(UserWarning, match="nobody knows"):
        exact = evaluate_recommender(recommender, make_rows(), protocol=everything)
        served = evaluate_recommender(recommender, make_rows(), protocol=everything, num_beams=50)
    assert served.metrics["MRR@50"] == pytest.approx(exact.metrics["MRR@50"])
    assert served.per_row["HR@50"][4] == 1


def test_without_a_clock_no_time_is_passed(
    recommender: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, Any]] = []

    def spy(histories: Any, times: Any = None, *rest: Any) -> torch.Tensor:
        asked.append((histories, times))
        return torch.zeros(len(histories), ITEMS)

    monkeypatch.setattr(recommender, "score_catalog", spy)
    rows = make_rows()
    for clock in (False, True):
        evaluate_recommender(recommender, rows, has_clock=clock)
    (blank, no_times), (timed, times) = asked
    assert no_times is None
    assert all(event.timestamp is None for history in blank for event in history)
    assert times == [row["target_timestamp"] for row in rows]
    assert [[e.timestamp for e in history] for history in timed] == [r["timestamp"] for r in rows]
    assert [[e.item_id for e in history] for history in timed] == [r["item_id"] for r in rows]


@pytest.mark.parametrize("clock", [True, False])
@pytest.mark.parametrize("as_list", [True, False])
def test_action_probabilities_are_those_of_plain_forwards(
    recommender: Recommender, monkeypatch: pytest.MonkeyPatch, clock: bool, as_list: bool
) -> None:
    given: list[npt.NDArray[np.float64]] = []

    def spy(probability: Any, label: Any, users: Any) -> RankingResult:
        given.append(np.asarray(probability))
        return evaluate_ranking(probability, label, users)

    monkeypatch.setattr("gr.eval.recommender.evaluate_probabilities", spy)
    # Two targets a user, with both labels, or GAUC does not exist.
    rows = make_rows() + make_rows(seed=2)
    for row in rows[10:]:
        row["target_action"] = "dislike"
    known = [row for row in rows if row["target_item_id"] != "nobody knows"]
    assert len(known) == 18
    with pytest.warns(UserWarning, match="nobody knows"):
        result = evaluate_actions(
            recommender, rows if as_list else datasets.Dataset.from_list(rows), "like", clock
        )
    plain = Plain(recommender)
    wanted = [plain.probability(row, "like", clock) for row in known]
    label = [row["target_action"] == "like" for row in known]
    assert given[0] == pytest.approx(wanted, abs=1e-5)
    assert result.metrics["AUC"] == pytest.approx(roc_auc_score(label, wanted))
    assert result.metrics["AUC"] == pytest.approx(auc(wanted, label))
    assert result.counts["events"] == 18
    assert result.counts["positives"] == sum(label)


def test_action_rows_without_the_action_are_refused(recommender: Recommender) -> None:
    rows = [{k: v for k, v in row.items() if k != "target_action"} for row in make_rows()]
    with pytest.raises(ValueError, match="need the column 'target_action', got"):
        evaluate_actions(recommender, rows)


def test_histories_of_a_batch() -> None:
    batch = EvaluationBatch(
        ["u"], [np.array([0, 1])], [["i0", "i1"]], [["like", "share"]], [[5, 7]], [9]
    )
    assert histories_of(batch, ("like",), True) == [[Event("i0", "like", 5), Event("i1", None, 7)]]
    assert histories_of(batch, ("like",), False) == [[Event("i0", "like"), Event("i1")]]
    bare = EvaluationBatch(["u"], [np.array([0])], [["i0"]])
    assert histories_of(bare, ("like",), True) == [[Event("i0")]]
    with pytest.raises(ValueError, match=r"build the rows with EvaluationSet\.from_rows"):
        histories_of(EvaluationBatch(["u"], [np.array([0])]), (), True)


def test_one_request_asks_about_both_events_with_the_history_before_them() -> None:
    shared = {"user_id": ["a", "b"], "timestamp": [[1], [2]]}
    validation = datasets.Dataset.from_dict(
        shared
        | {
            "item_id": [["i1"], ["i2"]],
            "action": [["like"], ["skip"]],
            "target_item_id": ["i3", "i4"],
            "target_action": ["like", "skip"],
            "target_timestamp": [5, 6],
        }
    )
    test = datasets.Dataset.from_dict(
        shared
        | {
            "item_id": [["i1", "i3"], ["i2", "i4"]],
            "action": [["like", "like"], ["skip", "skip"]],
            "target_item_id": ["i5", "i6"],
            "target_action": ["skip", "like"],
            "target_timestamp": [7, 8],
        }
    )
    rows = one_request(validation, test)
    assert rows["user_id"][:] == ["a", "b", "a", "b"]
    assert rows["item_id"][:] == [["i1"], ["i2"], ["i1"], ["i2"]]
    assert rows["target_item_id"][:] == ["i3", "i4", "i5", "i6"]
    assert rows["target_action"][:] == ["like", "skip", "skip", "like"]
    assert rows["target_timestamp"][:] == [5, 6, 5, 6]
    with pytest.raises(ValueError, match="other users"):
        one_request(validation, test.select([1, 0]))


def test_bare_histories_are_asked_by_their_item_ids_alone(recommender: Recommender) -> None:
    rows = make_rows()
    asked: list[Any] = []

    class Listener:
        vocabulary, catalog = recommender.vocabulary, recommender.catalog

        def score_catalog(self, histories: list[Any], times: Any) -> torch.Tensor:
            asked.append((histories, times))
            return recommender.score_catalog(histories, times)

    evaluate_recommender(cast(Recommender, Listener()), rows, bare=True)
    (histories, times) = asked[0]
    assert times is None
    assert histories == [row["item_id"] for row in rows]
