"""Answers from a model: retrieval, ranking and both. Read ``branches.py`` first."""

from gr.inference.beam_options import BeamOptions
from gr.inference.branches import Backbone, Branches, Prefix, prefill
from gr.inference.constraint import ItemSubset, RowFilter, build_filter
from gr.inference.exhaustive import CatalogPlan, catalog_log_probs
from gr.inference.histories import Report
from gr.inference.logits_processor import TrieLogitsProcessor
from gr.inference.outside_spans import OutsideSpans
from gr.inference.rank import action_log_probs
from gr.inference.recommender import Recommender
from gr.inference.retrieve import beam_search, default_num_beams, retrieve
from gr.inference.scored import Scored
from gr.inference.session import Session
from gr.inference.subsets import CatalogSubset
from gr.inference.text_logits_processor import TextTrieLogitsProcessor
from gr.inference.user_states import UserStateStore

__all__ = [
    "Backbone",
    "BeamOptions",
    "Branches",
    "CatalogPlan",
    "CatalogSubset",
    "ItemSubset",
    "OutsideSpans",
    "Prefix",
    "Recommender",
    "Report",
    "RowFilter",
    "Scored",
    "Session",
    "TextTrieLogitsProcessor",
    "TrieLogitsProcessor",
    "UserStateStore",
    "action_log_probs",
    "beam_search",
    "build_filter",
    "catalog_log_probs",
    "default_num_beams",
    "prefill",
    "retrieve",
]
