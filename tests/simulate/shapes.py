"""Configurations of the models that are cut into stages: nothing is downloaded."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import transformers

from benchmark.element_costs import Cost, costs_of


@dataclass(frozen=True)
class Shape:
    """A model, and the elements of it that are called one after the other.

    Attributes:
        make: Builds it.
        elements: Their paths.
        length: Tokens in a sequence.
        parameters: How many it has, in millions.
        dtype: What it computes in.
    """

    make: Callable[[], torch.nn.Module]
    elements: list[str]
    length: int
    parameters: int
    dtype: torch.dtype = torch.bfloat16

    def built(self, sequences: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        """The model on the meta device, and inputs of a step."""
        with torch.device("meta"):
            model = self.make().to(self.dtype)
        ids = torch.zeros(sequences, self.length, dtype=torch.long)
        return model, {"input_ids": ids, "labels": ids}

    def costs(self, sequences: int = 8) -> list[Cost]:
        """What the elements cost."""
        return costs_of(*self.built(sequences), self.elements)


def layers(path: str, count: int) -> list[str]:
    return [f"{path}.{number}" for number in range(count)]


SHAPES = {
    "BERT-large": Shape(
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(
                hidden_size=1024,
                num_hidden_layers=24,
                num_attention_heads=16,
                intermediate_size=4096,
            )
        ),
        ["bert.embeddings", *layers("bert.encoder.layer", 24), "cls"],
        512,
        335,
    ),
    "GPT-2 medium": Shape(
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16)
        ),
        ["transformer.wte", *layers("transformer.h", 24), "lm_head"],
        1024,
        355,
    ),
    "T5-base": Shape(
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
            )
        ),
        [*layers("encoder.block", 12), *layers("decoder.block", 12), "lm_head"],
        512,
        223,
    ),
    "Llama-1B": Shape(
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=2048,
                num_hidden_layers=16,
                num_attention_heads=32,
                num_key_value_heads=8,
                intermediate_size=8192,
                vocab_size=128256,
                tie_word_embeddings=True,
            )
        ),
        ["model.embed_tokens", *layers("model.layers", 16), "lm_head"],
        4096,
        1236,
    ),
}

# As their times were published, as far as that is known.
PUBLISHED = {
    "BERT-large": replace(SHAPES["BERT-large"], dtype=torch.float32),
    "GPT-Neo-1.3B": Shape(
        lambda: transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig()),
        ["transformer.wte", *layers("transformer.h", 24), "lm_head"],
        512,
        1316,
        torch.float32,
    ),
}

# Large enough to need several GPUs.
LLAMA_33B = Shape(
    lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=5120,
            num_hidden_layers=64,
            num_attention_heads=40,
            num_key_value_heads=8,
            intermediate_size=27648,
            vocab_size=152064,
        )
    ),
    ["model.embed_tokens", *layers("model.layers", 64), "lm_head"],
    4096,
    32762,
)
