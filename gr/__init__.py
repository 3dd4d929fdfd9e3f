"""gr: a generative recommender that is a Hugging Face decoder over semantic IDs and actions.

Importing this package makes ``AutoConfig``, ``AutoModel``, ``AutoModelForCausalLM`` and
``AutoTokenizer`` know its model and tokenizer.
"""

from gr.data import Event, Interactions, load
from gr.inference import (
    BeamOptions,
    CatalogSubset,
    Recommender,
    Scored,
    Session,
    TextTrieLogitsProcessor,
    TrieLogitsProcessor,
    UserStateStore,
)
from gr.model import GRConfig, GRForCausalLM, GRModel
from gr.model import register as _register_model
from gr.tokenizer import Catalog, ItemTrie, ResidualKMeans, SemanticIdTokenizer
from gr.tokenizer import register as _register_tokenizer

__version__ = "0.1.0"

__all__ = [
    "BeamOptions",
    "Catalog",
    "CatalogSubset",
    "Event",
    "GRConfig",
    "GRForCausalLM",
    "GRModel",
    "Interactions",
    "ItemTrie",
    "Recommender",
    "ResidualKMeans",
    "Scored",
    "SemanticIdTokenizer",
    "Session",
    "TextTrieLogitsProcessor",
    "TrieLogitsProcessor",
    "UserStateStore",
    "load",
]

_register_model()
_register_tokenizer(GRConfig)
