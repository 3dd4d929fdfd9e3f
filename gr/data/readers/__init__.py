"""One reader per file format; each returns checked `gr.data.Interactions`."""

from gr.data.readers.kuairand import read_kuairand
from gr.data.readers.movielens import read_movielens
from gr.data.readers.recbole import read_recbole
from gr.data.readers.s3rec import read_s3rec
from gr.data.readers.table import read_table
from gr.data.readers.user_items import read_user_items

__all__ = [
    "read_kuairand",
    "read_movielens",
    "read_recbole",
    "read_s3rec",
    "read_table",
    "read_user_items",
]
