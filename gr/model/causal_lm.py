"""``GRModel`` and ``GRForCausalLM``: the decoder over token streams.

Legend: B batch, N new tokens, K cached and new tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from gr.kernels.dropout import fast_dropout
from gr.model.blocks import build_block
from gr.model.blocks.hstu import HSTUBlock
from gr.model.blocks.transformer import RMSNorm
from gr.model.cache import LayerCache
from gr.model.config import GRConfig
from gr.model.heads import follow_table
from gr.model.hf_cache import CACHE_NAME, cache_length, new_cache
from gr.model.layout import Layout, causal_layout
from gr.model.losses import Head, StreamLoss
from gr.tokenizer.vocabulary import SidVocabulary


class GRPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = GRConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["TransformerBlock", "HSTUBlock"]  # noqa: RUF012 -- read by transformers

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            # Weights that were loaded carry this mark; their padding row is theirs.
            loaded = getattr(module.weight, "_is_hf_initialized", False)
            if module.padding_idx is not None and not loaded:
                nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, (nn.LayerNorm, RMSNorm)):
            if module.weight is not None:
                nn.init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, HSTUBlock):
            # As published; with the small normal of the others a block adds next to nothing.
            nn.init.xavier_uniform_(module.o_proj.weight)
            for table in (module.position_bias, module.time_bias):
                if table is not None:
                    nn.init.normal_(table, std=std)


class GRModel(GRPreTrainedModel):
    """Embeddings, blocks and the final norm."""

    def __init__(self, config: GRConfig) -> None:
        super().__init__(config)
        assert config.layer_types is not None
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size)
            if config.position_embedding
            else None
        )
        self.layers = nn.ModuleList(
            build_block(name, config, layer) for layer, name in enumerate(config.layer_types)
        )
        self.norm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps)
            if config.final_norm == "rms"
            else nn.Identity()
        )
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        timestamps: Tensor | None = None,
        request_times: Tensor | None = None,
        layout: Layout | None = None,
        inputs_embeds: Tensor | None = None,
        cache: DynamicCache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, N, D] of the new tokens; arguments as in ``GRForCausalLM.forward``."""
        cache = kwargs.get("past_key_values") if cache is None else cache
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: wanted exactly one of the two")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        x_BND = inputs_embeds
        if use_cache and cache is None:
            cache = new_cache()
        if layout is None:
            layout = self._layout(x_BND, attention_mask, timestamps, request_times, cache)
        if self.config.embedding_scale != 1.0:
            x_BND = x_BND * self.config.embedding_scale
        if self.embed_positions is not None:
            last = self.config.max_position_embeddings - 1
            x_BND = x_BND + self.embed_positions(layout.position_BQ.clamp_max(last))
        x_BND = fast_dropout(x_BND, self.config.dropout, self.training)
        for index, block in enumerate(self.layers):
            x_BND = block(x_BND, layout, None if cache is None else LayerCache(cache, index))
        kept: dict[str, Any] = {CACHE_NAME: cache} if use_cache else {}
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x_BND), **kept)

    def _layout(
        self,
        x_BND: Tensor,
        attention_mask: Tensor | None,
        timestamps: Tensor | None,
        request_times: Tensor | None,
        cache: DynamicCache | None,
    ) -> Layout:
        num_rows, num_new = x_BND.shape[:2]
        num_keys = num_new + (0 if cache is None else cache_length(cache))
        if attention_mask is None:
            attention_mask = torch.ones(num_rows, num_keys, device=x_BND.device)
        if attention_mask.shape != (num_rows, num_keys):
            raise ValueError(
                f"attention_mask: shape {tuple(attention_mask.shape)}, wanted "
                f"({num_rows}, {num_keys}): cached and new tokens; other visibility goes in layout="
            )
        return causal_layout(attention_mask, num_new, timestamps, request_times)


