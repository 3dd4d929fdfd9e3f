"""What one block sees of the key/value cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True)
class LayerCache:
    """One layer's slot of a cache. Blocks write the new keys and values and read all of them."""

    cache: DynamicCache
    layer: int

    def update(self, k_BHQd: Tensor, v_BHQd: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens; returns keys and values of cached and new, [B, H, K, d]."""
        k_BHKd, v_BHKd = self.cache.update(k_BHQd, v_BHQd, self.layer)
        return k_BHKd, v_BHKd
