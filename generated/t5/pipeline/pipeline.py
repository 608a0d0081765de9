# Written by slapo-rewrite 0.2.0 for modeling_t5.py; rewrite.json says from what.
"""`T5ForConditionalGeneration` in 2 stages, for DeepSpeed's pipeline engine."""

from torch.nn import CrossEntropyLoss
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from .deepspeed_pipeline import ShardedPipeline
from .modeling_t5 import T5ForConditionalGeneration
from .stages import ShardedStage
from .tensor_parallel import all_reduce_gradient
from .vocab_parallel_loss import vocab_parallel_criterion, whole_logits


class T5ForConditionalGenerationStage(ShardedStage, T5ForConditionalGeneration):
    """A stage of `T5ForConditionalGeneration`."""

    # Stages leave out what the model does where these are something else.
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


class T5ForConditionalGenerationStage0(T5ForConditionalGenerationStage):
    def held(self):
        return (
            self.encoder,
            self.decoder.embed_tokens,
            self.decoder.block[:1],
            self.decoder.dropout,
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


class T5ForConditionalGenerationStage1(T5ForConditionalGenerationStage):
    def held(self):
        return (
            self.decoder.block[1:],
            self.decoder.final_layer_norm,
            self.decoder.dropout,
            self.lm_head,
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
        if not self.training:
            lm_logits = whole_logits(lm_logits, self.lm_head)
        return lm_logits

    def step_loss(self, lm_logits, labels):
        loss_fct = CrossEntropyLoss(ignore_index=-100)
        # move labels to correct device to enable PP
        labels = labels.to(lm_logits.device)
        return vocab_parallel_criterion(
            loss_fct,
            lm_logits.view(-1, lm_logits.size(-1)),
            labels.view(-1),
            head=self.lm_head,
        )


STAGES = (T5ForConditionalGenerationStage0, T5ForConditionalGenerationStage1)
pipeline = ShardedPipeline(
    STAGES,
    inputs=("input_ids", "attention_mask", "decoder_input_ids"),
    labels=("labels",),
    shared=({0: "encoder.embed_tokens.weight", 1: "lm_head.weight"},),
)
build = pipeline.build
batch = pipeline.batch
to_full = pipeline.to_full
load_full = pipeline.load_full
read_checkpoint = pipeline.read_checkpoint
write_checkpoint = pipeline.write_checkpoint
