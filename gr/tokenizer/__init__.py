"""From item embeddings to semantic IDs and the tokenizer that speaks them."""

from gr.tokenizer.build import ItemTable, append_items, build_catalog
from gr.tokenizer.catalog import Catalog
from gr.tokenizer.embeddings import (
    array_embeddings,
    cooccurrence_embeddings,
    join_embeddings,
    text_embeddings,
)
from gr.tokenizer.quantizers import (
    AtomicQuantizer,
    LSHQuantizer,
    Quantizer,
    QuantizerWarning,
    ResidualKMeans,
    ShuffledQuantizer,
)
from gr.tokenizer.report import QualityReport, catalog_report, quality_report
from gr.tokenizer.semantic_id_tokenizer import EncodedHistory, SemanticIdTokenizer, register
from gr.tokenizer.stream import StreamEncoder, TokenStreams, catalog_tokens
from gr.tokenizer.trie import ItemTrie
from gr.tokenizer.vocabulary import SidVocabulary

__all__ = [
    "AtomicQuantizer",
    "Catalog",
    "EncodedHistory",
    "ItemTable",
    "ItemTrie",
    "LSHQuantizer",
    "QualityReport",
    "Quantizer",
    "QuantizerWarning",
    "ResidualKMeans",
    "SemanticIdTokenizer",
    "ShuffledQuantizer",
    "SidVocabulary",
    "StreamEncoder",
    "TokenStreams",
    "append_items",
    "array_embeddings",
    "build_catalog",
    "catalog_report",
    "catalog_tokens",
    "cooccurrence_embeddings",
    "join_embeddings",
    "quality_report",
    "register",
    "text_embeddings",
]
