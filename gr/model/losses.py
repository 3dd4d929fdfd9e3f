"""Losses of a token stream: full softmax, per-level softmax, sampled softmax.

All three train the same logits (``gr.model.heads.token_logits``); they differ in the tokens that a
target competes with. Legend: T targets, D width, V vocabulary, R negatives.

Source: HSTU appendix D and its public code (sampled softmax with uniform negatives, cosines,
temperature); TIGER and its successors (softmax per level).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gr.kernels.item_softmax import item_softmax
from gr.model.heads import token_logits
from gr.tokenizer.vocabulary import SidVocabulary


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits: rows of the output matrix and how they are scored."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    l2_normalize: bool = False
    temperature: float = 1.0

    def logits(self, hidden_D: Tensor) -> Tensor:
        """See ``gr.model.heads.token_logits``."""
        return token_logits(
            hidden_D,
            self.weight_VD,
            self.bias_V,
            l2_normalize=self.l2_normalize,
            temperature=self.temperature,
        )

    def rows(self, index: slice | Tensor) -> Head:
        """The head over some of its tokens."""
        bias = None if self.bias_V is None else self.bias_V[index]
        return replace(self, weight_VD=self.weight_VD[index], bias_V=bias)


def full_softmax(hidden_TD: Tensor, head: Head, target_T: Tensor, smooth: float = 0.0) -> Tensor:
    """Cross-entropy of each target against every token of the head, float32 [T]."""
    return item_softmax(
        hidden_TD,
        head.weight_VD,
        target_T,
        head.bias_V,
        l2_normalize=head.l2_normalize,
        temperature=head.temperature,
        smooth=smooth,
    )


def sampled_softmax(
    hidden_TD: Tensor, head: Head, target_T: Tensor, num_negatives: int, shared: bool
) -> Tensor:
    """Cross-entropy of each target against uniform negatives, float32 [T].

    A negative equal to the target does not count. With ``shared`` all targets meet the same R
    negatives (one matmul); otherwise each draws its own.
    """
    shape = (num_negatives,) if shared else (len(target_T), num_negatives)
    negative = torch.randint(len(head.weight_VD), shape, device=target_T.device)
    return item_softmax(
        hidden_TD,
        head.weight_VD,
        target_T,
        head.bias_V,
        negative,
        l2_normalize=head.l2_normalize,
        temperature=head.temperature,
    )


class _Groups(NamedTuple):
    """Group of each token, -1 for none, its place in it; rows, size and kind of each group."""

    of_token: Tensor
    place: Tensor
    rows: list[tuple[slice | Tensor, int, bool]]


class StreamLoss:
    """The training loss of a native stream: item levels and actions, each against its peers.

    Args:
        item_loss: "full", "level" or "sampled"; see ``GRConfig``.
        vocabulary: token groups; None is allowed for the full softmax.
        action_weight: weight of action targets.
    """

    def __init__(
        self,
        item_loss: str,
        vocabulary: SidVocabulary | None,
        *,
        action_weight: float,
        smooth: float = 0.0,
        num_negatives: int = 128,
        shared_negatives: bool = True,
    ) -> None:
        self.item_loss, self.vocabulary = item_loss, vocabulary
        self.action_weight, self.smooth = action_weight, smooth
        self.num_negatives, self.shared_negatives = num_negatives, shared_negatives
        self._known: _Groups | None = None

    def __call__(
        self,
        hidden_TD: Tensor,
        head: Head,
        target_T: Tensor,
        num_targets: Tensor | int | None = None,
    ) -> Tensor:
        """Weighted sum over the targets divided by ``num_targets`` (by T where it is None).

        Gradient accumulation passes the number of targets of the whole step, so that the parts add
        up to the loss of one large batch. No target at all gives 0 with zero gradients.
        """
        if target_T.numel() == 0:
            return hidden_TD.sum() * 0.0 + head.weight_VD.sum() * 0.0
        if self.item_loss == "full" and self.vocabulary is None:
            total = full_softmax(hidden_TD, head, target_T, self.smooth).sum()
        elif self.item_loss == "full":
            weight_T = torch.where(self._is_action(target_T), self.action_weight, 1.0)
            total = (full_softmax(hidden_TD, head, target_T, self.smooth) * weight_T).sum()
        else:
            total = self._by_group(hidden_TD, head, target_T)
        return total / (target_T.numel() if num_targets is None else num_targets)

    def _is_action(self, target_T: Tensor) -> Tensor:
        assert self.vocabulary is not None
        return target_T >= self.vocabulary.first_action

    def _by_group(self, hidden_TD: Tensor, head: Head, target_T: Tensor) -> Tensor:
        groups = self._groups(target_T.device)
        group_T, place_T = groups.of_token[target_T], groups.place[target_T]
        total = hidden_TD.sum() * 0.0
        for number, (rows, size, is_action) in enumerate(groups.rows):
            chosen = (group_T == number).nonzero()[:, 0]
            if chosen.numel() == 0:
                continue
            hidden, place, peers = hidden_TD[chosen], place_T[chosen], head.rows(rows)
            if self.item_loss == "sampled" and not is_action and size > self.num_negatives:
                loss_T = sampled_softmax(
                    hidden, peers, place, self.num_negatives, self.shared_negatives
                )
            else:
                loss_T = full_softmax(hidden, peers, place, self.smooth)
            total = total + loss_T.sum() * (self.action_weight if is_action else 1.0)
        return total

    def _groups(self, device: torch.device) -> _Groups:
        if self._known is None or self._known.place.device != device:
            self._known = self._make_groups(device)
        return self._known

    def _make_groups(self, device: torch.device) -> _Groups:
        """The sets of tokens that compete: what may start an item, each later level, the actions.

        The first levels of all types compete with each other, since any of them may come next.
        """
        assert self.vocabulary is not None
        firsts: list[Tensor] = []
        sets: list[tuple[Tensor, bool]] = []
        for kind, sizes in self.vocabulary.level_sizes.items():
            for level, size in enumerate(sizes):
                start = self.vocabulary.level_start(kind, level)
                if level == 0:
                    firsts.append(torch.arange(start, start + size))
                else:
                    sets.append((torch.arange(start, start + size), False))
        sets.insert(0, (torch.cat(firsts), False))
        if self.vocabulary.actions:
            sets.append((torch.from_numpy(self.vocabulary.action_tokens), True))
        of_token = torch.full((self.vocabulary.end,), -1)
        place = torch.zeros_like(of_token)
        rows: list[tuple[slice | Tensor, int, bool]] = []
        for number, (tokens, is_action) in enumerate(sets):
            of_token[tokens], place[tokens] = number, torch.arange(len(tokens))
            first, last = int(tokens[0]), int(tokens[-1])
            one_piece = last - first + 1 == len(tokens)
            chosen = slice(first, last + 1) if one_piece else tokens.to(device)
            rows.append((chosen, len(tokens), is_action))
        return _Groups(of_token.to(device), place.to(device), rows)
