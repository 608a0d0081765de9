"""Tensor parallel GPT, the first blocks checkpointed."""

import torch


def model(m):
    """The size of GPT-2."""
    return m.GPT(m.GPTConfig())


def verify_model(m):
    """A small one, with a vocabulary that no world size divides."""
    return m.GPT(m.GPTConfig(vocab_size=203, block_size=32, n_layer=3, n_head=4, n_embd=64))


def inputs(model):
    """One batch."""
    idx = torch.randint(model.config.vocab_size, (2, 17))
    return {"idx": idx[:, :-1], "targets": idx[:, 1:].contiguous()}


def loss(outputs):
    """The model gives logits and loss."""
    return outputs[1]


def schedule(
    s,
    tensor_parallel: bool = True,
    sequence_parallel: bool = False,
    parallel_loss: bool = True,
    ckpt_ratio: float = 0.0,
    fuse: bool = False,
    fuse_head: bool = False,
    pipeline_stages: int = 1,
    pipeline_engine: str = "deepspeed",
):
    """Splits the blocks, and checkpoints the first `ckpt_ratio` of them.

    With `parallel_loss` the logits stay split where training computes a loss of them, and only
    the loss is summed; without it they are gathered on every rank.
    With `fuse` every rule that pays is applied first, before anything is split.
    With `fuse_head` training computes the loss without logits, and the vocabulary stays whole.
    With `pipeline_stages` of more than 1 the output has a `pipeline.py` of so many stages, run by
    DeepSpeed, or with `pipeline_engine` "torch" by `torch.distributed.pipelining`.
    """
    if fuse_head:
        s.apply("linear_cross_entropy")
    if fuse:
        s.apply_all()
    blocks = s["transformer.h"]
    if tensor_parallel:
        blocks["*.attn.c_attn"].shard(["weight", "bias"], axis=0, parts=3)
        blocks["*.mlp.c_fc"].shard(["weight", "bias"], axis=0)
        blocks["*.{attn,mlp}.c_proj"].shard("weight", axis=1)

        if not fuse_head:
            s["{transformer.wte,lm_head}"].shard("weight", axis=0)
        if sequence_parallel:
            s["transformer.drop"].sync("fwd_post", "scatter", axis=1)
            blocks["*.{attn,mlp}"].sync("fwd_pre", "all_gather", axis=1)
            blocks["*.{attn,mlp}.c_proj"].sync("fwd_post", "reduce_scatter", axis=1)
            s["transformer.ln_f"].sync("fwd_post", "all_gather", axis=1)
        if parallel_loss and not fuse_head:
            s["lm_head"].sync("bwd_post", "all_reduce")
        s.infer_sync()
    blocks[:ckpt_ratio].checkpoint()
    if pipeline_stages != 1:
        s.cut_evenly(pipeline_stages, target=pipeline_engine)
