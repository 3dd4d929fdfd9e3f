"""Evaluation: metrics on the whole catalogue, baselines, intervals, and the report of a run.

rows = EvaluationSet.from_rows(split.test, catalog)
result = evaluate_retrieval(RecencyKNN().fit(train_histories, len(catalog)), rows)
write_report("runs/demo", build_metrics(..., {"recency-knn": result}))
"""

from gr.eval.baselines import ItemKNN, Popularity, RecencyKNN
from gr.eval.bootstrap import Bootstrap, mean_intervals, ranking_intervals
from gr.eval.metrics import (
    Coverage,
    GroupedAUC,
    TiedRanks,
    auc,
    coverage,
    gauc,
    hit_rate,
    normalized_entropy,
    ranking_metrics,
    tied_ranks,
)
from gr.eval.protocol import (
    RankingResult,
    RetrievalProtocol,
    RetrievalResult,
    evaluate_ranking,
    evaluate_retrieval,
    paired_difference,
)
from gr.eval.recommender import (
    evaluate_actions,
    evaluate_recommender,
    histories_of,
    one_request,
)
from gr.eval.report import (
    ExampleUser,
    Recommendation,
    ReportContent,
    build_metrics,
    checked_metrics,
    write_report,
)
from gr.eval.rows import EvaluationBatch, EvaluationSet

__all__ = [
    "Bootstrap",
    "Coverage",
    "EvaluationBatch",
    "EvaluationSet",
    "ExampleUser",
    "GroupedAUC",
    "ItemKNN",
    "Popularity",
    "RankingResult",
    "RecencyKNN",
    "Recommendation",
    "ReportContent",
    "RetrievalProtocol",
    "RetrievalResult",
    "TiedRanks",
    "auc",
    "build_metrics",
    "checked_metrics",
    "coverage",
    "evaluate_actions",
    "evaluate_ranking",
    "evaluate_recommender",
    "evaluate_retrieval",
    "gauc",
    "histories_of",
    "hit_rate",
    "mean_intervals",
    "normalized_entropy",
    "one_request",
    "paired_difference",
    "ranking_intervals",
    "ranking_metrics",
    "tied_ranks",
    "write_report",
]
