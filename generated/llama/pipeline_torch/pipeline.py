# Written by slapo-rewrite 0.2.0 for modeling_llama.py; rewrite.json says from what.
"""`LlamaForCausalLM` in 2 stages, for `torch.distributed.pipelining`."""

import torch
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import slice_logits_to_keep

from .modeling_llama import LlamaForCausalLM
from .stages import ShardedStage
from .torch_pipeline import ShardedPipeline
from .vocab_parallel_loss import causal_lm_loss, whole_logits


class LlamaForCausalLMStage(ShardedStage, LlamaForCausalLM):
    """A stage of `LlamaForCausalLM`."""


class LlamaForCausalLMStage0(LlamaForCausalLMStage):
    def held(self):
        return self.model.embed_tokens, self.model.layers[:16], self.model.rotary_emb

    def forward(self, *, input_ids, attention_mask, **_):
        inputs_embeds = self.model.embed_tokens(input_ids)
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        position_ids = position_ids.unsqueeze(0)
        causal_mask = create_causal_mask(
            config=self.model.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        hidden_states = inputs_embeds
        position_embeddings = self.model.rotary_emb(
            hidden_states, position_ids=position_ids
        )
        for decoder_layer in self.model.layers[:16]:
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=causal_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
            )
        return hidden_states


class LlamaForCausalLMStage1(LlamaForCausalLMStage):
    def held(self):
        return (
            self.model.layers[16:],
            self.model.norm,
            self.model.rotary_emb,
            self.lm_head,
        )

    def forward(self, hidden_states, *, attention_mask, **_):
        position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        position_ids = position_ids.unsqueeze(0)
        causal_mask = create_causal_mask(
            config=self.model.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        position_embeddings = self.model.rotary_emb(
            hidden_states, position_ids=position_ids
        )
        for decoder_layer in self.model.layers[16:]:
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=causal_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
            )
        hidden_states = self.model.norm(hidden_states)
        hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep=0)
        logits = self.lm_head(hidden_states)
        if not self.training:
            logits = whole_logits(logits, self.lm_head)
        return logits

    def step_loss(self, logits, labels):
        return causal_lm_loss(
            logits=logits, labels=labels, vocab_size=self.config.vocab_size
        )


STAGES = (LlamaForCausalLMStage0, LlamaForCausalLMStage1)
pipeline = ShardedPipeline(
    STAGES,
    inputs={"input_ids": "input_ids", "attention_mask": "attention_mask"},
    label="labels",
)
build = pipeline.build
schedule = pipeline.schedule
batch = pipeline.batch
clip_grad_norm_ = pipeline.clip_grad_norm_
to_full = pipeline.to_full
load_full = pipeline.load_full
