"""AlbertForMaskedLM in its default configuration.

Derived from the model by slapo-rewrite 0.2.0: which layers can be split, and how long their
collectives take, for one layer of each kind. `slapo-rewrite explain` shows the collectives that
`infer_sync` adds. This is an ordinary schedule: edit it, and use it with `--schedule FILE`.
"""

from transformers import AlbertConfig


def model(m):
    """AlbertForMaskedLM in its default configuration."""
    return m.AlbertForMaskedLM(AlbertConfig())


def verify_model(m):
    """A small model, without dropout, for verification."""
    return m.AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=203,
            embedding_size=32,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=64,
            classifier_dropout_prob=0.0,
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
    fuse: bool = False,
    autocast: str = "",
):
    """Splits the layers and checkpoints the first `ckpt_ratio` of them.

    With `parallel_loss` the logits stay split where training computes a loss of them, and only the
    loss is summed; without it they are gathered on every rank.
    With `memory` (such as "40GiB") the layers to recompute are chosen so that a step of `batch`
    rows of `sequence` tokens fits on each of `ranks` GPUs that share layers, in the least time;
    `ckpt_ratio` is then ignored.
    With `fuse` every rule that pays is applied first, before layers are split.
    With `autocast` "bfloat16" or "float16" products are in half precision.
    """
    if fuse:
        s.apply_all()
    layers = s["albert.encoder.albert_layer_groups"]
    if tensor_parallel:
        # 134 million parameters: split by outputs, then by inputs, and the results are summed.
        layers["*.albert_layers.*.ffn"].shard(["weight", "bias"], axis=0)
        layers["*.albert_layers.*.ffn_output"].shard("weight", axis=1)
        # 67.1 million parameters: split by outputs, then by inputs, and the results are summed.
        layers["*.albert_layers.*.attention.{query,key,value}"].shard(["weight", "bias"], axis=0)
        layers["*.albert_layers.*.attention.dense"].shard("weight", axis=1)
        # 3.87 million parameters: each rank has the same number of words of the vocabulary.
        s["albert.embeddings.word_embeddings"].shard("weight", axis=0)
        s["predictions.decoder"].shard(["weight", "bias"], axis=0)
        if parallel_loss:
            s["predictions.decoder"].sync("bwd_post", "all_reduce")
        # Left whole: `albert.encoder.embedding_hidden_mapping_in`, `predictions.dense`: splitting
        # it would cost more than it saves.
        s.infer_sync()
    if autocast:
        s.autocast(autocast)
    if memory:
        layers["*"].checkpoint(
            budget=memory,
            batch=batch,
            sequence=sequence,
            ranks=ranks,
            precision="fp32" if autocast else "bf16",
        )
    else:
        layers[:ckpt_ratio].checkpoint()

# slapo-rewrite 0.2.0: worked out of 1034ec3b85c14da1, e948c3e33f4dade5
