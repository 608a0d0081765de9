"""Stages run by DeepSpeed's pipeline engine in real processes, against the model in one."""

import copy
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slapo_rewrite.emit.rewrite import import_source, rewrite
from slapo_rewrite.model.twin import loss_of, step_inputs
from slapo_rewrite.source.index import SourceFile, locate
from tests.processes import run
from tests.rewriting import written

pytestmark = pytest.mark.processes

MICRO_BATCHES, STEPS = 2, 5
GPT = str(Path(__file__).parents[1] / "models" / "gpt.py")
SIZES = "vocab_size=203, num_hidden_layers=4"
WIDTHS = "hidden_size=32, num_attention_heads=4, intermediate_size=48, max_position_embeddings=32"


@dataclass(frozen=True)
class Case:
    """A model and how it is cut.

    Attributes:
        source: The model's file or module.
        schedule: The schedule.
        stages: Pipeline stages.
        replicas: Data-parallel replicas.
        shards: Tensor-parallel ranks.
        clipping: The norm that gradients are clipped to, with ZeRO 1; 0 for neither.
        unfit: A setting that the stages are not written for, and what is said of it.
    """

    source: str
    schedule: str
    stages: int
    replicas: int = 1
    shards: int = 1
    clipping: float = 0.0
    unfit: tuple[str, Any, str] | None = None


def transformers_case(family: str, model: str, config: str, cuts: list[str], **sizes: Any) -> Case:
    name = config.partition("(")[0]
    schedule = f"""\
from transformers import {name}


def model(m):
    return m.{model}({config})


def schedule(s):
"""
    schedule += "".join(f"    {line}\n" for line in cuts)
    return Case(f"transformers.models.{family}.modeling_{family}", schedule, **sizes)


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

