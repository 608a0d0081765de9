# Written by slapo-rewrite 0.2.0 for gpt.py; rewrite.json says from what.
"""`GPT` in 2 stages, for DeepSpeed's pipeline engine."""

import torch

from .deepspeed_pipeline import ShardedPipeline
from .gpt import GPT
from .stages import ShardedStage
from .vocab_parallel_loss import vocab_parallel_cross_entropy, whole_logits


class GPTStage(ShardedStage, GPT):
    """A stage of `GPT`."""

    # The names of parameters that have several, numbers as `*`.
    TIES = (("lm_head.weight", "transformer.wte.weight"),)


class GPTStage0(GPTStage):
    def held(self):
        return (
            self.transformer.wte,
            self.transformer.wpe,
            self.transformer.drop,
            self.transformer.h[:6],
        )

    def forward(self, idx):
        T = idx.size(1)
        assert (
            T <= self.config.block_size
        ), f"{T} tokens are more than the model has positions"
        positions = torch.arange(T, device=idx.device)
        x = self.transformer.drop(
            self.transformer.wte(idx) + self.transformer.wpe(positions)
        )
        for block in self.transformer.h[:6]:
            x = block(x)
        return x


class GPTStage1(GPTStage):
    def held(self):
        return self.transformer.h[6:], self.transformer.ln_f, self.lm_head

    def forward(self, x):
        for block in self.transformer.h[6:]:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if not self.training:
            logits = whole_logits(logits, self.lm_head)
        return logits

    def step_loss(self, logits, targets):
        return vocab_parallel_cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), head=self.lm_head
        )


STAGES = (GPTStage0, GPTStage1)
pipeline = ShardedPipeline(
    STAGES,
    inputs=("idx",),
    labels=("targets",),
    shared=({0: "transformer.wte.weight", 1: "lm_head.weight"},),
)
build = pipeline.build
batch = pipeline.batch
to_full = pipeline.to_full
load_full = pipeline.load_full
read_checkpoint = pipeline.read_checkpoint
write_checkpoint = pipeline.write_checkpoint
