"""GPTNeoForCausalLM in its default configuration.

Derived from the model by slapo-rewrite 0.2.0: which layers can be split, and how long their
collectives take, for one layer of each kind. `slapo-rewrite explain` shows the collectives that
`infer_sync` adds. This is an ordinary schedule: edit it, and use it with `--schedule FILE`.
"""

from transformers import GPTNeoConfig


def model(m):
    """GPTNeoForCausalLM in its default configuration."""
    return m.GPTNeoForCausalLM(GPTNeoConfig())


def verify_model(m):
    """A small model, without dropout, for verification."""
    return m.GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=203,
            max_position_embeddings=64,
            hidden_size=64,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            num_heads=4,
            window_size=8,
            classifier_dropout=0.0,
            bos_token_id=202,
            eos_token_id=202,
            attention_layers=["global", "local"],
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
    layers = s["transformer.h"]
    if tensor_parallel:
        # 806 million parameters: split by outputs, then by inputs, and the results are summed.
        layers["*.mlp.c_fc"].shard(["weight", "bias"], axis=0)
        layers["*.mlp.c_proj"].shard("weight", axis=1)
        # 403 million parameters: split by outputs, then by inputs, and the results are summed.
        layers["*.attn.attention.{q_proj,k_proj,v_proj}"].shard("weight", axis=0)
        layers["*.attn.attention.out_proj"].shard("weight", axis=1)
        # 107 million parameters: each rank has the same number of words of the vocabulary, and as
        # many rows of other tables.
        s["transformer.{wte,wpe}"].shard("weight", axis=0)
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

# slapo-rewrite 0.2.0: worked out of 6aea8e959ebdffa7, b2832ca3872765c5
