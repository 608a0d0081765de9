"""Tensor parallel T5, the first blocks of encoder and decoder checkpointed.

The relative position bias is a table with a column for each head: it is split with the heads, in
the first block of each stack, and the stack's other blocks receive this rank's part of the bias.
With `fork_dropout` the ranks draw different dropout masks for their heads and shares of the MLP.
"""

from transformers import T5Config


def model(m):
    """T5-small."""
    return m.T5ForConditionalGeneration(T5Config())


def verify_model(m):
    """A small one, with a vocabulary that no world size divides and a decoder of another depth."""
    return m.T5ForConditionalGeneration(
        T5Config(
            vocab_size=203,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=3,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
        )
    )


def schedule(
    s,
    tensor_parallel: bool = True,
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
    """Splits the blocks, and checkpoints the first `ckpt_ratio` of each stack.

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
        s.apply_all()
    stacks = s["{encoder,decoder}.block"]
    if tensor_parallel:
        stacks["**.{q,k,v,wi}"].shard("weight", axis=0)
        stacks["**.wi"].sync("bwd_post", "all_reduce")
        # Once for queries, keys and values; for those of the encoder's states once for all layers.
        stacks["**.{SelfAttention,EncDecAttention}"].sync("bwd_post", "all_reduce")
        s["{encoder,decoder}"].sync("bwd_post", "all_reduce", of="encoder_hidden_states")
        rows = stacks["**.{o,wo}"]
        rows.shard("weight", axis=1)
        rows.sync("fwd_post", "all_reduce")
        stacks["**.relative_attention_bias"].shard("weight", axis=1)

        if not fuse_head:
            s["{shared,encoder.embed_tokens,decoder.embed_tokens}"].shard("weight", axis=0)
            s["{shared,encoder.embed_tokens,decoder.embed_tokens}"].sync("fwd_post", "all_reduce")
            s["lm_head"].shard("weight", axis=0)
            s["lm_head"].sync("bwd_post", "all_reduce")
            if not parallel_loss:
                s["lm_head"].sync("fwd_post", "all_gather", axis=-1)
    if fork_dropout:
        stacks["**.{SelfAttention,EncDecAttention,DenseReluDense}"].fork_rng()
    if autocast:
        s.autocast(autocast)
    if memory:
        precision = "fp32" if autocast else "bf16"  # of the weights, which autocast leaves
        step = {"batch": batch, "sequence": sequence, "ranks": ranks, "precision": precision}
        stacks["*"].checkpoint(budget=memory, **step)
    else:
        stacks[:ckpt_ratio].checkpoint()
    if pipeline_stages != 1:
        s.cut_evenly(pipeline_stages, target=pipeline_engine)
