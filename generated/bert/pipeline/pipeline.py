# Written by slapo-rewrite 0.1.0 for modeling_bert.py; rewrite.json says from what.
"""`BertForMaskedLM` in 2 stages, for DeepSpeed's pipeline engine."""

from functools import partial

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch.nn import CrossEntropyLoss
from transformers.masking_utils import create_bidirectional_mask

from .checkpoints import joined, layer_files, write_parts
from .deferred_init import Recording
from .loading import full_state_dict
from .modeling_bert import BertForMaskedLM
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
from .tensor_parallel import set_group

# The stages leave out what the model does where these are something else.
SETTINGS = {"bert.config.is_decoder": False, "bert.pooler": None}
# The names of parameters that have several, numbers as `*`.
TIES = (
    ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ("cls.predictions.bias", "cls.predictions.decoder.bias"),
)


class BertForMaskedLMStage0(BertForMaskedLM):
    """Stage 0: `bert.embeddings` and `bert.encoder.layer[:6]`."""

    def __init__(self, *args, **kwargs):
        with Recording(torch.get_default_device()) as recording:
            super().__init__(*args, **kwargs)
        check_settings(self, SETTINGS)
        check_ties(self, TIES)
        keep(self, recording, self.bert.embeddings, self.bert.encoder.layer[:6])
        draw_parts(self, recording, partial(BertForMaskedLM, *args, **kwargs))

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


class BertForMaskedLMStage1(BertForMaskedLM):
    """Stage 1: `bert.encoder.layer[6:]` and `cls`."""

    def __init__(self, *args, **kwargs):
        with Recording(torch.get_default_device()) as recording:
            super().__init__(*args, **kwargs)
        check_settings(self, SETTINGS)
        check_ties(self, TIES)
        keep(self, recording, self.bert.encoder.layer[6:], self.cls)
        draw_parts(self, recording, partial(BertForMaskedLM, *args, **kwargs))

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
        return prediction_scores

    def loss(self, prediction_scores, labels):
        loss_fct = CrossEntropyLoss()  # -100 index = padding token
        return loss_fct(
            prediction_scores.view(-1, self.config.vocab_size), labels.view(-1)
        )


STAGES = (BertForMaskedLMStage0, BertForMaskedLMStage1)


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
        *args: Those of `BertForMaskedLM`.
        num_stages: 2, if it is given.
        topology: Which ranks hold which stage; without it, each stage is held by as
            many ranks as there are, in data parallel.
        dynamic_shape: Whether batches are of several shapes, which are then sent with
            them.
        **kwargs: Those of `BertForMaskedLM`.

    Raises:
        ValueError: The model is cut into other stages, or there are other processes.
    """
    check_layout(len(STAGES), num_stages, topology)

    def loss(outputs, labels):
        return stage_of(module, STAGES).loss(outputs, labels)

    set_group(model_parallel_group(topology))
    layers = [
        TiedLayerSpec(
            "word_embeddings",
            BertForMaskedLMStage0,
            *args,
            tied_weight_attr="bert.embeddings.word_embeddings.weight",
            **kwargs
        ),
        TiedLayerSpec(
            "word_embeddings",
            BertForMaskedLMStage1,
            *args,
            tied_weight_attr="cls.predictions.decoder.weight",
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


def batch(input_ids, attention_mask, labels):
    """The model's arguments as the inputs and labels that the engine takes.

    All are tensors. What is trained is the mean of the losses of all micro-batches.
    """
    return (input_ids, attention_mask), labels


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
        *args: Those of `BertForMaskedLM`.
        tag: The checkpoint's; without it, the latest is read.
        **kwargs: Those of `BertForMaskedLM`.

    Raises:
        ValueError: The checkpoint is of other stages, or of another model.
    """
    files = layer_files(folder, tag, len(STAGES))
    return joined(files, partial(BertForMaskedLM, *args, **kwargs))


def write_checkpoint(folder, full, *args, tensor_parallel_size=1, **kwargs):
    """Writes the original's state dict as a checkpoint of the stages.

    What loads it is `engine.load_checkpoint(folder, load_module_only=True)`.

    Args:
        folder: Where the checkpoint goes.
        full: The original's state dict.
        *args: Those of `BertForMaskedLM`.
        tensor_parallel_size: How many ranks are to share each stage.
        **kwargs: Those of `BertForMaskedLM`.

    Raises:
        FileExistsError: The folder has such a checkpoint already.
        ValueError: The model does not divide over so many ranks.
    """
    stages = [partial(stage, *args, **kwargs) for stage in STAGES]
    write_parts(folder, full, stages, tensor_parallel_size)
