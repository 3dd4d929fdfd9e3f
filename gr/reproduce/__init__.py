"""Published numbers, run again: studies, their results, and the table of all of them.

    study -> one training run per variant -> evaluation -> results as JSON -> docs/results.md

A study is one small JSON file in ``recipes/``; ``gr reproduce NAME`` runs it.
"""

from gr.reproduce.results import load_results, results_page
from gr.reproduce.run import reproduce
from gr.reproduce.study import Published, Study, find_study, study_names

__all__ = [
    "Published",
    "Study",
    "find_study",
    "load_results",
    "reproduce",
    "results_page",
    "study_names",
]
