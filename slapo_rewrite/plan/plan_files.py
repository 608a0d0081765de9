"""Writes the files of a plan: the rewritten model, DeepSpeed's configuration, a launch script.

The schedule stays the user's own file: its knobs can be set, and a copy would be outdated by the
next edit. So the output is the schedule's with the settings of the plan, which its record contains,
and `--check` compares it like any other output.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from slapo_rewrite import errors
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.plan.candidates import Predicted, Way
from slapo_rewrite.plan.planning import Planned, described
from slapo_rewrite.simulate.step_memory import BUCKET

MODEL, CONFIGURATION, LAUNCH, PLAN = "rewritten", "deepspeed.json", "launch.sh", "plan.json"


def write_plan(planned: Planned, folder: Path) -> list[str]:
    """Writes the files of the best way, and returns their names."""
    best, wanted = planned.best[0], planned.wanted
    settings = planned.settings(best.way)
    output = rewrite(wanted.source, wanted.schedule, settings)
    texts = {
        CONFIGURATION: json.dumps(configuration(planned, best), indent=2) + "\n",
        LAUNCH: launch(planned, best, settings, folder, set(output.files)),
        PLAN: json.dumps(planned.as_json(), indent=1) + "\n",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / LAUNCH).chmod(0o755)
    except OSError as error:
        raise errors.unwritable(folder, error) from error
    write(folder / MODEL, output.files, inputs=output.inputs)
    return [f"{MODEL}/", *texts]


def configuration(planned: Planned, predicted: Predicted) -> dict[str, Any]:
    """DeepSpeed's configuration for a way."""
    wanted, way = planned.wanted, predicted.way
    found: dict[str, Any] = {
        "train_batch_size": wanted.batch,
        "train_micro_batch_size_per_gpu": way.rows,
        "gradient_accumulation_steps": way.micro_batches,
        "gradient_clipping": 0.0,  # the engine's default is 1
        "zero_optimization": {"stage": way.zero},
    }
    if way.zero > 1:
        found["zero_optimization"] |= {
            "overlap_comm": True,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
        }
    if wanted.precision != "fp32":
        found[wanted.precision] = {"enabled": True}
    if wanted.precision == "bf16" and way.zero == 1:
        found["data_types"] = {"grad_accum_dtype": "fp32"}
    if way.pipeline > 1:  # tensor-parallel ranks do not divide what stages send
        found["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    return found


def launch(
    planned: Planned, predicted: Predicted, settings: list[str], folder: Path, files: set[str]
) -> str:
    """A script that starts the training, with the command that writes the model as a comment."""
    wanted, way = planned.wanted, predicted.way
    again = ["slapo-rewrite", wanted.source, "--schedule", wanted.schedule]
    for setting in settings:
        again += ["--set", setting]
    again += ["-o", str(folder / MODEL)]
    each = min(wanted.node, wanted.gpus)
    nodes = -(-wanted.gpus // each)
    run = f"torchrun --nproc-per-node {each}"
    if nodes > 1:
        run += f' --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:29500"'
    lines = _layout(way, files)
    if wanted.hardware.precision == "tf32":
        lines.append('And first, for products in TF32: torch.set_float32_matmul_precision("high")')
    return (
        "#!/bin/sh\n"
        f"# {described(way)}: {predicted.seconds:.3g} s a step are predicted.\n"
        "# The rewritten model was made, and is made again, by\n"
        f"#   {shlex.join(again)}\n"
        + "".join(f"# {line}\n" for line in lines)
        + f'exec {run} "${{1:-train.py}}" --deepspeed_config "$(dirname "$0")/{CONFIGURATION}"\n'
    )


def _layout(way: Way, files: set[str]) -> list[str]:
    """The lines by which a training program tells DeepSpeed and the model the layout of ranks.

    Without them DeepSpeed treats all ranks as replicas, and the model treats all ranks as
    tensor-parallel.
    """
    sizes = f"num_pp={way.pipeline}, num_mp={way.tensor}, num_dp={way.data}"
    topology = f"  topology = PipeModelDataParallelTopology({sizes})"
    if way.pipeline > 1:
        made = ["  module = pipeline.build(..., topology=topology)"]
    elif "tensor_parallel.py" in files:
        made = [
            "  grid = PipelineParallelGrid(topology=topology)",
            "  tensor_parallel.set_group(grid.get_model_parallel_group())",
            "  model = loading.build(lambda: ...)",
            "  engine, *_ = deepspeed.initialize(..., mpu=grid)",
        ]
    else:
        return ["All ranks are replicas, as DeepSpeed takes them."]
    return [
        "Which rank is what, train.py says by deepspeed.runtime.pipe.topology:",
        topology,
        *made,
    ]
