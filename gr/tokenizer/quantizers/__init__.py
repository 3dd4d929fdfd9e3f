"""Quantizers: item embeddings to codes."""

from gr.tokenizer.quantizers.atomic import AtomicQuantizer
from gr.tokenizer.quantizers.base import Quantizer, QuantizerWarning
from gr.tokenizer.quantizers.lsh import LSHQuantizer
from gr.tokenizer.quantizers.residual_kmeans import ResidualKMeans
from gr.tokenizer.quantizers.shuffled import ShuffledQuantizer

__all__ = [
    "AtomicQuantizer",
    "LSHQuantizer",
    "Quantizer",
    "QuantizerWarning",
    "ResidualKMeans",
    "ShuffledQuantizer",
]
