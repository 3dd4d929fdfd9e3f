"""``GRConfig``: one configuration for every backbone built from interchangeable blocks."""

from __future__ import annotations

from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers import PretrainedConfig

from gr.model.blocks import BLOCKS, block_options
from gr.tokenizer.vocabulary import SidVocabulary


@strict
class GRConfig(PretrainedConfig):
    """Sizes, blocks and losses of a ``gr`` decoder.

    Attributes:
        layer_types: one block name per layer; see ``gr.model.blocks.BLOCKS``.
        block_options: per block name, the fields of that block's options dataclass to change.
        hidden_size: width D of the residual stream.
        num_attention_heads, num_key_value_heads, head_dim: attention sizes of every block.
        max_position_embeddings: longest stream; relative distances are cut here.
        dropout: on the embeddings and inside the blocks.
        final_norm: norm before the head: "rms" as in Llama, or "none" as in HSTU.
        embedding_scale: factor on the token embeddings.
        position_embedding: add a learnt vector per position to the token embeddings.
        item_loss: training loss of item tokens: "full" softmax over the vocabulary, "level" softmax
            over the tokens that may come next (the head masks the others), or "sampled" softmax
            against ``num_negatives`` drawn uniformly from the target's level.
        shared_negatives: draw the negatives once per batch instead of once per position.
        head_bias: add a learnt bias per token to the logits.
        l2_normalize: logits are cosines instead of dot products.
        logit_temperature: logits are divided by it, in training and at inference.
        action_loss_weight: weight of action targets beside item targets.
        label_smoothing: share of the target spread over the softmax.
        vocabulary: ``SidVocabulary.to_dict()``; needed by the "level" and "sampled" losses.

    Raises:
        ValueError: an unknown block, option, norm or loss; sizes that do not divide or agree.
    """

    model_type = "gr"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012 -- name set by transformers

    vocab_size: int = 1024
    hidden_size: int = 64
    layer_types: list[str] | None = None
    num_hidden_layers: int | None = None
    block_options: dict[str, dict[str, Any]] | None = None
    num_attention_heads: int = 2
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    dropout: float = 0.0
    final_norm: Literal["rms", "none"] = "rms"
    embedding_scale: float = 1.0
    position_embedding: bool = False
    item_loss: Literal["full", "level", "sampled"] = "full"
    num_negatives: int = 128
    shared_negatives: bool = True
    head_bias: bool = False
    l2_normalize: bool = False
    logit_temperature: float = 1.0
    action_loss_weight: float = 1.0
    label_smoothing: float = 0.0
    vocabulary: dict[str, Any] | None = None
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is None:
            self.layer_types = ["hstu"] * (self.num_hidden_layers or 2)
        elif self.num_hidden_layers not in (None, len(self.layer_types)):
            raise ValueError(
                f"num_hidden_layers: {self.num_hidden_layers}, wanted None or the number of "
                f"layer_types, {len(self.layer_types)}"
            )
        self.num_hidden_layers = len(self.layer_types)
        self.block_options = self.block_options or {}
        if self.head_dim is None:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"num_attention_heads: {self.num_attention_heads}, wanted a divisor of "
                    f"hidden_size {self.hidden_size}, or a head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        # Here too, and first: what `strict` raises for a refusal is no ValueError.
        self.validate_blocks()
        super().__post_init__(**kwargs)

    def validate_layer_type(self) -> None:
        """Our layer types name blocks; the library's own list of attention kinds does not apply."""

    def validate_blocks(self) -> None:
        for name in [*(self.layer_types or ()), *(self.block_options or ())]:
            if name not in BLOCKS:
                raise ValueError(f"layer_types: unknown block {name!r}, wanted one of {[*BLOCKS]}")
        for name in self.block_options or ():
            block_options(name, self)
        for name, value, wanted in (
            ("item_loss", self.item_loss, ("full", "level", "sampled")),
            ("final_norm", self.final_norm, ("rms", "none")),
        ):
            if value not in wanted:
                raise ValueError(f"{name}: {value!r}, wanted one of {wanted}")
        if self.logit_temperature <= 0:
            raise ValueError(
                f"logit_temperature: {self.logit_temperature}, wanted a positive number"
            )
        if self.item_loss != "full" and self.vocabulary is None:
            raise ValueError(
                f"item_loss: {self.item_loss!r} needs 'vocabulary' (SidVocabulary.to_dict())"
            )
        if self.vocabulary is not None:
            end = SidVocabulary.from_dict(self.vocabulary).end
            if self.vocab_size < end:
                raise ValueError(
                    f"vocab_size: {self.vocab_size}, wanted at least the {end} of 'vocabulary'"
                )
        if "transformer" in (self.layer_types or ()) and (self.head_dim or 0) % 2:
            raise ValueError(
                f"head_dim: {self.head_dim}, wanted an even number: rotary positions turn pairs"
            )
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError(
                f"num_attention_heads: {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
