"""Answers from a model: retrieval, ranking and both. Read ``branches.py`` first."""

from gr.inference.branches import Backbone, Branches, Prefix, prefill
from gr.inference.constraint import RowFilter, build_filter
from gr.inference.exhaustive import CatalogPlan, catalog_log_probs
from gr.inference.histories import Report
from gr.inference.logits_processor import TrieLogitsProcessor
from gr.inference.rank import action_log_probs
from gr.inference.recommender import Recommender
from gr.inference.retrieve import beam_search, default_num_beams, retrieve
from gr.inference.scored import Scored

__all__ = [
    "Backbone",
    "Branches",
    "CatalogPlan",
    "Prefix",
    "Recommender",
    "Report",
    "RowFilter",
    "Scored",
    "TrieLogitsProcessor",
    "action_log_probs",
    "beam_search",
    "build_filter",
    "catalog_log_probs",
    "default_num_beams",
    "prefill",
    "retrieve",
]
