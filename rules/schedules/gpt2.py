"""Tensor parallel GPT-2, the first blocks checkpointed.

`c_attn` packs query, key and value as `[q|k|v]`, so each of the three is split separately. The
weight of a `Conv1D` is the transpose of a linear layer's: its outputs are on axis 1.

With `sequence_parallel` each rank computes what is between the split layers on its slice of the
sequence, from the embeddings' dropout to the last norm (arXiv 2205.05198).

With `fork_dropout` the ranks draw different dropout masks.
"""

from transformers import GPT2Config


def model(m):
    """GPT-2, the smallest of the published four."""
    return m.GPT2LMHeadModel(GPT2Config())


def verify_model(m):
    """A small one, with a vocabulary that no world size divides."""
    return m.GPT2LMHeadModel(
        GPT2Config(
            vocab_size=203,
            n_positions=64,
            n_embd=64,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def schedule(
    s,
    tensor_parallel: bool = True,
    sequence_parallel: bool = False,
    parallel_loss: bool = True,
    ckpt_ratio: float = 0.0,
    memory: str = "",
    batch: int = 8,
    sequence: int = 512,
    ranks: int = 1,
    autocast: str = "",
    fork_dropout: bool = False,
    fuse: bool = False,
    fuse_head: bool = False,
    pipeline_stages: int = 1,
    pipeline_engine: str = "deepspeed",
):
    """Splits the blocks, and checkpoints the first `ckpt_ratio` of them.

    With `parallel_loss` the logits stay split if training computes a loss of them, and only the
    loss is summed over the ranks; without it every rank gathers them.
    With `memory`, such as "40GiB", activation checkpoints are chosen so that a training step of
    `batch` rows of `sequence` tokens fits into it on each of `ranks` that share the layers, at the
    least time; `ckpt_ratio` is then ignored.
    With `autocast` of "bfloat16" or "float16" products are in half precision.
    With `fuse` every rule that is legal and known to pay is applied before anything is split.
    With `fuse_head` training computes the loss without logits, and the vocabulary stays whole.
    With `pipeline_stages` above 1 the output has a `pipeline.py` with that many stages, run by
    DeepSpeed, or with `pipeline_engine` "torch" by `torch.distributed.pipelining`.
    """
    if fuse_head:
        s.apply("linear_cross_entropy")
    if fuse:
        s.apply_all(concrete_args={"encoder_hidden_states": None})  # no cross-attention
    blocks = s["transformer.h"]
    if tensor_parallel:
        blocks["*.attn.c_attn"].shard("weight", axis=1, parts=3)
        blocks["*.attn.c_attn"].shard("bias", axis=0, parts=3)
        blocks["*.mlp.c_fc"].shard("weight", axis=1)
        blocks["*.mlp.c_fc"].shard("bias", axis=0)
        blocks["*.{attn,mlp}.c_proj"].shard("weight", axis=0)

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
    if fork_dropout and sequence_parallel:
        blocks["*"].fork_rng()
    elif fork_dropout:  # what comes after `c_proj` is whole on every rank
        blocks["*.attn"].fork_rng(["attention_interface", "_upcast_and_reordered_attn"])
    if autocast:
        s.autocast(autocast)
    if memory:
        precision = "fp32" if autocast else "bf16"  # of the weights, which autocast leaves
        step = {"batch": batch, "sequence": sequence, "ranks": ranks, "precision": precision}
        blocks["*"].checkpoint(budget=memory, **step)
    else:
        blocks[:ckpt_ratio].checkpoint()
    if pipeline_stages != 1:
        s.cut_evenly(pipeline_stages, target=pipeline_engine)
