"""The launch script that `plan -o` writes can be followed, with DeepSpeed's settings."""

import re
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from slapo_rewrite.plan.candidates import Predicted, Way
from slapo_rewrite.plan.plan_files import write_plan
from slapo_rewrite.plan.planning import Planned, Wanted
from slapo_rewrite.simulate.hardware import hardware
from tests.forked import printed
from tests.golden import ROOT
from tests.rewriting import imported

EXAMPLE = ROOT / "examples" / "train_gpt"
STEPS, ROWS, RATE = 3, 8, 1e-3
SCHEDULE = (
    (EXAMPLE / "schedule.py")
    .read_text()
    .replace("stages: int = 2", "pipeline_stages: int = 1")
    .replace(
        "    s.cut_evenly(stages)",
        "    if pipeline_stages > 1:\n        s.cut_evenly(pipeline_stages)",
    )
)
# Runs the lines that the launch script says, with what a user writes where it has dots.
TRAIN = f"""\
import argparse, importlib, logging, os, sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, PipelineParallelGrid
from torch.optim import AdamW

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
args = parser.parse_args()
folder = Path(args.deepspeed_config).parent
sys.path.insert(0, str(folder))
deepspeed.utils.logger.setLevel(logging.WARNING)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
gpt = importlib.import_module("rewritten.gpt")
for name in ("pipeline", "tensor_parallel", "loading"):
    if (folder / "rewritten" / f"{{name}}.py").exists():
        globals()[name] = importlib.import_module(f"rewritten.{{name}}")
torch.manual_seed(0)
for line in (folder / "launch.sh").read_text().splitlines():
    if line.startswith("#   ") and "slapo-rewrite" not in line:
        given = "gpt.GPT(gpt.GPTConfig())" if "lambda" in line else "gpt.GPTConfig()"
        if "initialize" in line:
            given = "args=args, model=model, optimizer=AdamW(model.parameters(), lr={RATE})"
        exec(line.removeprefix("#   ").replace("...", given))
stages = "module" in globals()
if stages:
    engine, *_ = deepspeed.initialize(
        args=args, model=module, optimizer=AdamW(module.parameters(), lr={RATE})
    )
for step in range({STEPS}):
    total, many = 0.0, engine.gradient_accumulation_steps()
    batches = []
    for number in range(many):
        drawn = torch.Generator().manual_seed(step * many + number)
        ids = torch.randint(256, ({ROWS} // many, 17), generator=drawn)
        batches.append({{"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}})
    if stages:
        total = engine.train_batch(iter([pipeline.batch(**batch) for batch in batches])).item()
    for batch in [] if stages else batches:
        loss = engine(**batch)[1]
        engine.backward(loss)
        engine.step()
        total += loss.item() / many
    if torch.distributed.get_rank() == 0:
        print(f"loss {{total:.6f}}", flush=True)
torch.distributed.destroy_process_group()
"""


def alone(many: int) -> list[float]:
    """The losses of the original in one process."""
    gpt = imported(EXAMPLE / "gpt.py")
    torch.manual_seed(0)
    model = gpt.GPT(gpt.GPTConfig())
    optimizer = AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        losses.append(0.0)
        for number in range(many):
            drawn = torch.Generator().manual_seed(step * many + number)
            ids = torch.randint(256, (ROWS // many, 17), generator=drawn)
            loss = model(ids[:, :-1], ids[:, 1:])[1] / many
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    "way",
    [Way(tensor=2, rows=ROWS, zero=1), Way(pipeline=2, rows=ROWS // 2, micro_batches=2)],
    ids=["tensor", "pipeline"],
)
def test_what_the_launch_script_says_trains_as_one_process_does(tmp_path, way):
    schedule, train = tmp_path / "schedule.py", tmp_path / "train.py"
    schedule.write_text(SCHEDULE)
    train.write_text(TRAIN)
    gpu = hardware("h100", "fp32")
    source = str(EXAMPLE / "gpt.py")
    wanted = Wanted(source, str(schedule), [], 2, gpu, 1e9, ROWS, None, 8, "fp32")
    predicted = Predicted(way, 1.0, 1.0, 1.0, 0.0, {"compute": 1.0})
    folder: Path = tmp_path / "out"
    write_plan(Planned(wanted, [predicted], [], {}, [], {"pipeline_stages"}), folder)
    configured = folder / "deepspeed.json"
    said = printed(train, 2, "--deepspeed_config", str(configured))
    losses = [float(loss) for loss in re.findall(r"^loss (.*)$", said, re.M)]
    assert losses == pytest.approx(alone(way.micro_batches), abs=1e-4)
