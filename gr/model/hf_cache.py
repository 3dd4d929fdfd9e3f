"""The one place that knows what transformers calls a key/value cache, and how ours grow.

Up to transformers 5.17 a decoder's forward takes ``past_key_values`` and returns it under that
name; from 5.24 on the name is ``cache``.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any, cast

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


class RoomyLayer(DynamicLayer):
    """A layer whose tensors are the front of longer buffers, so that growing writes only what is
    new; the stock layer copies all it holds.

    Args:
        room: tokens to keep free behind those that the first ``update`` brings.
    """

    def __init__(self, room: int = 0) -> None:
        super().__init__()
        self.room = room
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        assert self.keys is not None and self.values is not None
        self.keys, self._key_buffer = self._grown(self.keys, self._key_buffer, key_states)
        self.values, self._value_buffer = self._grown(self.values, self._value_buffer, value_states)
        return self.keys, self.values

    def _grown(self, held: Tensor, buffer: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
        before, total = held.shape[-2], held.shape[-2] + new.shape[-2]
        if buffer is None or buffer.shape[-2] < total:
            # Whoever outgrows the room once grows again: leave as much as this time took.
            spare = max(self.room, new.shape[-2]) if before else self.room
            buffer = new.new_empty(*new.shape[:-2], total + spare, new.shape[-1])
            buffer[..., :before, :] = held
        buffer[..., before:total, :] = new
        return buffer[..., :total, :], buffer

    def fork(self, own_room: bool) -> RoomyLayer:
        """A layer that holds the same tensors and grows by itself.

        Args:
            own_room: whether it may write into the buffers behind what it holds. At most one of
                the layers that share buffers may; another one gets buffers of its own when it
                first grows.
        """
        other = copy.copy(self)
        if not own_room:
            other._key_buffer = other._value_buffer = None
        return other

    def gather(self, token_BP: Tensor) -> RoomyLayer:
        """A layer of some of the tokens, numbers int64 [B, P], in buffers of its own."""
        assert self.keys is not None and self.values is not None
        other = copy.copy(self)
        at_B1P1 = token_BP[:, None, :, None]
        other._key_buffer = self.keys.take_along_dim(at_B1P1, dim=2)
        other._value_buffer = self.values.take_along_dim(at_B1P1, dim=2)
        other.keys, other.values = other._key_buffer, other._value_buffer
        return other

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, free room included."""
        held = (self._key_buffer, self._value_buffer)
        return sum(b.untyped_storage().nbytes() for b in held if b is not None)


def roomy_cache(room: int) -> DynamicCache:
    """An empty cache that grows a `RoomyLayer` the first time that layer writes to it."""
    cache = DynamicCache()
    # Only ever called.
    cache.layer_class_to_replicate = partial(RoomyLayer, room)  # type: ignore[assignment]
    return cache


def _roomy_layers(cache: DynamicCache) -> list[RoomyLayer]:
    return cast("list[RoomyLayer]", cache.layers)


def fork_cache(cache: DynamicCache, own_room: bool) -> DynamicCache:
    """A cache with every layer forked, see `RoomyLayer.fork`."""
    other = copy.copy(cache)
    other.layers = [layer.fork(own_room) for layer in _roomy_layers(cache)]
    return other


def gather_cache(cache: DynamicCache, token_BP: Tensor) -> DynamicCache:
    """A cache of some of the tokens, numbers int64 [B, P], in buffers of its own."""
    other = copy.copy(cache)
    other.layers = [layer.gather(token_BP) for layer in _roomy_layers(cache)]
    return other


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of all layers' buffers."""
    return sum(layer.num_bytes for layer in _roomy_layers(cache))


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
