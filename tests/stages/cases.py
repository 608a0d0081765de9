"""Models and how they are cut."""

from dataclasses import dataclass
from pathlib import Path

GPT = str(Path(__file__).parents[1] / "models" / "gpt.py")
SIZES = "vocab_size=203, num_hidden_layers=4"
WIDTHS = "hidden_size=32, num_attention_heads=4, intermediate_size=48, max_position_embeddings=32"

GPT_SCHEDULE = """\
import torch


def model(m):
    return m.GPT(m.GPTConfig(vocab_size=203, block_size=32, n_layer=4, n_head=4, n_embd=32))


def inputs(model):
    idx = torch.randint(model.config.vocab_size, (2, 17))
    return {"idx": idx[:, :-1], "targets": idx[:, 1:].contiguous()}


def loss(outputs):
    return outputs[1]


def schedule(s):
    blocks = s["transformer.h"]
    blocks["*.attn.c_attn"].shard(["weight", "bias"], axis=0, parts=3)
    blocks["*.mlp.c_fc"].shard(["weight", "bias"], axis=0)
    blocks["*.{attn,mlp}.c_proj"].shard("weight", axis=1)
    s["{transformer.wte,lm_head}"].shard("weight", axis=0)
    s.infer_sync()
    blocks[:2].checkpoint()
    blocks[1].cut_pipeline_stage()
"""

SLICES = """\
    s["transformer.drop"].sync("fwd_post", "scatter", axis=1)
    blocks["*.{attn,mlp}"].sync("fwd_pre", "all_gather", axis=1)
    blocks["*.{attn,mlp}.c_proj"].sync("fwd_post", "reduce_scatter", axis=1)
    s["transformer.ln_f"].sync("fwd_post", "all_gather", axis=1)
    s["lm_head"].sync("bwd_post", "all_reduce")
    s.infer_sync()
"""


@dataclass(frozen=True)
class Case:
    """A model and how it is cut.

    Attributes:
        source: The model's file or module.
        schedule: The schedule.
    """

    source: str
    schedule: str


def of_transformers(family: str, model: str, config: str, *cuts: str) -> Case:
    """A model of transformers, with the lines that cut it."""
    lines = "".join(f"    {line}\n" for line in cuts)
    return Case(
        f"transformers.models.{family}.modeling_{family}",
        f"""\
from transformers import {config.partition("(")[0]}


def model(m):
    return m.{model}({config})


def schedule(s):
{lines}""",
    )


def for_torch(schedule: str) -> str:
    """The same schedule with torch's engine in place of DeepSpeed's."""
    schedule = schedule.replace("cut_pipeline_stage()", 'cut_pipeline_stage(target="torch")')
    return schedule.replace('by="cost")', 'by="cost", target="torch")')


CASES = {
    "gpt": Case(GPT, GPT_SCHEDULE),
    "slices": Case(GPT, GPT_SCHEDULE.replace("    s.infer_sync()\n", SLICES)),
    "bert": of_transformers(
        "bert",
        "BertForMaskedLM",
        f"BertConfig({SIZES}, {WIDTHS}, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)",
        's["bert.encoder.layer"][1].cut_pipeline_stage()',
    ),
    "llama": of_transformers(
        "llama",
        "LlamaForCausalLM",
        f"LlamaConfig({SIZES}, {WIDTHS}, num_key_value_heads=2)",
        's["model.embed_tokens"].cut_pipeline_stage()',
        's["model.layers"][1].cut_pipeline_stage()',
        's["model.layers"][2].cut_pipeline_stage()',
    ),
    "gpt2": of_transformers(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config(vocab_size=2003, n_layer=4, n_embd=32, n_head=4, n_positions=32, "
        "resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)",
        's.cut_evenly(4, by="cost")',
    ),
    "t5": of_transformers(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config(vocab_size=203, num_layers=2, d_model=32, d_kv=8, num_heads=4, d_ff=48, "
        "dropout_rate=0.0)",
        's["encoder.block"][0].cut_pipeline_stage()',
        's["encoder"].cut_pipeline_stage()',
        's["decoder.block"][0].cut_pipeline_stage()',
    ),
}
