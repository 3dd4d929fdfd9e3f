"""Token ids of semantic IDs and actions: pure arithmetic, no tokenizer object needed.

Legend: n items, M levels of a type, V tokens, A actions.

The order of a native vocabulary (``base == 0``) is

    [PAD] [BOS] [SEP] [UNK] [SID] [/SID]   then   <type:level:code> ...   then   <action:name> ...

with types in the given order, levels inside a type, codes inside a level. Appended to a language
model's vocabulary (``base > 0``), the model keeps its own special tokens and only the delimiters
``[SID] [/SID]`` are added in front of the codes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

NATIVE_SPECIALS = ("[PAD]", "[BOS]", "[SEP]", "[UNK]", "[SID]", "[/SID]")
APPENDED_SPECIALS = ("[SID]", "[/SID]")

_NAME = re.compile(r"[^\s<>:]+")


def _check_name(kind: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{kind} name {name!r} cannot be part of a token: "
            "wanted a non-empty name without white space, '<', '>' or ':'"
        )


@dataclass(frozen=True)
class SidVocabulary:
    """Where each semantic-ID token and each action token lies among the token ids.

    ``level_sizes`` maps an entity type to its codes per level, e.g. ``{"item": (64, 64, 32)}``;
    types may differ in the number of levels and in their sizes. ``base`` is the first token id.

    Raises:
        ValueError: a name that cannot be spelled as a token, no type, a type without levels, a
            level without codes, a repeated action, or a negative base.
    """

    level_sizes: dict[str, tuple[int, ...]]
    actions: tuple[str, ...] = ()
    base: int = 0

    def __post_init__(self) -> None:
        sizes = {str(t): tuple(int(k) for k in ks) for t, ks in self.level_sizes.items()}
        actions = tuple(str(a) for a in self.actions)
        if not sizes:
            raise ValueError("level_sizes is empty: wanted at least one entity type")
        for name, ks in sizes.items():
            _check_name("entity type", name)
            if name == "action":
                raise ValueError("entity type 'action' is taken by the action tokens")
            if not ks or min(ks) < 1:
                raise ValueError(f"level_sizes[{name!r}] is {ks}: wanted one or more sizes >= 1")
        for action in actions:
            _check_name("action", action)
        if len(set(actions)) != len(actions):
            raise ValueError(f"actions {actions} repeat a name")
        if self.base < 0:
            raise ValueError(f"base is {self.base}: wanted a token id >= 0")
        object.__setattr__(self, "level_sizes", sizes)
        object.__setattr__(self, "actions", actions)
        object.__setattr__(self, "base", int(self.base))

    def __hash__(self) -> int:
        return hash((tuple(self.level_sizes.items()), self.actions, self.base))

    # ---- layout ------------------------------------------------------------------------------

    @property
    def types(self) -> tuple[str, ...]:
        """Entity types in the order of their tokens."""
        return tuple(self.level_sizes)

    @property
    def specials(self) -> tuple[str, ...]:
        """Special tokens this vocabulary adds."""
        return APPENDED_SPECIALS if self.base else NATIVE_SPECIALS

    @property
    def max_levels(self) -> int:
        """Levels of the type that has most."""
        return max(len(ks) for ks in self.level_sizes.values())

    @cached_property
    def _starts(self) -> dict[str, IntArray]:
        starts: dict[str, IntArray] = {}
        at = self.base + len(self.specials)
        for name, ks in self.level_sizes.items():
            ends = at + np.cumsum(np.asarray(ks, dtype=np.int64))
            starts[name] = np.concatenate([[at], ends[:-1]]).astype(np.int64)
            at = int(ends[-1])
        return starts

    @cached_property
    def _starts_TM(self) -> IntArray:
        """First token of every (type, level); -1 where a type has no such level."""
        table = np.full((len(self.types), self.max_levels), -1, dtype=np.int64)
        for t, starts in enumerate(self._starts.values()):
            table[t, : len(starts)] = starts
        return table

    @cached_property
    def _sizes_TM(self) -> IntArray:
        table = np.zeros((len(self.types), self.max_levels), dtype=np.int64)
        for t, ks in enumerate(self.level_sizes.values()):
            table[t, : len(ks)] = ks
        return table

    @property
    def size(self) -> int:
        """Number of tokens V of this vocabulary; their ids are ``base .. base + size - 1``."""
        codes = sum(sum(ks) for ks in self.level_sizes.values())
        return len(self.specials) + codes + len(self.actions)

    @property
    def end(self) -> int:
        """One past the last token id: the length a native model's embedding table needs."""
        return self.base + self.size

    @property
    def first_action(self) -> int:
        """Id of the first action token (``end`` when there are no actions)."""
        return self.end - len(self.actions)

    def tokens(self) -> list[str]:
        """All V token strings, in the order of their ids."""
        out = list(self.specials)
        for name, ks in self.level_sizes.items():
            for level, size in enumerate(ks):
                out.extend(f"<{name}:{level}:{code}>" for code in range(size))
        out.extend(f"<action:{action}>" for action in self.actions)
        return out

    def special_token(self, name: str) -> int:
        """Token id of a special such as ``"[SID]"``.

        Raises:
            KeyError: this vocabulary does not add that special token.
        """
        if name not in self.specials:
            raise KeyError(f"special token {name!r} is not one of {self.specials}")
        return self.base + self.specials.index(name)

    def level_start(self, type: str, level: int) -> int:
        """Token id of code 0 at ``level`` of ``type``.

        Raises:
            KeyError: unknown type.
            IndexError: the type has no such level.
        """
        starts = self._type_starts(type)
        if not 0 <= level < len(starts):
            raise IndexError(f"level {level} of type {type!r}: it has {len(starts)} levels")
        return int(starts[level])

    def _type_starts(self, type: str) -> IntArray:
        if type not in self._starts:
            raise KeyError(f"entity type {type!r} is not one of {self.types}")
        return self._starts[type]

    # ---- codes <-> tokens --------------------------------------------------------------------

    def item_tokens(self, codes: npt.ArrayLike, type: str = "item") -> IntArray:
        """Token ids of semantic IDs of one type.

        Args:
            codes: int [n, M] with M the levels of ``type``; wider input is allowed when the rest
                of each row is -1.
            type: the entity type of all n rows.

        Returns:
            int64 [n, M].

        Raises:
            KeyError: unknown type.
            ValueError: wrong width, or a code outside its level.
        """
        self._type_starts(type)
        wide = np.asarray(codes)
        if wide.ndim != 2:
            raise ValueError(f"codes have shape {wide.shape}: wanted [n, M]")
        levels = len(self.level_sizes[type])
        if wide.shape[1] < levels:
            raise ValueError(f"codes have {wide.shape[1]} levels: type {type!r} has {levels}")
        index = np.full(len(wide), self.types.index(type), dtype=np.int64)
        if wide.shape[1] > self.max_levels:
            if (wide[:, levels:] >= 0).any():
                raise ValueError(f"codes have {wide.shape[1]} levels: type {type!r} has {levels}")
            wide = wide[:, : self.max_levels]
        return self.mixed_item_tokens(wide, index)[:, :levels]

    def mixed_item_tokens(self, codes: npt.ArrayLike, type_index: npt.ArrayLike) -> IntArray:
        """Token ids of semantic IDs of several types at once.

        Args:
            codes: int [n, M_max], each row padded with -1 past its type's levels.
            type_index: int [n], positions in ``types``.

        Returns:
            int64 [n, M_max], -1 where ``codes`` is padding.

        Raises:
            ValueError: a code outside its level, or padding in a wrong place.
        """
        wide = np.asarray(codes, dtype=np.int64)
        index = np.asarray(type_index, dtype=np.int64)
        if wide.ndim != 2 or wide.shape[1] > self.max_levels:
            raise ValueError(
                f"codes have shape {wide.shape}: wanted [n, M] with M <= {self.max_levels}"
            )
        sizes = self._sizes_TM[index][:, : wide.shape[1]]
        bad = np.where(sizes > 0, (wide < 0) | (wide >= sizes), wide != -1)
        if bad.any():
            row, level = (int(v) for v in np.argwhere(bad)[0])
            raise ValueError(
                f"codes[{row}, {level}] is {int(wide[row, level])}: type "
                f"{self.types[int(index[row])]!r} has {int(sizes[row, level])} codes at that level "
                "(-1 is the padding past a type's last level)"
            )
        return np.where(sizes > 0, self._starts_TM[index][:, : wide.shape[1]] + wide, -1)

    def token_codes(self, tokens: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """The inverse of :meth:`mixed_item_tokens`.

        Args:
            tokens: int [n, M]; whatever is no semantic-ID token counts as padding.

        Returns:
            codes int64 [n, M_max] padded with -1, and type_index int64 [n], -1 for a row that does
            not spell exactly one whole semantic ID of one type, level after level from the left.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.ndim != 2:
            raise ValueError(f"tokens have shape {ids.shape}: wanted [n, M]")
        width = self.max_levels
        padded = np.full((len(ids), max(width, ids.shape[1])), -1, dtype=np.int64)
        padded[:, : ids.shape[1]] = ids
        codes = np.full((len(ids), width), -1, dtype=np.int64)
        found = np.full(len(ids), -1, dtype=np.int64)
        low = self.base + len(self.specials)
        is_sid = (padded >= low) & (padded < self.first_action)
        for t in range(len(self.types)):
            levels = len(self.level_sizes[self.types[t]])
            local = padded[:, :levels] - self._starts_TM[t, :levels]
            fits = ((local >= 0) & (local < self._sizes_TM[t, :levels])).all(axis=1)
            fits &= ~is_sid[:, levels:].any(axis=1)
            found[fits] = t
            codes[fits, :levels] = local[fits]
        return codes, found

    # ---- actions -----------------------------------------------------------------------------

    def action_token(self, name: str) -> int:
        """Token id of an action.

        Raises:
            KeyError: the vocabulary has no such action.
        """
        if name not in self.actions:
            raise KeyError(f"action {name!r} is not one of {self.actions}")
        return self.first_action + self.actions.index(name)

    @property
    def action_tokens(self) -> IntArray:
        """int64 [A], the token ids of all actions."""
        return np.arange(self.first_action, self.end, dtype=np.int64)

    # ---- groups ------------------------------------------------------------------------------

    def groups(self) -> IntArray:
        """int64 [V]: the group of each token, counted from this vocabulary's first token.

        Specials are group 0, each (type, level) is a group of its own in token order, and the
        actions are the last group.
        """
        counts = [len(self.specials)]
        counts += [k for ks in self.level_sizes.values() for k in ks]
        counts.append(len(self.actions))
        return np.repeat(np.arange(len(counts), dtype=np.int64), counts)

    def group(self, type: str, level: int) -> int:
        """Group id of one level of one type, as :meth:`groups` numbers them."""
        self.level_start(type, level)
        before = self.types[: self.types.index(type)]
        return 1 + sum(len(self.level_sizes[t]) for t in before) + level

    # ---- (de)serialisation -------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able form, kept in model and tokenizer configurations."""
        return {
            "level_sizes": [[t, list(ks)] for t, ks in self.level_sizes.items()],
            "actions": list(self.actions),
            "base": self.base,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SidVocabulary:
        """Read :meth:`to_dict`'s form.

        Raises:
            ValueError: a key is missing.
        """
        if "level_sizes" not in data:
            raise ValueError(f"vocabulary has keys {sorted(data)}: wanted 'level_sizes'")
        # Pairs, not a mapping: some JSON writers sort keys, and the order fixes the token ids.
        pairs: Sequence[Any] = (
            list(data["level_sizes"].items())
            if isinstance(data["level_sizes"], Mapping)
            else data["level_sizes"]
        )
        return cls(
            level_sizes={str(t): tuple(ks) for t, ks in pairs},
            actions=tuple(data.get("actions", ())),
            base=int(data.get("base", 0)),
        )
