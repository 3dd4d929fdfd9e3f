"""A Hugging Face tokenizer that speaks semantic IDs and actions.

The whole vocabulary goes into one WordLevel model, built in one step: tokens added one by one
afterwards make loading slow. ``tokenizer_config.json`` holds the vocabulary's arithmetic under
``sid_vocabulary``; the catalogue lies beside it and is read when first asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from gr.tokenizer.catalog import JSON_NAME, PARQUET_NAME, Catalog
from gr.tokenizer.stream import StreamEncoder, catalog_tokens
from gr.tokenizer.vocabulary import IntArray, SidVocabulary

if TYPE_CHECKING:
    from gr.data.schema import Event

# Seconds up to the year 5138; a present-day time in milliseconds is far beyond it.
MAX_SECONDS = 100_000_000_000


@dataclass(frozen=True)
class EncodedHistory:
    """One user's history as tokens.

    ``input_ids`` and ``timestamps`` are int64 [n]; ``unknown`` lists the item ids that were left
    out because the catalogue does not have them, in order, as often as they occurred.
    """

    input_ids: IntArray
    timestamps: IntArray
    unknown: list[str]


class SemanticIdTokenizer(PreTrainedTokenizerFast):
    """Tokenizer over special, semantic-ID and action tokens (see ``SidVocabulary`` for ids).

    As text, tokens are written with or without white space between them. Build one with
    :meth:`from_catalog`; ``AutoTokenizer.from_pretrained`` loads it once :func:`register` ran.

    Raises:
        ValueError: no ``sid_vocabulary``, or one that is appended to another vocabulary.
    """

    # The base class declares both as instance variables, so ClassVar (RUF012) is not an option.
    vocab_files_names: dict[str, str] = {  # noqa: RUF012
        "tokenizer_file": "tokenizer.json",
        "catalog_file": PARQUET_NAME,
        "catalog_json_file": JSON_NAME,
    }
    model_input_names: list[str] = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, sid_vocabulary: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if sid_vocabulary is None:
            raise ValueError(
                "sid_vocabulary is missing: wanted SidVocabulary.to_dict(), which "
                "tokenizer_config.json of a saved SemanticIdTokenizer holds"
            )
        self._vocabulary = SidVocabulary.from_dict(sid_vocabulary)
        if self._vocabulary.base:
            raise ValueError(
                f"sid_vocabulary has base {self._vocabulary.base}: a SemanticIdTokenizer holds a "
                "whole vocabulary, which starts at 0"
            )
        # What loaders extract from tokenizer.json is rebuilt from the vocabulary below.
        for name in ("vocab", "merges", "tokenizer_file", "tokenizer_object", "post_processor"):
            kwargs.pop(name, None)
        self._catalog: Catalog | None = None
        self._catalog_file: str | None = kwargs.pop("catalog_file", None)
        kwargs.pop("catalog_json_file", None)
        self._encoder: StreamEncoder | None = None
        kwargs.setdefault("padding_side", "left")
        special = {
            "pad_token": "[PAD]",
            "bos_token": "[BOS]",
            "sep_token": "[SEP]",
            "unk_token": "[UNK]",
        }
        for name, token in special.items():
            kwargs.setdefault(name, token)
        super().__init__(
            tokenizer_object=_word_level(self._vocabulary),
            sid_vocabulary=self._vocabulary.to_dict(),
            **kwargs,
        )

    @classmethod
    def from_catalog(
        cls, catalog: Catalog, actions: Sequence[str] = ("like", "dislike")
    ) -> SemanticIdTokenizer:
        """The tokenizer of a catalogue; ``actions=()`` for streams of items only."""
        vocabulary = SidVocabulary(dict(catalog.level_sizes), tuple(actions))
        tokenizer = cls(sid_vocabulary=vocabulary.to_dict())
        tokenizer.catalog = catalog
        return tokenizer

    @property
    def vocabulary(self) -> SidVocabulary:
        """Token ids by arithmetic."""
        return self._vocabulary

    @property
    def catalog(self) -> Catalog | None:
        """The items, read from the tokenizer's folder when first asked for; None if not there."""
        if self._catalog is None and self._catalog_file is not None:
            self.catalog = Catalog.load(os.path.dirname(self._catalog_file))
        return self._catalog

    @catalog.setter
    def catalog(self, catalog: Catalog | None) -> None:
        if catalog is not None:
            catalog_tokens(catalog, self._vocabulary)  # refuse a catalogue of another vocabulary
        self._catalog = catalog
        self._encoder = None

    def _items(self) -> Catalog:
        catalog = self.catalog
        if catalog is None:
            raise ValueError(
                f"the tokenizer has no catalogue: set tokenizer.catalog, or put {PARQUET_NAME} and "
                f"{JSON_NAME} beside tokenizer.json in {self.name_or_path!r}"
            )
        return catalog

    @property
    def encoder(self) -> StreamEncoder:
        """Vectorised encoder for whole batches of histories; collators use it directly.

        Raises:
            ValueError: the tokenizer has no catalogue.
        """
        if self._encoder is None:
            self._encoder = StreamEncoder.from_catalog(self._items(), self._vocabulary)
        return self._encoder

    def encode_history(
        self, events: Sequence[Event | str | int], max_events: int | None = None
    ) -> EncodedHistory:
        """Tokens of one history, oldest event first.

        Args:
            events: item ids, or events with item id, action and timestamp in seconds. Where no
                event has a timestamp all are 0; an event without an action gets [UNK] in its place.
            max_events: keep only the last that many events of known items.

        Raises:
            ValueError: an action the vocabulary does not have (a vocabulary without actions
                ignores them), timestamps on some events only, out of order, or not in seconds.
        """
        catalog = self._items()
        names, actions, times = _columns(events, self._vocabulary.actions)
        index = catalog.index(names)
        unknown = [name for name, row in zip(names, index, strict=True) if row < 0]
        streams = self.encoder.encode_batch(index, actions, times, [0, len(names)], max_events)
        return EncodedHistory(streams.input_ids, streams.timestamps, unknown)

    def encode_items(self, item_ids: Sequence[str | int]) -> IntArray:
        """Semantic-ID tokens of items: int64 [k, M_max], -1 padded for types with fewer levels.

        Raises:
            KeyError: an item is not in the catalogue.
        """
        index = self._items().index(item_ids)
        if (index < 0).any():
            at = int(np.flatnonzero(index < 0)[0])
            raise KeyError(f"item_ids[{at}] {item_ids[at]!r} is not in the catalogue")
        tokens: IntArray = self.encoder.item_tokens[index]
        return tokens

    def decode_items(self, ids: npt.ArrayLike) -> list[str | None]:
        """Items behind semantic IDs: one per row of int [n, M], None where no item has that ID.

        Where several items share an ID, the most popular speaks for it. Delimiters ``[SID]`` and
        ``[/SID]`` around the tokens, and padding after them, are accepted.
        """
        catalog = self._items()
        tokens = np.asarray(ids, dtype=np.int64)
        if tokens.ndim != 2:
            raise ValueError(f"ids have shape {tokens.shape}: wanted [n, M]")
        if tokens.size and (tokens[:, 0] == self._vocabulary.special_token("[SID]")).all():
            tokens = tokens[:, 1:]
        codes, types = self._vocabulary.token_codes(tokens)
        order = [
            catalog.types.index(t) if t in catalog.types else -1 for t in self._vocabulary.types
        ]
        in_catalog = np.array([*order, -1], dtype=np.int64)[types]
        rows = catalog.lookup(codes[:, : catalog.codes.shape[1]], in_catalog)
        return [catalog.item_ids[row] if row >= 0 else None for row in rows.tolist()]

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> tuple[str, ...]:
        """Write the tokenizer's files, and the catalogue if there is one."""
        catalog = self.catalog
        if catalog is not None:
            catalog.save(save_directory)  # first: what is there is uploaded with the rest
        files: tuple[str, ...] = super().save_pretrained(save_directory, *args, **kwargs)
        if catalog is None:
            return files
        folder = os.fspath(save_directory)
        return (*files, os.path.join(folder, PARQUET_NAME), os.path.join(folder, JSON_NAME))


