"""From hidden states to logits over the vocabulary.

Legend: B batch, N tokens, D width, V vocabulary, G groups of tokens (specials, each level of each
type, actions).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gr.kernels.item_softmax import L2_EPS
from gr.tokenizer.vocabulary import SidVocabulary


def token_logits(
    hidden_D: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None = None,
    *,
    l2_normalize: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """Logits [..., V]: dot products, or cosines, over the temperature, plus a bias per token.

    Cosines are taken in float32: in half precision a temperature of .05 turns the rounding of a
    norm into whole units of logit.
    """
    if not l2_normalize:
        logits = F.linear(hidden_D, weight_VD)
    else:
        hidden_D = F.normalize(hidden_D.float(), dim=-1, eps=L2_EPS)
        weight_VD = F.normalize(weight_VD.float(), dim=-1, eps=L2_EPS)
        with torch.autocast(hidden_D.device.type, enabled=False):
            logits = F.linear(hidden_D, weight_VD)
    if temperature != 1.0:
        logits = logits / temperature
    return logits if bias_V is None else logits + bias_V


def follow_table(vocabulary: SidVocabulary) -> Tensor:
    """Which tokens may come after a token of each group, bool [G, V].

    A native stream is rigid: the levels of an item in order, its action (if the stream has
    actions), the next item. Special tokens, [UNK] in an action's place among them, are followed
    by an item.
    """
    group_V = torch.from_numpy(vocabulary.groups())
    firsts = [vocabulary.group(kind, 0) for kind in vocabulary.types]
    num_groups = int(group_V.max()) + 1
    starts_item = torch.isin(group_V, torch.tensor(firsts))
    is_action = torch.zeros_like(starts_item)
    is_action[torch.from_numpy(vocabulary.action_tokens)] = True
    table_GV = starts_item.repeat(num_groups, 1)
    for kind, sizes in vocabulary.level_sizes.items():
        for level in range(len(sizes)):
            group = vocabulary.group(kind, level)
            if level + 1 < len(sizes):
                table_GV[group] = group_V == group + 1
            elif vocabulary.actions:
                table_GV[group] = is_action
    return table_GV
