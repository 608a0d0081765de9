# Written by slapo-rewrite 0.1.0 for modeling_t5.py; rewrite.json says from what.
"""`T5ForConditionalGeneration` in 2 stages, for DeepSpeed's pipeline engine."""

from functools import partial

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch.nn import CrossEntropyLoss
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from .checkpoints import joined, layer_files, write_parts
from .deferred_init import Recording
from .loading import full_state_dict
from .modeling_t5 import T5ForConditionalGeneration
from .stages import (
    check_layout,
    check_settings,
    check_ties,
    count_once,
    draw_parts,
    gathered,
    has_place,
    keep,
    model_parallel_group,
    seed_apart,
    stage_of,
    take_own_parts,
)
from .tensor_parallel import all_reduce_gradient, set_group

# The stages leave out what the model does where these are something else.
SETTINGS = {
    "encoder.is_decoder": False,
    "encoder.config.is_decoder": False,
    "decoder.is_decoder": True,
    "decoder.config.is_decoder": True,
    "config.scale_decoder_outputs": True,
}
# The names of parameters that have several, numbers as `*`.
TIES = (
    (
        "decoder.embed_tokens.weight",
        "encoder.embed_tokens.weight",
        "lm_head.weight",
        "shared.weight",
    ),
)


class T5ForConditionalGenerationStage0(T5ForConditionalGeneration):
    """Stage 0.

    `encoder`, `decoder.embed_tokens`, `decoder.block[:1]` and `decoder.dropout`.
    """

    def __init__(self, *args, **kwargs):
        with Recording(torch.get_default_device()) as recording:
            super().__init__(*args, **kwargs)
        check_settings(self, SETTINGS)
        check_ties(self, TIES)
        keep(
            self,
            recording,
            self.encoder,
            self.decoder.embed_tokens,
            self.decoder.block[:1],
            self.decoder.dropout,
        )
        draw_parts(
            self, recording, partial(T5ForConditionalGeneration, *args, **kwargs)
        )

    def forward(self, inputs):
        input_ids, given_attention_mask, decoder_input_ids = inputs
        # Encode if needed (training, first prediction pass)
        # Convert encoder inputs in embeddings if needed
        encoder_outputs = self.encoder(
            input_ids=input_ids, attention_mask=given_attention_mask
        )
        hidden_states = encoder_outputs[0]
        encoder_hidden_states = hidden_states
        encoder_attention_mask = given_attention_mask
        encoder_hidden_states = all_reduce_gradient(encoder_hidden_states)
        inputs_embeds = self.decoder.embed_tokens(decoder_input_ids)
        attention_mask = create_causal_mask(
            config=self.decoder.config,
            inputs_embeds=inputs_embeds,
            attention_mask=None,
            past_key_values=None,
        )
        encoder_extended_attention_mask = None
        if encoder_hidden_states is not None:
            encoder_extended_attention_mask = create_bidirectional_mask(
                config=self.decoder.config,
                inputs_embeds=inputs_embeds,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        hidden_states = self.decoder.dropout(inputs_embeds)
        position_bias = None
        encoder_decoder_position_bias = None
        for layer_module in self.decoder.block[:1]:
            (
                hidden_states,
                self_attention_position_bias,
                cross_attention_position_bias,
            ) = layer_module(
                hidden_states,
                attention_mask,
                position_bias,
                encoder_hidden_states,
                encoder_extended_attention_mask,
                encoder_decoder_position_bias,  # as a positional argument for gradient checkpointing
            )
            # We share the position biases between the layers - the first layer stores them
            position_bias = self_attention_position_bias
            if encoder_hidden_states is not None:
                encoder_decoder_position_bias = cross_attention_position_bias
        return (
            encoder_hidden_states,
            hidden_states,
            position_bias.contiguous(),
            given_attention_mask,
        )


class T5ForConditionalGenerationStage1(T5ForConditionalGeneration):
    """Stage 1.

    `decoder.block[1:]`, `decoder.final_layer_norm`, `decoder.dropout` and `lm_head`.
    """

    def __init__(self, *args, **kwargs):
        with Recording(torch.get_default_device()) as recording:
            super().__init__(*args, **kwargs)
        check_settings(self, SETTINGS)
        check_ties(self, TIES)
        keep(
            self,
            recording,
            self.decoder.block[1:],
            self.decoder.final_layer_norm,
            self.decoder.dropout,
            self.lm_head,
        )
        draw_parts(
            self, recording, partial(T5ForConditionalGeneration, *args, **kwargs)
        )

    def forward(self, inputs):
        encoder_hidden_states, hidden_states, position_bias, given_attention_mask = (
            inputs
        )
        encoder_attention_mask = given_attention_mask
        attention_mask = create_causal_mask(
            config=self.decoder.config,
            inputs_embeds=hidden_states,
            attention_mask=None,
            past_key_values=None,
        )
        encoder_extended_attention_mask = None
        if encoder_hidden_states is not None:
            encoder_extended_attention_mask = create_bidirectional_mask(
                config=self.decoder.config,
                inputs_embeds=hidden_states,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        encoder_decoder_position_bias = None
        for layer_module in self.decoder.block[1:]:
            (
                hidden_states,
                self_attention_position_bias,
                cross_attention_position_bias,
            ) = layer_module(
                hidden_states,
                attention_mask,
                position_bias,
                encoder_hidden_states,
                encoder_extended_attention_mask,
                encoder_decoder_position_bias,  # as a positional argument for gradient checkpointing
            )
            # We share the position biases between the layers - the first layer stores them
            position_bias = self_attention_position_bias
            if encoder_hidden_states is not None:
                encoder_decoder_position_bias = cross_attention_position_bias
        hidden_states = self.decoder.final_layer_norm(hidden_states)
        hidden_states = self.decoder.dropout(hidden_states)
        sequence_output = hidden_states
        sequence_output = sequence_output * (self.model_dim**-0.5)
        lm_logits = self.lm_head(sequence_output)
        return lm_logits

    def loss(self, lm_logits, labels):
        loss_fct = CrossEntropyLoss(ignore_index=-100)
        # move labels to correct device to enable PP
        labels = labels.to(lm_logits.device)
        return loss_fct(lm_logits.view(-1, lm_logits.size(-1)), labels.view(-1))


STAGES = (T5ForConditionalGenerationStage0, T5ForConditionalGenerationStage1)


def build(*args, num_stages=None, topology=None, dynamic_shape=False, **kwargs):
    """A `PipelineModule` of the stages, for `deepspeed.initialize`.

    Each rank makes the weights of its own stage only, the same as the whole model
    would have from the same seed; so ranks are to be seeded alike. From then on each
    stage of each replica draws random numbers of its own, for dropout.

    Where a topology has an axis `model`, the engine's configuration needs
    `"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}`.

    `engine.eval_batch(data)` gives the loss in eval mode, and with `return_logits=True`
    the logits as well, on the last stage; it cannot leave the loss out.

    Args:
        *args: Those of `T5ForConditionalGeneration`.
        num_stages: 2, if it is given.
        topology: Which ranks hold which stage; without it, each stage is held by as
            many ranks as there are, in data parallel.
        dynamic_shape: Whether batches are of several shapes, which are then sent with
            them.
        **kwargs: Those of `T5ForConditionalGeneration`.

    Raises:
        ValueError: The model is cut into other stages, or there are other processes.
    """
    check_layout(len(STAGES), num_stages, topology)

    def loss(outputs, labels):
        return stage_of(module, STAGES).loss(outputs, labels)

    set_group(model_parallel_group(topology))
    layers = [
        TiedLayerSpec(
            "embed_tokens",
            T5ForConditionalGenerationStage0,
            *args,
            tied_weight_attr="encoder.embed_tokens.weight",
            **kwargs
        ),
        TiedLayerSpec(
            "embed_tokens",
            T5ForConditionalGenerationStage1,
            *args,
            tied_weight_attr="lm_head.weight",
            **kwargs
        ),
    ]
    module = PipelineModule(
        layers,
        num_stages=None if topology else len(STAGES),
        topology=topology,
        loss_fn=loss,
        partition_method="uniform",
        dynamic_shape=dynamic_shape,
    )
    count_once(module, layers, STAGES)
    take_own_parts(stage_of(module, STAGES))
    seed_apart(module)
    return module


def batch(input_ids, attention_mask, decoder_input_ids, labels):
    """The model's arguments as the inputs and labels that the engine takes.

    All are tensors. What is trained is the mean of the losses of all micro-batches.
    """
    return (input_ids, attention_mask, decoder_input_ids), labels


def to_full(module, first_rank_only=False):
    """The original's state dict, on every rank. Every rank calls it.

    Args:
        module: What `build` returns.
        first_rank_only: Give it to the first process alone, on its CPU; the others get
            an empty dictionary, and none but the first holds more than a stage.
    """
    group = module.mpu().get_pipe_parallel_group()
    return gathered(full_state_dict(stage_of(module, STAGES)), group, first_rank_only)


def load_full(module, full):
    """Takes the original's state dict; do it before `deepspeed.initialize`."""
    stage = stage_of(module, STAGES)
    stage.load_state_dict({n: t for n, t in full.items() if has_place(stage, n)})


def read_checkpoint(folder, *args, tag=None, **kwargs):
    """The original's state dict, from what `engine.save_checkpoint(folder)` wrote.

    One process is enough, without an engine, and the original model loads it. The
    weights are those that the engine computes with: rounded ones, where it trains in
    half precision.

    Args:
        folder: That of `save_checkpoint`.
        *args: Those of `T5ForConditionalGeneration`.
        tag: The checkpoint's; without it, the latest is read.
        **kwargs: Those of `T5ForConditionalGeneration`.

    Raises:
        ValueError: The checkpoint is of other stages, or of another model.
    """
    files = layer_files(folder, tag, len(STAGES))
    return joined(files, partial(T5ForConditionalGeneration, *args, **kwargs))


def write_checkpoint(folder, full, *args, tensor_parallel_size=1, **kwargs):
    """Writes the original's state dict as a checkpoint of the stages.

    What loads it is `engine.load_checkpoint(folder, load_module_only=True)`.

    Args:
        folder: Where the checkpoint goes.
        full: The original's state dict.
        *args: Those of `T5ForConditionalGeneration`.
        tensor_parallel_size: How many ranks are to share each stage.
        **kwargs: Those of `T5ForConditionalGeneration`.

    Raises:
        FileExistsError: The folder has such a checkpoint already.
        ValueError: The model does not divide over so many ranks.
    """
    stages = [partial(stage, *args, **kwargs) for stage in STAGES]
    write_parts(folder, full, stages, tensor_parallel_size)