class GRForCausalLM(GRPreTrainedModel, GenerationMixin):
    """The decoder with a head over the vocabulary of semantic IDs and actions."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 -- read by transformers

    def __init__(self, config: GRConfig) -> None:
        super().__init__(config)
        self.model = GRModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.token_vocabulary = (
            None if config.vocabulary is None else SidVocabulary.from_dict(config.vocabulary)
        )
        self._follow: tuple[Tensor, Tensor] | None = None
        self._loss_made: tuple[object, StreamLoss] | None = None
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        timestamps: Tensor | None = None,
        request_times: Tensor | None = None,
        layout: Layout | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cache: DynamicCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Next-token logits, and the loss where ``labels`` are given.

        Args:
            input_ids: int64 [B, N], the new tokens.
            attention_mask: [B, K], 1 for tokens and 0 for padding on either side.
            position_ids: accepted and ignored: positions follow from the mask, or from ``layout``.
            timestamps: int64 seconds [B, K] of every token's event.
            request_times: int64 seconds [B] at which the token after the last one is asked for;
                the last token's own time where it is None.
            layout: positions, times and visibility spelled out; replaces the three before.
            labels: int64 [B, N] aligned with ``input_ids`` and shifted here; -100 is no target.
            logits_to_keep: how many of the last positions get logits, or their indices; 0 is all.

        Raises:
            ValueError: shapes or dtypes that do not agree; ``inputs_embeds`` where the loss leaves
                the logits of some tokens without a meaning.
        """
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        num_targets = kwargs.pop("num_items_in_batch", None)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            timestamps=timestamps,
            request_times=request_times,
            layout=layout,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
        )
        hidden_BND = output.last_hidden_state
        loss = None
        if labels is not None:
            loss = self._loss(hidden_BND, labels, num_targets)
            if self.training:
                # The loss never builds the whole logits; a training step does not need them.
                return CausalLMOutputWithPast(loss=loss)
        keep: slice | Tensor = slice(None)
        if isinstance(logits_to_keep, Tensor):
            keep = logits_to_keep
        elif logits_to_keep > 0:
            keep = slice(-logits_to_keep, None)
        logits_BNV = self._head().logits(hidden_BND[:, keep])
        if self.config.item_loss != "full":
            # Trained against its own level only, the softmax says nothing about other tokens.
            if input_ids is None:
                raise ValueError(
                    f"inputs_embeds: with item_loss {self.config.item_loss!r} the tokens decide "
                    "which logits mean something; wanted input_ids"
                )
            logits_BNV = logits_BNV.masked_fill(~self._may_follow(input_ids[:, keep]), -torch.inf)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BNV,
            **({CACHE_NAME: output[CACHE_NAME]} if use_cache else {}),
        )

    def _may_follow(self, token_BN: Tensor) -> Tensor:
        """Which tokens may come after each of these, bool [B, N, V]."""
        assert self.token_vocabulary is not None
        size, device = self.config.vocab_size, token_BN.device
        follow = self._follow
        if follow is None or follow[0].device != device or len(follow[0]) != size:
            # Made on first use: a buffer filled in __init__ is lost when loading on "meta".
            group_V = torch.from_numpy(self.token_vocabulary.groups())
            table_GV = follow_table(self.token_vocabulary)
            # Rows that an enlarged embedding has past the vocabulary never follow anything.
            spare = (0, size - len(group_V))
            follow = F.pad(group_V, spare).to(device), F.pad(table_GV, spare).to(device)
            self._follow = follow
        group_V, table_GV = follow
        return table_GV[group_V[token_BN]]

    def _loss(self, hidden_BND: Tensor, labels_BN: Tensor, num_targets: Any) -> Tensor:
        target = labels_BN[:, 1:]
        chosen = target != -100
        loss = self._stream_loss()
        return loss(hidden_BND[:, :-1][chosen], self._head(), target[chosen], num_targets)

    def _stream_loss(self) -> StreamLoss:
        config = self.config
        options = {
            "action_weight": config.action_loss_weight,
            "smooth": config.label_smoothing,
            "num_negatives": config.num_negatives,
            "shared_negatives": config.shared_negatives,
        }
        if self._loss_made is None or self._loss_made[0] != (config.item_loss, options):
            made = StreamLoss(config.item_loss, self.token_vocabulary, **options)
            self._loss_made = (config.item_loss, options), made
        return self._loss_made[1]

    def _head(self) -> Head:
        config, linear = self.config, self.lm_head
        if isinstance(linear, nn.Linear):
            weight_VD, bias_V = linear.weight, linear.bias
        else:
            # An adapter stands in its place, whose own `weight` leaves out what it adds.
            unit_DD = torch.eye(config.hidden_size, device=self.device, dtype=self.dtype)
            bias_V = linear(torch.zeros_like(unit_DD[0]))
            weight_VD = (linear(unit_DD) - bias_V).T
        return Head(weight_VD, bias_V, config.l2_normalize, config.logit_temperature)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        # The stock version reads attention kinds from `layer_types`, which name blocks here.
        if model_kwargs.get(CACHE_NAME) is None and generation_config.use_cache is not False:
            model_kwargs[CACHE_NAME] = new_cache()

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, **kwargs
        )
        # A generated token belongs to the event that is being asked for.
        times = model_kwargs.get("timestamps")
        if times is not None:
            asked = model_kwargs.get("request_times")
            asked = times[:, -1] if asked is None else asked
            new = asked[:, None].expand(-1, kwargs.get("num_new_tokens", 1))
            model_kwargs["timestamps"] = torch.cat([times, new], dim=1)
        return model_kwargs
