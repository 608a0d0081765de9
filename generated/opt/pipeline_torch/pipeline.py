# Written by slapo-rewrite 0.2.0 for modeling_opt.py; rewrite.json says from what.
"""`OPTForCausalLM` in 2 stages, for `torch.distributed.pipelining`."""

import torch
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import slice_logits_to_keep

from .modeling_opt import OPTForCausalLM
from .stages import ShardedStage
from .torch_pipeline import ShardedPipeline
from .vocab_parallel_loss import causal_lm_loss, whole_logits


class OPTForCausalLMStage(ShardedStage, OPTForCausalLM):
    """A stage of `OPTForCausalLM`."""

    # Stages leave out what the model does where these are something else, `...`: where None.
    SETTINGS = {
        "model.decoder.project_in": None,
        "model.decoder.final_layer_norm": ...,
        "model.decoder.project_out": None,
    }

    # The names of parameters that have several, numbers as `*`.
    TIES = (("lm_head.weight", "model.decoder.embed_tokens.weight"),)


class OPTForCausalLMStage0(OPTForCausalLMStage):
    def held(self):
        return (
            self.model.decoder.embed_tokens,
            self.model.decoder.embed_positions,
            self.model.decoder.layers[:6],
        )

    def forward(self, *, input_ids, attention_mask, **_):
        input_ids = input_ids.view(-1, input_ids.shape[-1])
        inputs_embeds = self.model.decoder.embed_tokens(input_ids)
        # The dense mask is only required to infer `position_ids`, while `attention_mask` must stay `None` when
        # unpadded, as `create_causal_mask` would otherwise never skip it in favor of sdpa's `is_causal` argument
        position_attention_mask = attention_mask
        # embed positions
        position_ids = torch.cumsum(position_attention_mask, dim=1)
        position_ids = (position_ids * position_attention_mask - 1).long()
        # cut positions if `past_seen_tokens` is > 0
        position_ids = position_ids[:, 0:]
        causal_mask = create_causal_mask(
            config=self.model.decoder.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=None,
        )
        pos_embeds = self.model.decoder.embed_positions(
            position_attention_mask, position_ids=position_ids
        )
        hidden_states = inputs_embeds + pos_embeds.to(inputs_embeds.device)
        # decoder layers
        for decoder_layer in self.model.decoder.layers[:6]:
            # add LayerDrop (see https://huggingface.co/papers/1909.11556 for description)
            if self.model.decoder.training and self.model.decoder.layerdrop > 0.0:
                dropout_probability = torch.rand([])
                if dropout_probability < self.model.decoder.layerdrop:
                    continue
            hidden_states = decoder_layer(
                hidden_states, attention_mask=causal_mask, position_ids=position_ids
            )
        return hidden_states


class OPTForCausalLMStage1(OPTForCausalLMStage):
    def held(self):
        return (
            self.model.decoder.final_layer_norm,
            self.model.decoder.layers[6:],
            self.lm_head,
        )

    def forward(self, hidden_states, *, attention_mask, **_):
        # The dense mask is only required to infer `position_ids`, while `attention_mask` must stay `None` when
        # unpadded, as `create_causal_mask` would otherwise never skip it in favor of sdpa's `is_causal` argument
        position_attention_mask = attention_mask
        # embed positions
        position_ids = torch.cumsum(position_attention_mask, dim=1)
        position_ids = (position_ids * position_attention_mask - 1).long()
        # cut positions if `past_seen_tokens` is > 0
        position_ids = position_ids[:, 0:]
        causal_mask = create_causal_mask(
            config=self.model.decoder.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=None,
        )
        # decoder layers
        for decoder_layer in self.model.decoder.layers[6:]:
            # add LayerDrop (see https://huggingface.co/papers/1909.11556 for description)
            if self.model.decoder.training and self.model.decoder.layerdrop > 0.0:
                dropout_probability = torch.rand([])
                if dropout_probability < self.model.decoder.layerdrop:
                    continue
            hidden_states = decoder_layer(
                hidden_states, attention_mask=causal_mask, position_ids=position_ids
            )
        hidden_states = self.model.decoder.final_layer_norm(hidden_states)
        hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep=0)
        lm_head_output = self.lm_head(hidden_states)
        logits = lm_head_output.contiguous()
        if not self.training:
            logits = whole_logits(logits, self.lm_head)
        return logits

    def step_loss(self, logits, labels):
        return causal_lm_loss(
            logits=logits, labels=labels, vocab_size=self.config.vocab_size
        )


STAGES = (OPTForCausalLMStage0, OPTForCausalLMStage1)
pipeline = ShardedPipeline(
    STAGES,
    inputs={"input_ids": "input_ids", "attention_mask": "attention_mask"},
    label="labels",
    shared=({0: "model.decoder.embed_tokens.weight", 1: "lm_head.weight"},),
)
build = pipeline.build
schedule = pipeline.schedule
batch = pipeline.batch
clip_grad_norm_ = pipeline.clip_grad_norm_
to_full = pipeline.to_full
load_full = pipeline.load_full
