# Written by slapo-rewrite 0.2.0 for modeling_gpt_neo.py; rewrite.json says from what.
"""`GPTNeoForCausalLM` in 2 stages, for `torch.distributed.pipelining`."""

import torch
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import slice_logits_to_keep

from .modeling_gpt_neo import GPTNeoForCausalLM
from .stages import ShardedStage
from .torch_pipeline import ShardedPipeline
from .vocab_parallel_loss import causal_lm_loss, whole_logits


class GPTNeoForCausalLMStage(ShardedStage, GPTNeoForCausalLM):
    """A stage of `GPTNeoForCausalLM`."""

    # Stages leave out what the model does where these are something else.
    SETTINGS = {
        "config.return_dict": True,
        "transformer.config.output_attentions": False,
        "transformer.config.output_hidden_states": False,
        "transformer.config.use_cache": True,
        "transformer.config.return_dict": True,
        "transformer.gradient_checkpointing": False,
    }

    # The names of parameters that have several, numbers as `*`.
    TIES = (("lm_head.weight", "transformer.wte.weight"),)


class GPTNeoForCausalLMStage0(GPTNeoForCausalLMStage):
    def held(self):
        return (
            self.transformer.wte,
            self.transformer.wpe,
            self.transformer.drop,
            self.transformer.h[:12],
        )

    def forward(self, *, input_ids, attention_mask, **_):
        inputs_embeds = self.transformer.wte(input_ids)
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        position_ids = position_ids.unsqueeze(0)
        causal_mask = create_causal_mask(
            config=self.transformer.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        position_embeds = self.transformer.wpe(position_ids)
        hidden_states = inputs_embeds + position_embeds
        hidden_states = self.transformer.drop(hidden_states)
        for block in self.transformer.h[:12]:
            outputs = block(hidden_states, attention_mask=causal_mask)
            hidden_states = outputs[0]
        return hidden_states


class GPTNeoForCausalLMStage1(GPTNeoForCausalLMStage):
    def held(self):
        return self.transformer.h[12:], self.transformer.ln_f, self.lm_head

    def forward(self, hidden_states, *, attention_mask, **_):
        position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        position_ids = position_ids.unsqueeze(0)
        causal_mask = create_causal_mask(
            config=self.transformer.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        seq_length = hidden_states.shape[1]
        output_shape = -1, seq_length, hidden_states.size(-1)
        for block in self.transformer.h[12:]:
            outputs = block(hidden_states, attention_mask=causal_mask)
            hidden_states = outputs[0]
        hidden_states = self.transformer.ln_f(hidden_states)
        hidden_states = hidden_states.view(output_shape)
        hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep=0)
        logits = self.lm_head(hidden_states)
        if not self.training:
            logits = whole_logits(logits, self.lm_head)
        return logits

    def step_loss(self, logits, labels):
        return causal_lm_loss(
            logits=logits, labels=labels, vocab_size=self.config.vocab_size
        )


STAGES = (GPTNeoForCausalLMStage0, GPTNeoForCausalLMStage1)
pipeline = ShardedPipeline(
    STAGES,
    inputs={"input_ids": "input_ids", "attention_mask": "attention_mask"},
    label="labels",
    shared=({0: "transformer.wte.weight", 1: "lm_head.weight"},),
)
build = pipeline.build
schedule = pipeline.schedule
batch = pipeline.batch
clip_grad_norm_ = pipeline.clip_grad_norm_
to_full = pipeline.to_full
load_full = pipeline.load_full
