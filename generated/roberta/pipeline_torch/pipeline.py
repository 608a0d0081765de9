# Written by slapo-rewrite 0.2.0 for modeling_roberta.py; rewrite.json says from what.
"""`RobertaForMaskedLM` in 2 stages, for `torch.distributed.pipelining`."""

from torch.nn import CrossEntropyLoss
from transformers.masking_utils import create_bidirectional_mask

from .modeling_roberta import RobertaForMaskedLM
from .stages import ShardedStage
from .torch_pipeline import ShardedPipeline
from .vocab_parallel_loss import vocab_parallel_criterion, whole_logits


class RobertaForMaskedLMStage(ShardedStage, RobertaForMaskedLM):
    """A stage of `RobertaForMaskedLM`."""

    # Stages leave out what the model does where these are something else.
    SETTINGS = {"roberta.config.is_decoder": False, "roberta.pooler": None}

    # The names of parameters that have several, numbers as `*`.
    TIES = (
        ("lm_head.bias", "lm_head.decoder.bias"),
        ("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    )


class RobertaForMaskedLMStage0(RobertaForMaskedLMStage):
    def held(self):
        return self.roberta.embeddings, self.roberta.encoder.layer[:6]

    def forward(self, *, input_ids, attention_mask, **_):
        embedding_output = self.roberta.embeddings(input_ids=input_ids)
        attention_mask = create_bidirectional_mask(
            config=self.roberta.config,
            inputs_embeds=embedding_output,
            attention_mask=attention_mask,
        )
        hidden_states = embedding_output
        for layer_module in self.roberta.encoder.layer[:6]:
            hidden_states = layer_module(hidden_states, attention_mask)
        return hidden_states


class RobertaForMaskedLMStage1(RobertaForMaskedLMStage):
    def held(self):
        return self.roberta.encoder.layer[6:], self.lm_head, self.lm_head.decoder

    def forward(self, hidden_states, *, attention_mask, **_):
        attention_mask = create_bidirectional_mask(
            config=self.roberta.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
        )
        for layer_module in self.roberta.encoder.layer[6:]:
            hidden_states = layer_module(hidden_states, attention_mask)
        sequence_output = hidden_states
        prediction_scores = self.lm_head(sequence_output)
        if not self.training:
            prediction_scores = whole_logits(prediction_scores, self.lm_head.decoder)
        return prediction_scores

    def step_loss(self, prediction_scores, labels):
        # move labels to correct device
        labels = labels.to(prediction_scores.device)
        loss_fct = CrossEntropyLoss()
        return vocab_parallel_criterion(
            loss_fct,
            prediction_scores.view(-1, prediction_scores.shape[-1]),
            labels.view(-1),
            head=self.lm_head.decoder,
        )


STAGES = (RobertaForMaskedLMStage0, RobertaForMaskedLMStage1)
pipeline = ShardedPipeline(
    STAGES,
    inputs={"input_ids": "input_ids", "attention_mask": "attention_mask"},
    label="labels",
    shared=(
        {0: "roberta.embeddings.word_embeddings.weight", 1: "lm_head.decoder.weight"},
    ),
)
build = pipeline.build
schedule = pipeline.schedule
batch = pipeline.batch
clip_grad_norm_ = pipeline.clip_grad_norm_
to_full = pipeline.to_full
load_full = pipeline.load_full
