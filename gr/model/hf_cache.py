"""The one place that knows what transformers calls a key/value cache.

Up to transformers 5.17 a decoder's forward takes ``past_key_values`` and returns it under that
name; from 5.24 on the name is ``cache``.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

# The name this version's own outputs and `generate` use.
CACHE_NAME = (
    "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
)


def new_cache() -> DynamicCache:
    """An empty cache that grows a layer the first time that layer writes to it."""
    return DynamicCache()


def cache_kwargs(module: nn.Module, cache: DynamicCache) -> dict[str, Any]:
    """The keyword argument under which ``module.forward`` takes a cache.

    Raises:
        TypeError: the module's forward takes no cache.
    """
    parameters = inspect.signature(module.forward).parameters
    for name in (CACHE_NAME, "cache", "past_key_values"):
        if name in parameters:
            return {name: cache}
    raise TypeError(
        f"{type(module).__name__}.forward takes neither 'cache' nor 'past_key_values'; wanted a "
        "decoder with a key/value cache"
    )


def output_cache(output: ModelOutput) -> DynamicCache:
    """The cache a decoder returned, under either name."""
    for name in (CACHE_NAME, "cache", "past_key_values"):
        if name in output:
            cache: DynamicCache = output[name]
            return cache
    raise KeyError(f"no cache in the output, which has {list(output.keys())}")


def cache_length(cache: DynamicCache) -> int:
    """Tokens held, cached padding included."""
    return int(cache.get_seq_length())


def layer_tensors(cache: DynamicCache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, each [B, heads, length, head_dim]."""
    held = cache.layers[layer]
    assert isinstance(held, DynamicLayer) and held.keys is not None and held.values is not None
    return held.keys, held.values
