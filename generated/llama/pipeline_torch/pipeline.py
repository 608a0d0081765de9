# Written by slapo-rewrite 0.1.0 for modeling_llama.py; rewrite.json says from what.
"""`LlamaForCausalLM` in 2 stages, for `torch.distributed.pipelining`."""

from functools import partial

import torch
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import slice_logits_to_keep

from .deferred_init import Recording
from .loading import full_state_dict
from .modeling_llama import LlamaForCausalLM
from .stages import check_ties, draw_parts, gathered, has_place, keep
from .tensor_parallel import set_group
from .torch_pipeline import (
    Schedule,
    draw_apart,
    own_numbers,
    placed,
    tensor_parallel_group,
    unwrapped,
)

# The names of parameters that have several, numbers as `*`.
TIES = ()


class LlamaForCausalLMStage0(LlamaForCausalLM):
    """Stage 0: `model.embed_tokens`, `model.layers[:16]` and `model.rotary_emb`."""

    def __init__(self, *args, **kwargs):
        with Recording(torch.get_default_device()) as recording:
            super().__init__(*args, **kwargs)
        check_ties(self, TIES)
        keep(
            self,
            recording,
            self.model.embed_tokens,
            self.model.layers[:16],
            self.model.rotary_emb,
        )
        draw_parts(self, recording, partial(LlamaForCausalLM, *args, **kwargs))

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


class LlamaForCausalLMStage1(LlamaForCausalLM):
    """Stage 1: `model.layers[16:]`, `model.norm`, `model.rotary_emb` and `lm_head`."""

    def __init__(self, *args, **kwargs):
        with Recording(torch.get_default_device()) as recording:
            super().__init__(*args, **kwargs)
        check_ties(self, TIES)
        keep(
            self,
            recording,
            self.model.layers[16:],
            self.model.norm,
            self.model.rotary_emb,
            self.lm_head,
        )
        draw_parts(self, recording, partial(LlamaForCausalLM, *args, **kwargs))

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
        return logits

    def loss(self, logits, labels):
        return self.loss_function(
            logits=logits, labels=labels, vocab_size=self.config.vocab_size
        )


STAGES = (LlamaForCausalLMStage0, LlamaForCausalLMStage1)


def build(*args, mesh, **kwargs):
    """The stages of this rank, each a `torch.distributed.pipelining.PipelineStage`.

    Each rank makes the weights of its own stages only, the same as the whole model
    would have from the same seed; so ranks are to be seeded alike. From then on each
    draws random numbers of its own, for dropout, but for those of one tensor-parallel group.

    Args:
        *args: Those of `LlamaForCausalLM`.
        mesh: A mesh. Along its axis `pp` ranks hold the stages of one model, round and
            round where there are fewer of them; along `tp` they divide its weights.
        **kwargs: Those of `LlamaForCausalLM`.

    Raises:
        ValueError: The stages cannot be laid out on the mesh.
    """
    numbers = own_numbers(mesh, len(STAGES))
    set_group(tensor_parallel_group(mesh))
    stages = placed(STAGES, numbers, mesh, *args, **kwargs)
    draw_apart(mesh)
    return stages


def schedule(stages, kind, n_microbatches, **options):
    """A schedule, with the model's own loss; its `step` and `eval` take a `batch`.

    Args:
        stages: What `build` returns, wrapped for data parallelism or not.
        kind: A class: `Schedule1F1B`, say, or where a rank has several stages
            `ScheduleInterleaved1F1B`, for which torch needs `fully_shard` where it
            takes no `DistributedDataParallel`.
        n_microbatches: How many equal parts a batch is divided into.
        **options: Those of the class.

    Raises:
        ValueError: The class is for one stage on a rank, and there are several.
    """
    return Schedule(stages, kind, n_microbatches, **options)


def batch(input_ids, attention_mask, labels):
    """The model's arguments as a schedule takes them, on every rank the same."""
    return {"input_ids": input_ids, "attention_mask": attention_mask, "target": labels}


def to_full(stages, first_rank_only=False):
    """The original's state dict, on every rank. Every rank calls it.

    Args:
        stages: What `build` returns, wrapped for data parallelism or not.
        first_rank_only: Give it to the first process alone, on its CPU; the others get
            an empty dictionary, and none but the first holds more than its stages.
    """
    named = {}
    for stage in stages:
        named |= full_state_dict(unwrapped(stage))
    return gathered(named, stages[0].group, first_rank_only)


def load_full(stages, full):
    """Takes the original's state dict; do it before the stages are wrapped."""
    for stage in stages:
        held = {n: t for n, t in full.items() if has_place(stage.submod, n)}
        stage.submod.load_state_dict(held)
