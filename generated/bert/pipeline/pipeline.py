# Written by slapo-rewrite 0.2.0 for modeling_bert.py; rewrite.json says from what.
"""`BertForMaskedLM` in 2 stages, for DeepSpeed's pipeline engine."""

from torch.nn import CrossEntropyLoss
from transformers.masking_utils import create_bidirectional_mask

from .deepspeed_pipeline import ShardedPipeline
from .modeling_bert import BertForMaskedLM
from .stages import ShardedStage
from .vocab_parallel_loss import vocab_parallel_criterion, whole_logits


class BertForMaskedLMStage(ShardedStage, BertForMaskedLM):
    """A stage of `BertForMaskedLM`."""

    # Stages leave out what the model does where these are something else.
    SETTINGS = {"bert.config.is_decoder": False, "bert.pooler": None}

    # The names of parameters that have several, numbers as `*`.
    TIES = (
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    )


class BertForMaskedLMStage0(BertForMaskedLMStage):
    def held(self):
        return self.bert.embeddings, self.bert.encoder.layer[:6]

    def forward(self, inputs):
        input_ids, given_attention_mask = inputs
        embedding_output = self.bert.embeddings(input_ids=input_ids)
        attention_mask = create_bidirectional_mask(
            config=self.bert.config,
            inputs_embeds=embedding_output,
            attention_mask=given_attention_mask,
        )
        hidden_states = embedding_output
        for layer_module in self.bert.encoder.layer[:6]:
            hidden_states = layer_module(hidden_states, attention_mask)
        return hidden_states, given_attention_mask


class BertForMaskedLMStage1(BertForMaskedLMStage):
    def held(self):
        return self.bert.encoder.layer[6:], self.cls, self.cls.predictions.decoder

    def forward(self, inputs):
        hidden_states, given_attention_mask = inputs
        attention_mask = create_bidirectional_mask(
            config=self.bert.config,
            inputs_embeds=hidden_states,
            attention_mask=given_attention_mask,
        )
        for layer_module in self.bert.encoder.layer[6:]:
            hidden_states = layer_module(hidden_states, attention_mask)
        sequence_output = hidden_states
        prediction_scores = self.cls(sequence_output)
        if not self.training:
            prediction_scores = whole_logits(
                prediction_scores, self.cls.predictions.decoder
            )
        return prediction_scores

    def step_loss(self, prediction_scores, labels):
        loss_fct = CrossEntropyLoss()  # -100 index = padding token
        return vocab_parallel_criterion(
            loss_fct,
            prediction_scores.view(-1, prediction_scores.shape[-1]),
            labels.view(-1),
            head=self.cls.predictions.decoder,
        )


STAGES = (BertForMaskedLMStage0, BertForMaskedLMStage1)
pipeline = ShardedPipeline(
    STAGES,
    inputs=("input_ids", "attention_mask"),
    labels=("labels",),
    shared=(
        {
            0: "bert.embeddings.word_embeddings.weight",
            1: "cls.predictions.decoder.weight",
        },
    ),
)
build = pipeline.build
batch = pipeline.batch
to_full = pipeline.to_full
load_full = pipeline.load_full
read_checkpoint = pipeline.read_checkpoint
write_checkpoint = pipeline.write_checkpoint
