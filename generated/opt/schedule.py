"""OPTForCausalLM in its default configuration.

Derived from the model by slapo-rewrite 0.2.0: which layers can be split, and how long their
collectives take, for one layer of each kind. `slapo-rewrite explain` shows the collectives that
`infer_sync` adds. This is an ordinary schedule: edit it, and use it with `--schedule FILE`.
"""

from transformers import OPTConfig


def model(m):
    """OPTForCausalLM in its default configuration."""
    return m.OPTForCausalLM(OPTConfig())


def verify_model(m):
    """A small model, without dropout, for verification."""
    return m.OPTForCausalLM(
        OPTConfig(
            vocab_size=203,
            hidden_size=64,
            num_hidden_layers=2,
            ffn_dim=256,
            max_position_embeddings=64,
            word_embed_proj_dim=64,
            dropout=0.0,
            num_attention_heads=4,
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
    pipeline_stages: int = 1,
    pipeline_engine: str = "deepspeed",
):
    """Splits the layers and checkpoints the first `ckpt_ratio` of them.

    With `parallel_loss` the logits stay split where training computes a loss of them, and only the
    loss is summed; without it they are gathered on every rank.
    With `memory` (such as "40GiB") the layers to recompute are chosen so that a step of `batch`
    rows of `sequence` tokens fits on each of `ranks` GPUs that share layers, in the least time;
    `ckpt_ratio` is then ignored.
    With `fuse` every rule that pays is applied first, before layers are split.
    With `autocast` "bfloat16" or "float16" products are in half precision.
    With `pipeline_stages` above 1 the output has a `pipeline.py` with this number of stages, for
    DeepSpeed, or with `pipeline_engine` "torch" for `torch.distributed.pipelining`.
    """
    if fuse:
        s.apply_all()
    layers = s["model.decoder.layers"]
    if tensor_parallel:
        # 56.7 million parameters: split by outputs, then by inputs, and the results are summed.
        layers["*.fc1"].shard(["weight", "bias"], axis=0)
        layers["*.fc2"].shard("weight", axis=1)
        # 28.3 million parameters: split by outputs, then by inputs, and the results are summed.
        layers["*.self_attn.{q_proj,k_proj,v_proj}"].shard(["weight", "bias"], axis=0)
        layers["*.self_attn.out_proj"].shard("weight", axis=1)
        # 40.2 million parameters: each rank has the same number of words of the vocabulary, and as
        # many rows of other tables.
        s["model.decoder.{embed_tokens,embed_positions}"].shard("weight", axis=0)
        s["lm_head"].shard("weight", axis=0)
        if parallel_loss:
            s["lm_head"].sync("bwd_post", "all_reduce")
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
    if pipeline_stages != 1:
        s.cut_evenly(pipeline_stages, target=pipeline_engine)

# slapo-rewrite 0.2.0: worked out of ca061a8b3b4ab973, 01be3be993215aa6