class SemanticIdTokenizerConfig(PretrainedConfig):
    """The key under which AutoTokenizer files the class when no model configuration is given."""

    model_type = "gr_semantic_id_tokenizer"


def register(*config_classes: type) -> None:
    """Make ``AutoTokenizer`` know :class:`SemanticIdTokenizer`; repeating it does no harm.

    Args:
        config_classes: model configurations whose default tokenizer this is.
    """
    for config_class in (SemanticIdTokenizerConfig, *config_classes):
        AutoTokenizer.register(
            config_class, fast_tokenizer_class=SemanticIdTokenizer, exist_ok=True
        )


def _word_level(vocabulary: SidVocabulary) -> Tokenizer:
    words = {token: i for i, token in enumerate(vocabulary.tokens())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    # Tokens may be written without white space between them.
    pieces = pre_tokenizers.Split(Regex(r"<[^<>\s]+>|\[/?[A-Z]+\]"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pieces])
    return tokenizer


def _columns(
    events: Sequence[Event | str | int], actions: tuple[str, ...]
) -> tuple[list[str], list[int], list[int]]:
    """Item ids, action positions (-1: none) and timestamps (0: none) of checked events."""
    action_at = {name: i for i, name in enumerate(actions)}
    names: list[str] = []
    chosen: list[int] = []
    stamps: list[int | None] = []
    for i, event in enumerate(events):
        action: str | None = None
        stamp: int | None = None
        if isinstance(event, (str, int, np.integer)):
            names.append(str(event))
        else:
            names.append(str(event.item_id))
            action, stamp = event.action, event.timestamp
        if action is None or not actions:
            chosen.append(-1)
        elif action in action_at:
            chosen.append(action_at[action])
        else:
            raise ValueError(f"events[{i}] has action {action!r}: wanted None or one of {actions}")
        stamps.append(None if stamp is None else int(stamp))
    return names, chosen, _checked_times(stamps)


def _checked_times(stamps: list[int | None]) -> list[int]:
    known = [stamp for stamp in stamps if stamp is not None]
    if not known:
        return [0] * len(stamps)
    if len(known) < len(stamps):
        at = stamps.index(None)
        raise ValueError(
            f"events[{at}] has no timestamp while {len(known)} of {len(stamps)} events have one: "
            "wanted all or none"
        )
    for i, stamp in enumerate(known):
        if abs(stamp) > MAX_SECONDS:
            raise ValueError(f"events[{i}] has timestamp {stamp}: wanted seconds, not milliseconds")
        if i and stamp < known[i - 1]:
            raise ValueError(
                f"events[{i}] has timestamp {stamp}, before {known[i - 1]} of the event ahead of "
                "it: wanted a history sorted by time, oldest first"
            )
    return known
