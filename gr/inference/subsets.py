"""Named parts of a catalogue that outlive one version of it: a type, what is in stock, the new."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from gr.inference.constraint import ItemSubset
from gr.tokenizer import Catalog
from gr.tokenizer.trie import ItemTrie

Rule = Callable[[Catalog], npt.ArrayLike]


class CatalogSubset:
    """Items by a rule, for ``allowed`` in any number of requests.

    The rule is asked once for each catalogue that is served, so a request costs the same however
    many items there are, and after a swap the rule is asked about the new items. Subsets combine
    with ``&``, ``|`` and ``~``.

    Args:
        rule: from a catalogue to a bool array [n] over its rows.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._made: weakref.WeakKeyDictionary[ItemTrie, ItemSubset] = weakref.WeakKeyDictionary()

    @classmethod
    def of_items(cls, item_ids: Collection[str | int]) -> CatalogSubset:
        """Items by id; those that a catalogue does not have are no error."""
        wanted = [str(item) for item in item_ids]

        def rule(catalog: Catalog) -> npt.NDArray[np.bool_]:
            rows = catalog.index(wanted)
            mask = np.zeros(len(catalog), dtype=bool)
            mask[rows[rows >= 0]] = True
            return mask

        return cls(rule)

    @classmethod
    def of_types(cls, *types: str) -> CatalogSubset:
        """Items of some entity types.

        Raises:
            ValueError: when asked about a catalogue that does not have one of them.
        """
        return cls(lambda catalog: catalog.of_types(*types))

    def of(self, catalog: Catalog, trie: ItemTrie) -> ItemSubset:
        """The items of one catalogue and its trie.

        Raises:
            ValueError: the rule's answer is no bool array over the catalogue's rows.
        """
        made = self._made.get(trie)
        if made is None:
            mask = np.asarray(self.rule(catalog))
            if mask.dtype != np.bool_ or mask.shape != (len(catalog),):
                raise ValueError(
                    f"the rule of a subset gave {mask.dtype} of shape {mask.shape}: wanted bool "
                    f"({len(catalog)},), one entry for each item of the catalogue"
                )
            made = self._made[trie] = ItemSubset(trie, mask)
        return made

    def __and__(self, other: CatalogSubset) -> CatalogSubset:
        return CatalogSubset(lambda c: np.asarray(self.rule(c)) & np.asarray(other.rule(c)))

    def __or__(self, other: CatalogSubset) -> CatalogSubset:
        return CatalogSubset(lambda c: np.asarray(self.rule(c)) | np.asarray(other.rule(c)))

    def __invert__(self) -> CatalogSubset:
        return CatalogSubset(lambda c: ~np.asarray(self.rule(c)))
