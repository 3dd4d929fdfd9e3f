"""What a beam search may do besides keeping the best: temper, spread over prefixes, sample.

Legend: B users, w beams, S candidates of a row (the continuations of all its beams), W beams kept.

Sampling is stochastic beam search (Kool, van Hoof and Welling, "Stochastic Beams and Where to Find
Them", ICML 2019): every semantic ID has the key ``log q + Gumbel noise``, the IDs of the W largest
keys are a sample without replacement in the order of drawing, and a prefix has the largest key
below it. The search goes top down: given the key of a prefix, the keys of its children are drawn
under the condition that their largest is that key. So beams that are kept by key are exact, not a
heuristic: the first k of them are the same for any width of k or more.

``q`` is the distribution of a walk down the trie: at each prefix, a token is drawn among those with
a permitted item below, in proportion to the model's (tempered) probabilities. Probability that the
model puts elsewhere plays no part. (The model's probabilities renormalised once, over all permitted
items, is another distribution: it depends on how much forbidden probability hides below each
prefix, which no beam can know.)

The noise of a prefix is a hash of the seed, the request's number and the prefix's tokens. It
depends on nothing else: not on the batch, the width, the device or the rest of the catalogue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True)
class BeamOptions:
    """How beams are chosen.

    Attributes:
        temperature: the logits are divided by it before the log-softmax over the full vocabulary;
            the scores are then the tempered log-probabilities. 1e-30 to 1e30.
        max_per_prefix: at most so many *items* of a row's answer begin with the same
            ``prefix_levels`` tokens. An item with fewer tokens counts with those that share its
            whole semantic ID. Beams are held to it while decoding, so that the places go to other
            prefixes. None: no limit.
        prefix_levels: 1 up to the trie's levels.
        seed: draw semantic IDs at random, without replacement, instead of taking the best. The
            order is that of drawing, the scores stay log-probabilities. None: take the best.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 1.0
    max_per_prefix: int | None = None
    prefix_levels: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 1e-30 <= self.temperature <= 1e30:
            raise ValueError(f"temperature is {self.temperature}: wanted 1e-30 to 1e30")
        if self.max_per_prefix is not None and self.max_per_prefix < 1:
            raise ValueError(f"max_per_prefix is {self.max_per_prefix}: wanted at least 1, or None")
        if self.prefix_levels < 1:
            raise ValueError(f"prefix_levels is {self.prefix_levels}: wanted at least 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}: wanted 0 to 2^63 - 1, or None")


class GumbelBeams:
    """The beams of a stochastic beam search: by prefix, the largest key below, log q and a hash.

    Keys and log q are float64 [B, w]; the hash of seed, request and tokens is int64.
    """

    def __init__(self, seed: int, request_B: Tensor) -> None:
        start = _mix(torch.tensor(seed, device=request_B.device))
        hash_Bw = _mix(start ^ request_B)[:, None]
        # Which keys are large and how large the largest is are independent: it may as well be 0.
        zero_Bw = torch.zeros(hash_Bw.shape, dtype=torch.float64, device=request_B.device)
        self._beams = self._grown = (zero_Bw, zero_Bw, hash_Bw)

    def grow(self, gain_BS: Tensor, token_BS: Tensor, beam_BS: Tensor) -> Tensor:
        """Keys of all candidates, float64 [B, S]; ``keep`` then takes some of them.

        ``gain_BS`` is the model's log-probability of each candidate's token after its beam
        ``beam_BS``, -inf where nothing permitted is below; such a candidate has the key -inf.
        """
        key_BS, log_q_BS, hash_BS = (of_beam(value, beam_BS) for value in self._beams)
        gain_BS = gain_BS.double()
        width = self._beams[0].shape[1]
        log_q_BS = log_q_BS + gain_BS - logsumexp_of_group(gain_BS, beam_BS, width)
        log_q_BS = log_q_BS.masked_fill_(gain_BS == -torch.inf, -torch.inf)
        hash_BS = _mix(hash_BS + (token_BS + 1) * _GOLDEN)
        drawn_BS = log_q_BS + gumbel_noise(hash_BS)
        key_BS = conditioned(drawn_BS, max_of_group(drawn_BS, beam_BS, width), key_BS)
        self._grown = (key_BS, log_q_BS, hash_BS)
        return key_BS

    def keep(self, best_BW: Tensor) -> None:
        """Go on with some of the candidates, int64 positions in [0, S)."""
        key, log_q, bits = (value.gather(1, best_BW) for value in self._grown)
        self._beams = (key, log_q, bits)