CASES = {
    "gpt": Case(GPT, GPT_SCHEDULE, stages=2, shards=2),
    "slices": Case(GPT, GPT_SCHEDULE.replace("    s.infer_sync()\n", SLICES), stages=2, shards=2),
    "bert": transformers_case(
        "bert",
        "BertForMaskedLM",
        f"BertConfig({SIZES}, {WIDTHS}, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)",
        ['s["bert.encoder.layer"][1].cut_pipeline_stage()'],
        stages=2,
        replicas=2,
        clipping=0.2,
        unfit=("is_decoder", True, "bert.config.is_decoder` is True"),
    ),
    "llama": transformers_case(
        "llama",
        "LlamaForCausalLM",
        f"LlamaConfig({SIZES}, {WIDTHS}, num_key_value_heads=2)",
        ['s["model.embed_tokens"].cut_pipeline_stage()']
        + [f's["model.layers"][{i}].cut_pipeline_stage()' for i in (1, 2)],
        stages=4,
        unfit=("tie_word_embeddings", True, "shared otherwise.*lm_head.weight"),
    ),
    "gpt2": transformers_case(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config(vocab_size=2003, n_layer=4, n_embd=32, n_head=4, n_positions=32, "
        "resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)",
        ['s.cut_evenly(4, by="cost")'],
        stages=4,
    ),
    "t5": transformers_case(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config(vocab_size=203, num_layers=2, d_model=32, d_kv=8, num_heads=4, d_ff=48, "
        "dropout_rate=0.0)",
        [
            's["encoder.block"][0].cut_pipeline_stage()',
            's["encoder.final_layer_norm"].cut_pipeline_stage()',
            's["decoder.block"][0].cut_pipeline_stage()',
        ],
        stages=4,
    ),
}


def made(folder: Path) -> tuple[Any, Any, Any]:
    """The schedule, the rewritten model's module and its pipeline, from an output folder."""
    sys.path.insert(0, str(folder.parent))
    name = next(folder.glob("*.model")).stem  # a marker
    names = ("s", name, "pipeline")
    schedule, module, pipeline = (importlib.import_module(f"{folder.name}.{n}") for n in names)
    return schedule, module, pipeline


def steps_of(schedule: Any, model: Any, replicas: int) -> list[list[dict[str, Any]]]:
    """What the micro-batches of all steps give the model, those of all replicas."""
    count = MICRO_BATCHES * replicas
    return [
        [step_inputs(schedule, model, seed=count * step + m) for m in range(count)]
        for step in range(STEPS)
    ]


def trained(folders: list[tuple[Path, Case]]) -> list[Any]:
    """For each case, losses and weights after training with the pipeline engine."""
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    results = []
    for folder, case in folders:
        schedule, module, pipeline = made(folder)
        start, drawn = torch.load(folder / "start.pt")
        topology = PipeModelDataParallelTopology(case.stages, case.shards, case.replicas)
        torch.manual_seed(0)
        model = schedule.model(module)
        # transformers initialises a file of its own a little differently from one outside of it.
        whole = start if case.shards > 1 else model.state_dict()
        torch.manual_seed(0)
        pipe = pipeline.build(model.config, topology=topology)
        # The weights are drawn as in one process.
        torch.testing.assert_close(pipeline.to_full(pipe), whole, rtol=0, atol=0)
        if case.shards > 1:
            assert torch.equal(torch.get_rng_state(), drawn)
        pipeline.load_full(pipe, {name: tensor + 1 for name, tensor in start.items()})
        with pytest.raises(ValueError, match=f"cut into {case.stages} stages, not 7"):
            pipeline.build(model.config, num_stages=7)
        if case.unfit:
            name, value, message = case.unfit
            other = copy.deepcopy(model.config)
            setattr(other, name, value)
            with pytest.raises(ValueError, match=message):
                pipeline.STAGES[0](other)
        pipeline.load_full(pipe, start)
        torch.testing.assert_close(pipeline.to_full(pipe), start, rtol=0, atol=0)
        engine, *_ = deepspeed.initialize(
            model=pipe,
            optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": MICRO_BATCHES,
                "gradient_clipping": case.clipping,
                "zero_optimization": {"stage": 1 if case.clipping else 0},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 1000,
                "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
            },
        )
        first = MICRO_BATCHES * engine.grid.get_data_parallel_rank()
        losses = []
        for step in steps_of(schedule, model, case.replicas):
            mine = step[first : first + MICRO_BATCHES]
            batches = iter([pipeline.batch(**inputs) for inputs in mine])
            losses.append(float(engine.train_batch(batches)))
        full = pipeline.to_full(pipe)
        own = sum(p.numel() for p in pipe.parameters())
        results.append((losses, full if dist.get_rank() == 0 else None, own))
    return results


def reference(folder: Path, case: Case) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses and weights of the original in one process; saves what it starts from."""
    schedule = importlib.import_module(f"{folder.name}.s")
    module = import_source(SourceFile.read(*locate(case.source)))
    torch.manual_seed(0)
    model = schedule.model(module)
    torch.save((model.state_dict(), torch.get_rng_state()), folder / "start.pt")
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in steps_of(schedule, model, case.replicas):
        total = 0.0
        for inputs in step:
            loss = loss_of(schedule, model(**inputs)) / len(step)
            loss.backward()
            total += float(loss.detach())
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model.state_dict(), sum(p.numel() for p in model.parameters())


def test_the_engine_trains_as_one_process_does(tmp_path):
    folders = []
    for name, case in CASES.items():
        (tmp_path / f"{name}.py").write_text(case.schedule)
        output = rewrite(case.source, str(tmp_path / f"{name}.py"))
        model_file = written(tmp_path, output)
        folder = model_file.parent
        (folder / "s.py").write_text(case.schedule)
        (folder / f"{model_file.stem}.model").touch()
        folders.append((folder, case))
    sys.path.insert(0, str(tmp_path))
    expected = [reference(folder, case) for folder, case in folders]
    ranks = run(trained, 4, folders, timeout_s=300)
    for number, (losses, weights, size) in enumerate(expected):
        for results in ranks:
            torch.testing.assert_close(results[number][0], losses, rtol=1e-5, atol=1e-6)
            assert results[number][2] < size
        full = ranks[0][number][1]
        assert full.keys() == weights.keys()
        torch.testing.assert_close(full, weights, rtol=1e-4, atol=1e-5)
