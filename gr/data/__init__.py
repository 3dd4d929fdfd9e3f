"""Interaction data: readers for the formats people have, one checked schema, sequences, splits.

    interactions = gr.data.load("ml-100k")
    interactions = actions_from_value(interactions, [("like", 4.0, None), ("dislike", None, 4.0)])
    split = leave_one_out(build_sequences(interactions))

Times are int64 unix seconds (or an order where a source knows no more). Bad input raises
`DataError`, or is repaired where `repair={…}` asks for it, and then counted in
`Interactions.repairs`.
"""

from gr.data.arrow_store import cache_folder
from gr.data.checks import REPAIRS
from gr.data.errors import DataError
from gr.data.readers import (
    read_kuairand,
    read_movielens,
    read_recbole,
    read_s3rec,
    read_table,
    read_user_items,
)
from gr.data.registry import DATASETS, GENERATED, load
from gr.data.schema import Event, Interactions
from gr.data.sequences import build_sequences, time_unit
from gr.data.split import Split, global_temporal, held_out_users, leave_one_out, split_hash
from gr.data.synthetic import SyntheticStream, synthetic_stream
from gr.data.transform import actions_from_value, k_core, min_events

__all__ = [
    "DATASETS",
    "GENERATED",
    "REPAIRS",
    "DataError",
    "Event",
    "Interactions",
    "Split",
    "SyntheticStream",
    "actions_from_value",
    "build_sequences",
    "cache_folder",
    "global_temporal",
    "held_out_users",
    "k_core",
    "leave_one_out",
    "load",
    "min_events",
    "read_kuairand",
    "read_movielens",
    "read_recbole",
    "read_s3rec",
    "read_table",
    "read_user_items",
    "split_hash",
    "synthetic_stream",
    "time_unit",
]
