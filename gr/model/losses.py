"""Losses of a token stream: full softmax, per-level softmax, sampled softmax.

All three train the same logits (``gr.model.heads.token_logits``); they differ in the tokens that a
target competes with. Legend: T targets, D width, V vocabulary, R negatives.

Source: HSTU appendix D and its public code (sampled softmax with uniform negatives, cosines,
temperature); TIGER and its successors (softmax per level).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gr.model.heads import token_logits
from gr.tokenizer.vocabulary import SidVocabulary


def full_softmax(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    l2: bool,
    temperature: float,
    smooth: float,
) -> Tensor:
    """Cross-entropy of each target against every row of ``weight_VD``, float32 [T]."""
    logits_TV = token_logits(hidden_TD, weight_VD, l2, temperature)
    return F.cross_entropy(logits_TV.float(), target_T, reduction="none", label_smoothing=smooth)


def sampled_softmax(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_T: Tensor,
    l2: bool,
    temperature: float,
    num_negatives: int,
    shared: bool,
) -> Tensor:
    """Cross-entropy of each target against uniform negatives, float32 [T].

    A negative equal to the target is masked out. With ``shared`` all targets meet the same R
    negatives (one matmul); otherwise each draws its own.
    """
    num_rows, num_targets = weight_VD.shape[0], target_T.shape[0]
    shape = (num_negatives,) if shared else (num_targets, num_negatives)
    negative = torch.randint(num_rows, shape, device=target_T.device)
    hidden_TD, weight_VD = hidden_TD.float(), weight_VD.float()
    if l2:
        hidden_TD = F.normalize(hidden_TD, dim=-1, eps=1e-6)
    positive_TD, negative_RD = weight_VD[target_T], weight_VD[negative]
    if l2:
        positive_TD = F.normalize(positive_TD, dim=-1, eps=1e-6)
        negative_RD = F.normalize(negative_RD, dim=-1, eps=1e-6)
    positive_T1 = (hidden_TD * positive_TD).sum(-1, keepdim=True)
    if shared:
        negative_TR = hidden_TD @ negative_RD.T
    else:
        negative_TR = torch.einsum("td,trd->tr", hidden_TD, negative_RD)
    negative_TR = negative_TR.masked_fill(negative == target_T[:, None], -torch.inf)
    logits = torch.cat([positive_T1, negative_TR], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros_like(target_T), reduction="none")


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
        l2: bool,
        temperature: float,
        action_weight: float,
        smooth: float = 0.0,
        num_negatives: int = 128,
        shared_negatives: bool = True,
    ) -> None:
        self.item_loss, self.vocabulary = item_loss, vocabulary
        self.l2, self.temperature, self.smooth = l2, temperature, smooth
        self.action_weight = action_weight
        self.num_negatives, self.shared_negatives = num_negatives, shared_negatives

    def __call__(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        target_T: Tensor,
        num_targets: Tensor | int | None = None,
    ) -> Tensor:
        """Weighted sum over the targets divided by ``num_targets`` (by T where it is None).

        Gradient accumulation passes the number of targets of the whole step, so that the parts add
        up to the loss of one large batch. No target at all gives 0 with zero gradients.
        """
        if target_T.numel() == 0:
            return hidden_TD.sum() * 0.0 + weight_VD.sum() * 0.0
        if self.item_loss == "full" and self.vocabulary is None:
            total = self._full(hidden_TD, weight_VD, target_T).sum()
        elif self.item_loss == "full":
            weight_T = torch.where(self._is_action(target_T), self.action_weight, 1.0)
            total = (self._full(hidden_TD, weight_VD, target_T) * weight_T).sum()
        else:
            total = self._by_group(hidden_TD, weight_VD, target_T)
        return total / (target_T.numel() if num_targets is None else num_targets)

    def _full(self, hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor) -> Tensor:
        return full_softmax(hidden_TD, weight_VD, target_T, self.l2, self.temperature, self.smooth)

    def _is_action(self, target_T: Tensor) -> Tensor:
        assert self.vocabulary is not None
        return target_T >= self.vocabulary.first_action

    def _by_group(self, hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor) -> Tensor:
        total = hidden_TD.sum() * 0.0
        for peers, is_action in self._peers(target_T.device):
            # `peers` is ascending, so a target's place in it is its class among them.
            local_T = torch.searchsorted(peers, target_T).clamp_max(len(peers) - 1)
            chosen = (peers[local_T] == target_T).nonzero()[:, 0]
            if chosen.numel() == 0:
                continue
            hidden, local = hidden_TD[chosen], local_T[chosen]
            contiguous = int(peers[-1] - peers[0]) + 1 == len(peers)
            rows = weight_VD[peers[0] : peers[-1] + 1] if contiguous else weight_VD[peers]
            if self.item_loss == "sampled" and not is_action and len(peers) > self.num_negatives:
                loss_T = sampled_softmax(
                    hidden,
                    rows,
                    local,
                    self.l2,
                    self.temperature,
                    self.num_negatives,
                    self.shared_negatives,
                )
            else:
                loss_T = self._full(hidden, rows, local)
            total = total + loss_T.sum() * (self.action_weight if is_action else 1.0)
        return total

    def _peers(self, device: torch.device) -> list[tuple[Tensor, bool]]:
        """The sets of tokens that compete: what may start an item, each later level, the actions.

        The first levels of all types compete with each other, since any of them may come next.
        """
        assert self.vocabulary is not None
        firsts: list[Tensor] = []
        others: list[tuple[Tensor, bool]] = []
        for kind, sizes in self.vocabulary.level_sizes.items():
            for level, size in enumerate(sizes):
                start = self.vocabulary.level_start(kind, level)
                tokens = torch.arange(start, start + size, device=device)
                if level == 0:
                    firsts.append(tokens)
                else:
                    others.append((tokens, False))
        sets = [(torch.cat(firsts), False), *others]
        if self.vocabulary.actions:
            sets.append((torch.from_numpy(self.vocabulary.action_tokens).to(device), True))
        return sets
