"""Blocks against the stock library and against a literal transcription of the formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gr.model import GRConfig, GRForCausalLM
from gr.model.blocks.hstu import HSTUBlock, HSTUOptions
from gr.model.layout import causal_layout


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_transformer_equals_llama_with_copied_weights(kv_heads: int) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "initializer_range": 0.3,
    }
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, pad_token_id=0, **sizes)).eval()
    own = GRForCausalLM(
        GRConfig(layer_types=["transformer"] * 3, tie_word_embeddings=False, **sizes)
    ).eval()
    renamed = {
        name.replace("self_attn.", "").replace("mlp.", ""): value
        for name, value in llama.state_dict().items()
    }
    own.load_state_dict(renamed)
    ids = torch.randint(1, 50, (3, 17))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = llama(
        input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)
    )
    got = own(input_ids=ids, attention_mask=mask)
    seen = mask.bool()
    torch.testing.assert_close(got.logits[seen], expected.logits[seen], atol=1e-5, rtol=1e-5)


def literal_hstu(block: HSTUBlock, x_ND: Tensor, time_N: Tensor, asked: int) -> Tensor:
    """HSTU formulas 1-3 for one row, one token, one head at a time."""
    options, heads, size = block.options, block.num_heads, block.head_dim
    count, width = x_ND.shape
    inner = heads * size

    def norm(x: Tensor, module: torch.nn.LayerNorm) -> Tensor:
        out = (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + 1e-6)
        return out * module.weight + module.bias if options.affine_norm else out

    u, v, q, k = (torch.zeros(count, inner, dtype=x_ND.dtype) for _ in range(4))
    for i in range(count):
        f = block.uvqk_proj.weight @ norm(x_ND[i], block.input_norm)
        parts = [f[n * inner : (n + 1) * inner] for n in range(4)]
        u[i] = parts[0] * torch.sigmoid(parts[0])
        if options.activation == "uvqk":
            parts = [p * torch.sigmoid(p) for p in parts]
        v[i], q[i], k[i] = parts[1:]
    out = torch.zeros(count, width, dtype=x_ND.dtype)
    for i in range(count):
        following = asked if i == count - 1 else int(time_N[i + 1])
        attended = torch.zeros(inner, dtype=x_ND.dtype)
        for h in range(heads):
            at = slice(h * size, (h + 1) * size)
            exponentials = []
            for j in range(i + 1):
                score = q[i, at] @ k[j, at]
                if options.scale_scores:
                    score = score / math.sqrt(size)
                if block.position_bias is not None:
                    score = score + block.position_bias[i - j]
                if block.time_bias is not None:
                    gap = max(1, abs(following - int(time_N[j])))
                    bucket = min(options.num_time_buckets, math.floor(math.log(gap) / 0.301))
                    score = score + block.time_bias[bucket]
                if options.attention == "softmax":
                    exponentials.append(torch.exp(score))
                else:
                    attended[at] += score * torch.sigmoid(score) / options.norm_length * v[j, at]
            for j, exponential in enumerate(exponentials):
                attended[at] += exponential / sum(exponentials) * v[j, at]
        gated = u[i] * norm(attended, block.output_norm)
        if options.concat_output:
            gated = torch.cat([u[i], attended, gated])
        out[i] = x_ND[i] + block.o_proj.weight @ gated + block.o_proj.bias
    return out


FLAGS = [
    HSTUOptions(norm_length=7.0),
    HSTUOptions.ranking(norm_length=7.0),
    HSTUOptions(norm_length=7.0, activation="u"),
    HSTUOptions(norm_length=7.0, affine_norm=True),
    HSTUOptions(norm_length=7.0, scale_scores=True),
    HSTUOptions(norm_length=7.0, bias="position"),
    HSTUOptions(norm_length=7.0, bias="none"),
    HSTUOptions(norm_length=7.0, concat_output=True),
    HSTUOptions(norm_length=7.0, attention="softmax"),
    HSTUOptions(norm_length=7.0, attention="softmax", bias="position", scale_scores=True),
]


@pytest.mark.parametrize("options", FLAGS, ids=range(len(FLAGS)))
@torch.no_grad()
def test_hstu_equals_its_transcription(options: HSTUOptions) -> None:
    torch.manual_seed(1)
    config = GRConfig(hidden_size=12, num_attention_heads=2, head_dim=5, max_position_embeddings=9)
    block = HSTUBlock(config, options, 0).double().eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x_BND = torch.randn(2, 9, 12, dtype=torch.float64)
    time_BN = 1_650_000_000 + torch.randint(0, 200_000, (2, 9)).cumsum(1)
    asked = time_BN[:, -1] + 12_345
    layout = causal_layout(torch.ones(2, 9), 9, time_BN, asked)
    got = block(x_BND, layout)
    for row in range(2):
        expected = literal_hstu(block, x_BND[row], time_BN[row], int(asked[row]))
        torch.testing.assert_close(got[row], expected, atol=1e-10, rtol=1e-10)


@torch.no_grad()
def test_hstu_without_a_clock_has_no_time_bias() -> None:
    torch.manual_seed(2)
    model = GRForCausalLM(GRConfig(vocab_size=30, hidden_size=8, layer_types=["hstu"])).eval()
    ids = torch.randint(1, 30, (1, 6))
    before = model(input_ids=ids).logits
    model.model.layers[0].time_bias.add_(1.0)
    torch.testing.assert_close(model(input_ids=ids).logits, before, atol=0, rtol=0)
    times = torch.arange(6)[None] * 1000
    assert (model(input_ids=ids, timestamps=times).logits - before).abs().max() > 1e-6


@torch.no_grad()
def test_the_time_of_the_request_reaches_the_last_token_only() -> None:
    torch.manual_seed(3)
    model = GRForCausalLM(
        GRConfig(vocab_size=30, hidden_size=8, layer_types=["hstu"] * 2, initializer_range=0.5)
    ).eval()
    ids, times = torch.randint(1, 30, (1, 6)), torch.arange(6)[None] * 1000
    soon = model(input_ids=ids, timestamps=times, request_times=times[:, -1] + 1).logits
    late = model(input_ids=ids, timestamps=times, request_times=times[:, -1] + 10**6).logits
    torch.testing.assert_close(soon[:, :-1], late[:, :-1], atol=0, rtol=0)
    assert (soon[:, -1] - late[:, -1]).abs().max() > 1e-5


def test_millisecond_floats_are_refused() -> None:
    model = GRForCausalLM(GRConfig(vocab_size=30, hidden_size=8, layer_types=["hstu"]))
    ids = torch.randint(1, 30, (1, 6))
    with pytest.raises(ValueError, match=r"timestamps: dtype torch.float32, wanted torch.int64"):
        model(input_ids=ids, timestamps=torch.zeros(1, 6))
    with pytest.raises(ValueError, match=r"timestamps: shape \(1, 5\), wanted \(1, 6\)"):
        model(input_ids=ids, timestamps=torch.zeros(1, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="request_times"):
        model(
            input_ids=ids,
            timestamps=torch.zeros(1, 6, dtype=torch.int64),
            request_times=torch.zeros(2, dtype=torch.int64),
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["hstuu"]}, "unknown block 'hstuu'"),
        ({"block_options": {"hstu": {"norm": 3}}}, "unknown option 'norm'"),
        ({"block_options": {"hstu": {"bias": "time"}}}, "bias: 'time'"),
        ({"block_options": {"hstu": {"norm_length": 0.0}}}, "norm_length: 0.0"),
        ({"final_norm": "layer"}, "final_norm"),
        ({"item_loss": "level"}, "needs 'vocabulary'"),
        ({"logit_temperature": 0.0}, "logit_temperature: 0.0"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 4}, "not a multiple"),
    ],
)
def test_a_wrong_configuration_names_its_fault(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        GRConfig(**changes)


def test_silu_attention_is_not_a_softmax() -> None:
    # Twice the same history must raise the score mass: the strength of a preference is kept.
    score = torch.ones(4)
    assert F.silu(score).sum() == 2 * F.silu(score[:2]).sum()
