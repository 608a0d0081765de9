"""Tensor parallel Llama, the first layers checkpointed.

With grouped-query attention the key/value heads are split as the query heads are, so a rank keeps
whole groups. On more ranks than there are key/value heads, several ranks hold the same one.

With `sequence_parallel` each rank computes what is between the split layers on its slice of the
sequence (arXiv 2205.05198). Rotary tables and masks need all of it, so the first layer scatters.

With `fork_dropout` the ranks draw different masks for the dropout of their heads, if there is any.
"""

from transformers import LlamaConfig


def model(m):
    """A Llama with grouped-query attention, of the shape of Llama 3 8B."""
    return m.LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
    )


def verify_model(m):
    """A small one: an odd vocabulary, two query heads for each key/value head."""
    return m.LlamaForCausalLM(
        LlamaConfig(
            vocab_size=203,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=64,
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
    """Splits the layers, and checkpoints the first `ckpt_ratio` of them.

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
    layers = s["model.layers"]
    if tensor_parallel:
        layers["*.self_attn.{q_proj,k_proj,v_proj}"].shard("weight", axis=0)
        layers["*.mlp.{gate_proj,up_proj}"].shard("weight", axis=0)
        layers["*.{self_attn.o_proj,mlp.down_proj}"].shard("weight", axis=1)

        if not fuse_head:
            s["{model.embed_tokens,lm_head}"].shard("weight", axis=0)
        if sequence_parallel:
            layers[0].sync("fwd_pre", "scatter", axis=1)
            layers["*.{self_attn,mlp}"].sync("fwd_pre", "all_gather", axis=1)
            layers["*.{self_attn.o_proj,mlp.down_proj}"].sync("fwd_post", "reduce_scatter", axis=1)
            s["model"].sync("fwd_post", "all_gather", axis=1)
        else:  # once for all layers that are handed the same rows
            layers["*.{self_attn,mlp}"].sync("bwd_post", "all_reduce")
        if parallel_loss and not fuse_head:
            s["lm_head"].sync("bwd_post", "all_reduce")
        s.infer_sync()
    if fork_dropout:
        layers["*.self_attn"].fork_rng()
    if autocast:
        s.autocast(autocast)
    if memory:
        precision = "fp32" if autocast else "bf16"  # of the weights, which autocast leaves
        step = {"batch": batch, "sequence": sequence, "ranks": ranks, "precision": precision}
        layers["*"].checkpoint(budget=memory, **step)
    else:
        layers[:ckpt_ratio].checkpoint()
    if pipeline_stages != 1:
        s.cut_evenly(pipeline_stages, target=pipeline_engine)
