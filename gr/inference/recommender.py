"""The face of the library: histories in, scored items out."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gr.data.whole_file import whole_file
from gr.inference.beam_options import BeamOptions
from gr.inference.branches import Backbone, Prefix
from gr.inference.constraint import RowFilter
from gr.inference.histories import UNKNOWN_ACTION, EncodedRow, History, HistoryEncoder, Report
from gr.inference.scored import Scored
from gr.inference.serving import Allowed, Items, Permitted, ServedCatalog, Wanted, padded_rows
from gr.inference.session import Session
from gr.model import GRConfig
from gr.model import register as register_model
from gr.tokenizer import Catalog, SemanticIdTokenizer
from gr.tokenizer import register as register_tokenizer
from gr.tokenizer.trie import ItemTrie

IntArray = npt.NDArray[np.int64]
T = TypeVar("T")

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
        default_action: what ``rank`` and ``recommend`` score when no action is named. None: "like"
            if the vocabulary has it, else its only action if it has one, else the action must be
            named.
        missing_action: stands in for the action of an event of a history that has none: an action,
            or "[UNK]", which a model trained on bare windows knows. None: the default action,
            "[UNK]" where there is none.
        max_events: most recent events of a history that the model reads; None: all that fit.
        batch_size: users read at once.

    Attributes:
        last_report: what the last call skipped, see `Report`.

    Raises:
        ValueError: no catalogue, an action that the vocabulary does not have, or a model too short
            for one event.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: SemanticIdTokenizer,
        catalog: Catalog | None = None,
        trie: ItemTrie | None = None,
        default_action: str | None = None,
        missing_action: str | None = None,
        max_events: int | None = None,
        batch_size: int = 32,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: wanted at least 1")
        self.model, self.batch_size = model, batch_size
        self.vocabulary = tokenizer.vocabulary
        self.backbone = Backbone(model)
        actions = self.vocabulary.actions
        if default_action is None:
            default_action = "like" if "like" in actions else None
            default_action = actions[0] if len(actions) == 1 else default_action
        elif default_action not in actions:
            raise ValueError(f"default_action is {default_action!r}: wanted one of {actions}")
        if missing_action is None:
            missing_action = UNKNOWN_ACTION if default_action is None else default_action
        self.default_action, self.missing_action = default_action, missing_action
        self._given_max_events = max_events
        items = catalog if catalog is not None else tokenizer.catalog
        if items is None:
            raise ValueError("the tokenizer has no catalogue: wanted one in catalog=")
        self._served = self._serve(tokenizer, items, trie)
        self.last_report = Report()

    def _serve(
        self, tokenizer: SemanticIdTokenizer, catalog: Catalog, trie: ItemTrie | None
    ) -> ServedCatalog:
        if catalog is not tokenizer.catalog:
            # A copy: another recommender may answer with the same tokenizer and its own items.
            tokenizer = copy.copy(tokenizer)
            tokenizer.catalog = catalog
        if trie is None:
            trie = ItemTrie.from_catalog(catalog, self.vocabulary)
        elif trie.num_items != len(catalog):
            raise ValueError(f"trie has {trie.num_items} items: the catalogue has {len(catalog)}")
        trie = trie.to(self.backbone.device)
        return ServedCatalog(
            tokenizer, trie, self.backbone, self.missing_action, self._given_max_events
        )

    def swap_catalog(self, catalog: Catalog, trie: ItemTrie | None = None) -> None:
        """Answer with other items from the next question on.

        The new trie is built before anything changes. Questions that are being answered in other
        threads go on with the catalogue they began with, and sessions take up the new one at their
        next question without reading their histories again.

        Args:
            catalog: in the vocabulary of the model: more or fewer items, never other levels.
            trie: of that catalogue; None builds it.

        Raises:
            ValueError: codes that the vocabulary does not have, or a trie of other items. The old
                catalogue then stays.
        """
        self._served = self._serve(self.tokenizer, catalog, trie)

    @property
    def served(self) -> ServedCatalog:
        """The catalogue that the next question is answered from."""
        return self._served

    @property
    def tokenizer(self) -> SemanticIdTokenizer:
        return self._served.tokenizer

    @property
    def catalog(self) -> Catalog:
        return self._served.catalog

    @property
    def trie(self) -> ItemTrie:
        return self._served.trie

    @property
    def encoder(self) -> HistoryEncoder:
        return self._served.encoder

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
        """Write model, tokenizer, catalogue, trie and this class's own three options."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        self.trie.save(path / TRIE_NAME)
        options = {
            "default_action": self.default_action,
            "missing_action": self.missing_action,
            "max_events": self._given_max_events,
        }
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
        options: BeamOptions | None = None,
    ) -> list[list[Scored]]:
        """The k most probable next items of every user, best first.

        Args:
            histories: one per user.
            k: items per user; a user for whom fewer are left gets those.
            num_beams: beam width, at least k; None: twice k, at least 50.
            exclude_seen: leave out the items of the user's own (whole) history.
            allowed: the only items that may come out: a collection of ids or a `CatalogSubset` for
                all users, or one such (or None: all) per user.
            request_times: seconds at which each user asks; None is the time of the last event.
            options: a temperature, diversity, or sampling in place of the best; see `BeamOptions`.
                The same call samples the same: a history by its place in the call.

        Returns:
            Scored lists; the score is the log-probability of the item's semantic ID. Items that
            share an ID share the score and come in order of popularity.

        Raises:
            ValueError: k below 1, fewer beams than k, or malformed histories.
        """
        batch = _Batch(self, histories, request_times)
        served, permitted = batch.served, batch.allowed(allowed)

        def answer(prefix: Prefix, numbers: IntArray) -> list[list[Scored]]:
            keep = batch.filter(numbers, permitted, exclude_seen)
            return served.retrieve(prefix, keep, k, num_beams, options, numbers)

        return batch.answers(answer, served.room(num_beams, k))

    def rank(
        self,
        histories: Sequence[History],
        candidates: Items | Sequence[Items],
        action: Wanted = None,
        request_times: Sequence[int | None] | None = None,
        microbatch: int = 64,
    ) -> list[list[Scored]]:
        """Candidates of every user by the probability of an action, best first.

        Args:
            histories: one per user.
            candidates: item ids for all users, or one such collection per user.
            action: the action whose probability is wanted, or a weight for each of several, whose
                weighted sum is then the score; None: ``default_action``.
            request_times: seconds at which each user asks; None is the time of the last event.
            microbatch: candidates of a user in one pass; bounds the memory, changes no score.

        Returns:
            Scored lists; the score is p(action | history, item), normalised over the actions of
            the vocabulary. Ties keep the given order.

        Raises:
            ValueError: a stream with fewer than two actions, an unknown action, or malformed
                histories.
        """
        batch = _Batch(self, histories, request_times)
        weights = batch.served.weights(action, self.default_action)
        rows = batch.candidates(candidates)

        def answer(prefix: Prefix, numbers: IntArray) -> list[list[Scored]]:
            return batch.served.rank(prefix, [rows[i] for i in numbers], weights, microbatch)

        return batch.answers(answer, microbatch * batch.served.trie.levels)

    def action_probabilities(
        self,
        histories: Sequence[History],
        candidates: Items | Sequence[Items],
        request_times: Sequence[int | None] | None = None,
        microbatch: int = 64,
    ) -> list[Tensor]:
        """p(action | history, item) of every candidate and every action, from one pass.

        Args:
            histories, candidates, request_times, microbatch: as in ``rank``.

        Returns:
            For each history float32 [C, A] on the CPU: rows in the order of its candidates (NaN for
            items that the catalogue does not have), columns in the order of
            ``vocabulary.actions``; a row sums to one.

        Raises:
            ValueError: as ``rank``.
        """
        batch = _Batch(self, histories, request_times)
        served = batch.served
        served.weights(dict.fromkeys(served.actions, 1.0), None)
        rows = batch.candidates(candidates, drop_unknown=False)

        def answer(prefix: Prefix, numbers: IntArray) -> list[Tensor]:
            row_BC = padded_rows([rows[i] for i in numbers]).to(served.trie.device)
            log_probs_BCA = served.action_log_probs(prefix, row_BC, microbatch)
            known_BC1 = (row_BC >= 0)[..., None]
            probs_BCA = torch.where(known_BC1, log_probs_BCA.exp(), torch.nan).cpu()
            return [p[: len(rows[i])] for i, p in zip(numbers, probs_BCA, strict=True)]

        return batch.answers(answer, microbatch * served.trie.levels)

    def recommend(
        self,
        histories: Sequence[History],
        k: int = 10,
        action: Wanted = None,
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
            action: an action, or positive weights of several, whose weighted sum of probabilities
                then stands for p(action); None: ``default_action``.
            action_weight: weight of the action beside the item.
            exclude_seen, allowed, request_times: as in ``retrieve``.

        Returns:
            Scored lists, best first; the score is the sum above.

        Raises:
            ValueError: as ``retrieve``; an unknown action, or none where there is no default.
        """
        batch = _Batch(self, histories, request_times)
        served, permitted = batch.served, batch.allowed(allowed)
        weights = served.event_weights(action, self.default_action)

        def answer(prefix: Prefix, numbers: IntArray) -> list[list[Scored]]:
            keep = batch.filter(numbers, permitted, exclude_seen)
            return served.recommend(prefix, keep, k, weights, action_weight)

        return batch.answers(answer, served.room(None, served.pool(k)))

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
        batch = _Batch(self, histories, request_times)
        scores = torch.empty(len(histories), len(batch.served.catalog))
        for numbers, prefix in batch.prefixes(0):
            scores[torch.from_numpy(numbers)] = batch.served.score_catalog(prefix, chunk).cpu()
        batch.finish()
        return scores

    def session(self, history: History = (), request_time: int | None = None) -> Session:
        """One user's history, read once: for several questions, and for events still to come."""
        return Session(self, history, request_time)


class _Batch:
    """Histories of one call, with the catalogue and the report that the call began with."""

    def __init__(
        self,
        recommender: Recommender,
        histories: Sequence[History],
        request_times: Sequence[int | None] | None,
    ) -> None:
        self.recommender, self.served = recommender, recommender.served
        self.report = Report()
        self.rows: list[EncodedRow] = self.served.encoder.encode(
            histories, request_times, self.report
        )

    def allowed(self, given: Allowed) -> Permitted:
        return self.served.allowed(given, len(self.rows), self.report)

    def candidates(self, given: Any, drop_unknown: bool = True) -> list[IntArray]:
        return self.served.candidates(given, len(self.rows), self.report, drop_unknown)

    def filter(self, numbers: IntArray, allowed: Permitted, exclude_seen: bool) -> RowFilter:
        if allowed is not None and len(allowed) > 1:
            allowed = [allowed[i] for i in numbers]
        return self.served.filter([self.rows[i].seen for i in numbers], allowed, exclude_seen)

    def prefixes(self, room: int) -> Iterator[tuple[IntArray, Prefix]]:
        return self.served.encoder.batches(self.rows, self.recommender.batch_size, room)

    def answers(self, answer: Callable[[Prefix, IntArray], list[T]], room: int) -> list[T]:
        """One answer per history, in the order of the call."""
        found: dict[int, T] = {}
        for numbers, prefix in self.prefixes(room):
            found.update(zip(numbers.tolist(), answer(prefix, numbers), strict=True))
        self.finish()
        return [found[number] for number in range(len(self.rows))]

    def finish(self) -> None:
        self.recommender.last_report = self.report
        self.report.warn()
