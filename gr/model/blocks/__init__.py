"""Interchangeable blocks: ``block(x_BND, layout, cache) -> x_BND``.

To add one: a file here with a module class and an options dataclass, and a line in ``BLOCKS``.
Blocks never import each other.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gr.model.blocks.hstu import HSTUBlock, HSTUOptions
from gr.model.blocks.transformer import TransformerBlock, TransformerOptions

if TYPE_CHECKING:
    from gr.model.config import GRConfig

BLOCKS: dict[str, tuple[type, type]] = {
    "transformer": (TransformerBlock, TransformerOptions),
    "hstu": (HSTUBlock, HSTUOptions),
}


def block_options(name: str, config: GRConfig) -> Any:
    """The options of block ``name`` with the changes of ``config.block_options``.

    Raises:
        ValueError: an option that the block does not have, or a value it refuses.
    """
    options = BLOCKS[name][1]
    given = (config.block_options or {}).get(name, {})
    known = [field.name for field in fields(options)]
    for key in given:
        if key not in known:
            raise ValueError(f"block_options[{name!r}]: unknown option {key!r}, wanted {known}")
    return options(**given)


def build_block(name: str, config: GRConfig, layer: int) -> Any:
    """The module of layer number ``layer``."""
    return BLOCKS[name][0](config, block_options(name, config), layer)
