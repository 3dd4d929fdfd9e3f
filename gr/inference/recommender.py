"""The face of the library: histories in, scored items out."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gr.data.whole_file import whole_file
from gr.inference.branches import Backbone, Prefix
from gr.inference.constraint import RowFilter, build_filter
from gr.inference.exhaustive import CatalogPlan, catalog_log_probs
from gr.inference.histories import EncodedRow, History, HistoryEncoder, Report
from gr.inference.rank import action_log_probs
from gr.inference.retrieve import retrieve
from gr.inference.scored import Scored
from gr.model import GRConfig
from gr.model import register as register_model
from gr.tokenizer import Catalog, SemanticIdTokenizer
from gr.tokenizer import register as register_tokenizer
from gr.tokenizer.trie import ItemTrie

IntArray = npt.NDArray[np.int64]
Items: TypeAlias = Collection["str | int"]
Allowed: TypeAlias = "Items | Sequence[Items | None] | None"

TRIE_NAME = "trie.safetensors"
OPTIONS_NAME = "recommender.json"


class Recommender:
    """Retrieval, ranking and both together, over batches of users.

    A history is a list of item ids, or of ``Event(item_id, action, timestamp)`` with seconds,
    oldest first. Items that the catalogue does not have are skipped; one warning names the first
    and ``last_report`` has all. An empty history is answered as any other. No result depends on
    the other histories of a call.

    Args:
        model: any decoder that `gr.inference.branches.Backbone` takes.
        tokenizer: its tokenizer, with the vocabulary of items and actions.
        catalog: the items; None takes the tokenizer's.
        trie: the catalogue's trie; None builds it.
        default_action: stands in for missing actions of events and is what ``rank`` and
            ``recommend`` score when none is named. None: "like" if the vocabulary has it, else its
            only action if it has one, else [UNK] stands for missing actions and the action to
            score must be named.
        max_events: most recent events of a history that the model reads; None: all that fit.
        batch_size: users read at once.

    Attributes:
        last_report: what the last call skipped, see `Report`.

    Raises:
        ValueError: no catalogue, or a model too short for one event.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: SemanticIdTokenizer,
        catalog: Catalog | None = None,
        trie: ItemTrie | None = None,
        default_action: str | None = None,
        max_events: int | None = None,
        batch_size: int = 32,
    ) -> None:
        if catalog is not None and catalog is not tokenizer.catalog:
            # A copy: another recommender may answer with the same tokenizer and its own items.
            tokenizer = copy.copy(tokenizer)
            tokenizer.catalog = catalog
        items = tokenizer.catalog
        if items is None:
            raise ValueError("the tokenizer has no catalogue: wanted one in catalog=")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: wanted at least 1")
        self.model, self.tokenizer, self.catalog = model, tokenizer, items
        self.batch_size = batch_size
        self.vocabulary = tokenizer.vocabulary
        self.backbone = Backbone(model)
        if trie is None:
            trie = ItemTrie.from_catalog(items, self.vocabulary)
        elif trie.num_items != len(items):
            raise ValueError(f"trie has {trie.num_items} items: the catalogue has {len(items)}")
        self.trie = trie.to(self.backbone.device)
        actions = self.vocabulary.actions
        if default_action is None:
            default_action = "like" if "like" in actions else None
            default_action = actions[0] if len(actions) == 1 else default_action
        self.default_action = default_action
        self._given_max_events = max_events
        self.encoder = HistoryEncoder(tokenizer, self.backbone, default_action, max_events)
        self.last_report = Report()
        self._plan: CatalogPlan | None = None

    # ---- files -------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        device: str | torch.device | None = None,
        batch_size: int = 32,
        **model_options: Any,
    ) -> Recommender:
        """Load what ``save_pretrained`` wrote: model, tokenizer, catalogue and trie.

        A trie that does not belong to the catalogue beside it (someone replaced one of the two) is
        built anew.

        Raises:
            FileNotFoundError: no such folder, or no model, tokenizer or catalogue in it.
            TypeError: the folder's tokenizer is not a `SemanticIdTokenizer`.
        """
        path = Path(folder)
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a folder: wanted a saved recommender")
        for name in ("config.json", "tokenizer_config.json"):
            if not (path / name).is_file():
                raise FileNotFoundError(
                    f"{path} has no {name}: wanted a saved recommender (that of a training run is "
                    "the folder model/ in it)"
                )
        register_model()
        register_tokenizer(GRConfig)
        tokenizer = AutoTokenizer.from_pretrained(path)
        if not isinstance(tokenizer, SemanticIdTokenizer):
            raise TypeError(
                f"{path} has a {type(tokenizer).__name__}: wanted a SemanticIdTokenizer"
            )
        if tokenizer.catalog is None:
            raise FileNotFoundError(f"{path} has no catalogue: wanted catalog.parquet and .json")
        model = AutoModelForCausalLM.from_pretrained(path, **model_options).eval()
        if device is not None:
            model = model.to(device)
        options: dict[str, Any] = {}
        if (path / OPTIONS_NAME).is_file():
            options = json.loads((path / OPTIONS_NAME).read_text(encoding="utf-8"))
        trie = None
        if (path / TRIE_NAME).is_file():
            trie = ItemTrie.load(path / TRIE_NAME)
            if not trie.belongs_to(tokenizer.catalog, tokenizer.vocabulary):
                trie = None
        return cls(model, tokenizer, trie=trie, batch_size=batch_size, **options)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write model, tokenizer, catalogue, trie and this class's own two options."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        self.trie.save(path / TRIE_NAME)
        options = {"default_action": self.default_action, "max_events": self._given_max_events}
        with whole_file(path / OPTIONS_NAME) as temporary:
            temporary.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")

    # ---- questions ---------------------------------------------------------------------------

    def retrieve(
        self,
        histories: Sequence[History],
        k: int = 10,
        num_beams: int | None = None,
        exclude_seen: bool = True,
        allowed: Allowed = None,
        request_times: Sequence[int | None] | None = None,
    ) -> list[list[Scored]]:
        """The k most probable next items of every user, best first.

        Args:
            histories: one per user.
            k: items per user; a user for whom fewer are left gets those.
            num_beams: beam width, at least k; None: twice k, at least 50.
            exclude_seen: leave out the items of the user's own (whole) history.
            allowed: the only items that may come out: a collection of ids for all users, or one
                such collection (or None: all) per user.
            request_times: seconds at which each user asks; None is the time of the last event.

        Returns:
            Scored lists; the score is the log-probability of the item's semantic ID. Items that
            share an ID share the score and come in order of popularity.

        Raises:
            ValueError: k below 1, fewer beams than k, or malformed histories.
        """
        answers: list[list[Scored]] = [[] for _ in histories]
        rows, keep_rows = self._start(histories, request_times, allowed)
        k = min(k, len(self.catalog))
        for numbers, prefix in self.encoder.batches(rows, self.batch_size):
            keep = self._filter(rows, numbers, exclude_seen, keep_rows)
            found = retrieve(prefix, self.trie, k, num_beams, keep)
            self._collect(answers, numbers, *found)
        self.last_report.warn()
        return answers

    def rank(
        self,
        histories: Sequence[History],
        candidates: Items | Sequence[Items],
        action: str | None = None,
        request_times: Sequence[int | None] | None = None,
        microbatch: int = 64,
    ) -> list[list[Scored]]:
        """Candidates of every user by the probability of an action, best first.

        Args:
            histories: one per user.
            candidates: item ids for all users, or one such collection per user.
            action: the action whose probability is wanted; None: ``default_action``.
            request_times: seconds at which each user asks; None is the time of the last event.
            microbatch: candidates of a user in one pass; bounds the memory, changes no score.

        Returns:
            Scored lists; the score is p(action | history, item), normalised over the actions of
            the vocabulary. Ties keep the given order.

        Raises:
            ValueError: a stream with fewer than two actions, an unknown action, or malformed
                histories.
        """
        actions = self.vocabulary.actions
        if len(actions) < 2:
            raise ValueError(
                f"the model's stream has actions {actions}: ranking needs two or more to tell "
                "apart; build the tokenizer with actions=..., or use retrieve"
            )
        chosen = actions.index(self._action(action))
        answers: list[list[Scored]] = [[] for _ in histories]
        rows, _ = self._start(histories, request_times, None)
        wanted = self._candidates(candidates, len(histories))
        for numbers, prefix in self.encoder.batches(rows, self.batch_size):
            row_BC = _padded([wanted[i] for i in numbers]).to(self.trie.device)
            score_BC = self._action_log_probs(prefix, row_BC, microbatch)[..., chosen].exp()
            score_BC = score_BC.masked_fill(row_BC < 0, -torch.inf)
            order = score_BC.argsort(dim=1, descending=True, stable=True)
            self._collect(answers, numbers, row_BC.gather(1, order), score_BC.gather(1, order))
        self.last_report.warn()
        return answers

    def recommend(
        self,
        histories: Sequence[History],
        k: int = 10,
        action: str | None = None,
        action_weight: float = 1.0,
        exclude_seen: bool = True,
        allowed: Allowed = None,
        request_times: Sequence[int | None] | None = None,
    ) -> list[list[Scored]]:
        """Retrieve, then rank: the items a user will most probably meet with an action.

        Five times k items (at least 50) are retrieved, and re-ordered on the same cached history by
        ``log p(item | history) + action_weight * log p(action | history, item)``. With a weight of
        1 that is the log-probability of the whole event; 0 is retrieval alone. A stream with fewer
        than two actions has nothing to rank by: its answer is that of ``retrieve``.

        Args:
            histories: one per user.
            k: items per user; a user for whom fewer are left gets those.
            action: None: ``default_action``.
            action_weight: weight of the action beside the item.
            exclude_seen, allowed, request_times: as in ``retrieve``.

        Returns:
            Scored lists, best first; the score is the sum above.

        Raises:
            ValueError: as ``retrieve``; an unknown action, or none where there is no default.
        """
        if k < 1:
            raise ValueError(f"k is {k}: wanted at least 1")
        actions = self.vocabulary.actions
        chosen = actions.index(self._action(action)) if len(actions) > 1 else None
        answers: list[list[Scored]] = [[] for _ in histories]
        rows, keep_rows = self._start(histories, request_times, allowed)
        pool = min(max(5 * k, 50), len(self.catalog))
        for numbers, prefix in self.encoder.batches(rows, self.batch_size):
            keep = self._filter(rows, numbers, exclude_seen, keep_rows)
            row_BC, score_BC = retrieve(prefix, self.trie, pool, keep=keep)
            if chosen is not None:
                action_BC = self._action_log_probs(prefix, row_BC)[..., chosen]
                score_BC = (score_BC + action_weight * action_BC).masked_fill(
                    row_BC < 0, -torch.inf
                )
                order = score_BC.argsort(dim=1, descending=True, stable=True)
                row_BC, score_BC = row_BC.gather(1, order), score_BC.gather(1, order)
            self._collect(answers, numbers, row_BC[:, :k], score_BC[:, :k])
        self.last_report.warn()
        return answers

    def score_catalog(
        self,
        histories: Sequence[History],
        request_times: Sequence[int | None] | None = None,
        chunk: int = 256,
    ) -> Tensor:
        """Exact log-probability of every item for every user, no beams involved.

        Args:
            histories: one per user.
            request_times: seconds at which each user asks; None is the time of the last event.
            chunk: trie nodes in one pass; bounds the memory.

        Returns:
            float32 [B, n] on the CPU, columns in the order of the catalogue; seen items included.

        Raises:
            ValueError: malformed histories.
        """
        rows, _ = self._start(histories, request_times, None)
        scores = torch.empty(len(histories), len(self.catalog))
        if self._plan is None or self._plan.chunk != chunk:
            self._plan = CatalogPlan(self.trie, chunk)
        for numbers, prefix in self.encoder.batches(rows, self.batch_size):
            scores[torch.from_numpy(numbers)] = catalog_log_probs(prefix, self._plan).cpu()
        self.last_report.warn()
        return scores

    # ---- shared steps ------------------------------------------------------------------------

    def _start(
        self,
        histories: Sequence[History],
        request_times: Sequence[int | None] | None,
        allowed: Allowed,
    ) -> tuple[list[EncodedRow], list[IntArray] | None]:
        self.last_report = Report()
        rows = self.encoder.encode(histories, request_times, self.last_report)
        return rows, self._allowed(allowed, len(histories))

    def _action(self, action: str | None) -> str:
        name = action if action is not None else self.default_action
        if name not in self.vocabulary.actions:
            raise ValueError(f"action is {name!r}: wanted one of {self.vocabulary.actions}")
        return str(name)

    def _allowed(self, allowed: Allowed, count: int) -> list[IntArray] | None:
        """Permitted catalogue rows: one array for all, or one per history."""
        if allowed is None:
            return None
        groups, _ = _per_row("allowed", allowed, count)
        kept = []
        for group in groups:
            if group is None:
                kept.append(np.arange(len(self.catalog)))
                continue
            names = [str(item) for item in group]
            index = self.catalog.index(names)
            self.last_report.unknown_allowed += [names[i] for i in np.flatnonzero(index < 0)]
            kept.append(index[index >= 0])
        return kept

    def _candidates(self, candidates: Any, count: int) -> list[IntArray]:
        groups, shared = _per_row("candidates", candidates, count)
        wanted = []
        for number, group in enumerate(groups):
            if group is None:
                raise ValueError(f"candidates[{number}] is None: wanted a collection of item ids")
            names = [str(item) for item in group]
            index = self.catalog.index(names)
            if (index < 0).any():
                unknown = [names[i] for i in np.flatnonzero(index < 0)]
                self.last_report.unknown_candidates[number] = unknown
            wanted.append(index[index >= 0])
        return wanted * count if shared else wanted

    def _filter(
        self,
        rows: Sequence[EncodedRow],
        numbers: IntArray,
        exclude_seen: bool,
        allowed: list[IntArray] | None,
    ) -> RowFilter:
        excluded = [rows[i].seen for i in numbers] if exclude_seen else None
        if allowed is not None and len(allowed) > 1:
            allowed = [allowed[i] for i in numbers]
        return build_filter(self.trie, excluded, allowed)

    def _action_log_probs(self, prefix: Prefix, row_BC: Tensor, microbatch: int = 64) -> Tensor:
        # Item tokens from the encoder's table; a missing candidate is all padding.
        table = torch.from_numpy(self.tokenizer.encoder.item_tokens).to(row_BC.device)
        token_BCM = torch.where(row_BC[..., None] < 0, -1, table[row_BC.clamp_min(0)])
        tokens = torch.from_numpy(self.vocabulary.action_tokens)
        return action_log_probs(prefix, token_BCM, tokens, microbatch)

    def _collect(
        self, answers: list[list[Scored]], numbers: IntArray, row_Bk: Tensor, score_Bk: Tensor
    ) -> None:
        names = self.catalog.item_ids
        for number, row, score in zip(
            numbers.tolist(), row_Bk.tolist(), score_Bk.tolist(), strict=True
        ):
            answers[number] = [
                Scored(names[r], s) for r, s in zip(row, score, strict=True) if r >= 0
            ]


def _per_row(name: str, given: Any, count: int) -> tuple[list[Any], bool]:
    """Collections of ids per history, and whether a single one serves all.

    Raises:
        ValueError: a single string, single ids among collections, or as many collections as
            neither.
    """
    if isinstance(given, str):
        raise ValueError(f"{name} is the string {given!r}: wanted a collection of item ids")
    entries = list(given)
    if all(isinstance(entry, (str, int, np.integer)) for entry in entries) and not (
        count == 0 and not entries
    ):
        return [entries], True
    for number, entry in enumerate(entries):
        if isinstance(entry, (str, int, np.integer)):
            raise ValueError(f"{name}[{number}] is {entry!r}: wanted a collection of item ids")
    if len(entries) != count:
        raise ValueError(f"{name} has {len(entries)} entries: wanted one for each of {count}")
    return entries, False


def _padded(rows: Sequence[IntArray]) -> Tensor:
    width = max((len(row) for row in rows), default=0)
    table = np.full((len(rows), width), -1, dtype=np.int64)
    for at, row in enumerate(rows):
        table[at, : len(row)] = row
    return torch.from_numpy(table)
