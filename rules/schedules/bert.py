"""Tensor parallel BERT for masked language modeling, the first layers checkpointed.

Attention is split by heads and the MLP by its inner width, so a layer needs one all-reduce after
each, as in Megatron-LM (arXiv 1909.08053). The vocabulary is split in the embedding and in the
head, which share their weight. With `fork_dropout` the ranks draw different dropout masks.

With `sequence_parallel` each rank computes what is between the split layers (norms, dropout, the
residual stream) on its slice of the sequence, as in arXiv 2205.05198: attention and MLP start with
an all-gather and end with a reduce-scatter. The world size must divide the sequence's length.
"""

from transformers import BertConfig


def model(m):
    """BERT-base."""
    return m.BertForMaskedLM(BertConfig())


def verify_model(m):
    """A small one, with a vocabulary that no world size divides."""
    return m.BertForMaskedLM(
        BertConfig(
            vocab_size=203,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
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
    layers = s["bert.encoder.layer"]
    if tensor_parallel:
        layers["*.attention.self.{query,key,value}"].shard(["weight", "bias"], axis=0)
        layers["*.intermediate.dense"].shard(["weight", "bias"], axis=0)
        layers["*.{attention.output.dense,output.dense}"].shard("weight", axis=1)

        if not fuse_head:
            s["bert.embeddings.word_embeddings"].shard("weight", axis=0)
            s["cls.predictions.decoder"].shard(["weight", "bias"], axis=0)
        if sequence_parallel:
            s["bert.encoder"].sync("fwd_pre", "scatter", axis=1)
            layers["*.{attention.self,intermediate}"].sync("fwd_pre", "all_gather", axis=1)
            layers["*.{attention.output,output}.dense"].sync("fwd_post", "reduce_scatter", axis=1)
            s["bert.encoder"].sync("fwd_post", "all_gather", axis=1)
        else:  # once for queries, keys and values together
            layers["*.attention.self"].sync("bwd_post", "all_reduce")
        if parallel_loss and not fuse_head:
            s["cls.predictions.decoder"].sync("bwd_post", "all_reduce")
        s.infer_sync()
    if fork_dropout:
        layers["*" if sequence_parallel else "*.attention.self"].fork_rng()
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