def of_beam(value_Bw: Tensor, beam_BS: Tensor) -> Tensor:
    """Each candidate's beam's value: [B, S]."""
    if value_Bw.shape[1] == 1:
        return value_Bw.expand_as(beam_BS)
    return value_Bw.gather(1, beam_BS)


def conditioned(drawn: Tensor, top: Tensor, largest: Tensor) -> Tensor:
    """Independent Gumbel variables, of which ``top`` is the largest, as if that were ``largest``.

    Kool et al. 2019, appendix B.3: the numerically stable form of
    ``-log(exp(-largest) - exp(-top) + exp(-drawn))``. -inf stays -inf.
    """
    below = (drawn - top).masked_fill_(drawn == -torch.inf, -torch.inf)
    # log(1 - exp(x)) for x <= 0.
    rest = torch.where(below > -math.log(2), (-below.expm1()).log(), (-below.exp()).log1p())
    v = largest - drawn + rest
    moved = largest - v.clamp_min(0) - (-v.abs()).exp().log1p()
    return moved.masked_fill_(drawn == -torch.inf, -torch.inf)


def max_of_group(value_BS: Tensor, group_BS: Tensor, groups: int) -> Tensor:
    """For each entry, the largest value of its group (0 .. groups - 1): [B, S]."""
    top = value_BS.new_full((len(value_BS), groups), -torch.inf)
    return of_beam(top.scatter_reduce_(1, group_BS, value_BS, "amax"), group_BS)


def logsumexp_of_group(value_BS: Tensor, group_BS: Tensor, groups: int) -> Tensor:
    """For each entry, the logsumexp of its group's values: [B, S]."""
    top_BS = max_of_group(value_BS, group_BS, groups)
    top_BS = top_BS.masked_fill(top_BS == -torch.inf, 0.0)
    total = value_BS.new_zeros(len(value_BS), groups)
    total = total.scatter_add_(1, group_BS, (value_BS - top_BS).exp())
    return of_beam(total.log_(), group_BS) + top_BS


def gumbel_noise(bits: Tensor) -> Tensor:
    """Standard Gumbel values, float64, from int64 of 64 random bits each."""
    # 52 bits and a half: never 0 or 1, also after rounding.
    uniform = (_shifted(bits, 12).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()


def _mix(bits: Tensor) -> Tensor:
    """A permutation of 64-bit integers that looks random (the finalizer of SplitMix64)."""
    bits = (bits ^ _shifted(bits, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ _shifted(bits, 27)) * (0x94D049BB133111EB - 2**64)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    # torch shifts the sign in; the bits wanted there are zeros.
    return (bits >> by) & ((1 << (64 - by)) - 1)


def sum_before_in_group(group_BS: Tensor, weight_BS: Tensor) -> Tensor:
    """For each entry, the weights of the earlier entries of its group: int64 [B, S].

    With weights of 1 that is an entry's place within its group.
    """
    # Groups side by side, each in its own order.
    order_BS = group_BS.argsort(dim=1, stable=True)
    sorted_BS = group_BS.gather(1, order_BS)
    weight_BS = weight_BS.gather(1, order_BS)
    before_BS = weight_BS.cumsum(1) - weight_BS
    starts_BS = torch.ones_like(sorted_BS, dtype=torch.bool)
    starts_BS[:, 1:] = sorted_BS[:, 1:] != sorted_BS[:, :-1]
    # Sums never fall, so the last start's is the largest so far.
    start_BS = torch.where(starts_BS, before_BS, 0).cummax(1).values
    return torch.empty_like(before_BS).scatter_(1, order_BS, before_BS - start_BS)


def spread_topk(
    key_BS: Tensor, group_BS: Tensor, cap: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best ``width`` candidates, those first that are among the best ``cap`` of their group.

    Places that are then left go to the others: a beam more never hurts, and wide enough beams stay
    exact.

    Returns:
        key, position int64 and whether the candidate is beyond its group's cap, each [B, width].
    """
    order_BS = key_BS.argsort(dim=1, descending=True, stable=True)
    place_BS = sum_before_in_group(group_BS.gather(1, order_BS), torch.ones_like(order_BS))
    beyond_BS = place_BS >= cap
    dead_BS = key_BS.gather(1, order_BS) == -torch.inf
    tier_BS = torch.where(dead_BS, 2, beyond_BS.long())
    chosen_BW = tier_BS.argsort(dim=1, stable=True)[:, :width]
    best_BW = order_BS.gather(1, chosen_BW)
    return key_BS.gather(1, best_BW), best_BW, beyond_BS.gather(1, chosen_BW)
