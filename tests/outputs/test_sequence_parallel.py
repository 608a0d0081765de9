"""Sequence parallelism: slices of the sequence between the split layers, as in Megatron-LM."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.runtime import tensor_parallel as tp
from tests.marks import long
from tests.numbers import Case, compare, modules, prepare
from tests.processes import run
from tests.rewriting import refused

ROOT = Path(__file__).resolve().parents[2]
GPT = (ROOT / "tests/models/gpt.py").read_text()
SCHEDULE = (ROOT / "tests/models/gpt_schedule.py").read_text()


def switched_on(schedule: str) -> str:
    """The text of a schedule with sequence parallelism, half of the layers checkpointed."""
    for knob, value in (
        ("sequence_parallel: bool = False", "True"),
        ("ckpt_ratio: float = 0.0", "0.5"),
    ):
        assert knob in schedule
        schedule = schedule.replace(knob, f"{knob.rpartition(' ')[0]} {value}")
    # Beside a first layer selected by its number a share is written by numbers, with a warning.
    return schedule.replace("layers[:ckpt_ratio]", 'layers[: round(ckpt_ratio * len(layers["*"]))]')


CASES = {"gpt": Case(GPT, switched_on(SCHEDULE))} | {
    name: Case(
        f"transformers.models.{name}.modeling_{name}",
        switched_on((ROOT / f"rules/schedules/{name}.py").read_text()),
        1e-10 if name == "bert" else 1e-6,  # the loss of causal models is computed in float32
    )
    for name in ("bert", "gpt2", "llama")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sequence")
    prepare(path, CASES)
    return path


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "names"), [long(1, CASES), (2, CASES), long(4, ["gpt", "llama"])]
)
def test_numbers(folder, world, names):
    run(compare, world, folder, {name: CASES[name] for name in names})


def count_collectives(folder: Path, layers: int) -> tuple[Counter[str], Counter[str]]:
    """The collectives of a forward and of a backward pass of the GPT."""
    _, rewritten = modules(folder, "gpt", CASES["gpt"])
    model = rewritten.GPT(
        rewritten.GPTConfig(vocab_size=24, block_size=16, n_layer=layers, n_head=4, n_embd=16)
    )
    ids = torch.arange(16).view(1, 16)
    with torch.no_grad():
        for parameter in model.parameters():  # no two ranks have the same part
            parameter.add_(0.1 * dist.get_rank())
    model(ids, ids)  # the first run of a layer looks at what the others have
    counts: list[Counter[str]] = []
    # torch's own names for a collective call each other.
    names = {"all_gather": "all_gather", "all_reduce": "all_reduce"}
    names[
        next(n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n))
    ] = "reduce_scatter"

    def counting(name, function):
        def counted(*args, **kwargs):
            counts[-1][name] += 1
            return function(*args, **kwargs)

        return counted

    with mock.patch.multiple(dist, **{n: counting(k, getattr(dist, n)) for n, k in names.items()}):
        counts.append(Counter())
        _, loss = model(ids, ids)
        counts.append(Counter())
        loss.backward()
    with pytest.raises(
        ValueError, match=r"axis 1 of a tensor of shape \(1, 15, 16\) does not divide"
    ):
        model(ids[:, :15])
    return counts[0], counts[1]


@pytest.mark.processes
def test_a_block_has_as_few_collectives_as_can_be(tmp_path):
    """Two of each kind in each direction; what else there is does not grow with the sequence."""
    case = Case(
        GPT, CASES["gpt"].schedule.replace("ckpt_ratio: float = 0.5", "ckpt_ratio: float = 0.0")
    )
    prepare(tmp_path, {"gpt": case})
    few, many = (run(count_collectives, 2, tmp_path, layers)[0] for layers in (1, 3))
    forward, backward = ({k: b[k] - a[k] for k in b} for a, b in zip(few, many, strict=True))
    assert forward == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 0}
    norms_and_biases = 2 * (2 * 2 + 2)
    assert backward == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": norms_and_biases}


LINES = [line for line in SCHEDULE.splitlines() if "axis=1)" in line and ".sync(" in line]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split('"')[1] + line.split('"')[5])
@pytest.mark.parametrize("what", ["left out", long("along another axis")])
def test_a_line_that_is_wrong_is_refused(line, what, tmp_path):
    schedule = CASES["gpt"].schedule
    assert line in schedule
    changed = "" if what == "left out" else line.replace("axis=1", "axis=0")
    text = refused(
        tmp_path, GPT, schedule.replace(line + "\n", changed and changed + "\n"), "SR104"
    )
    assert "s.py:" in text and "source_0.py:" in text
    assert "a part" in text or "is split along axis" in text or "is whole on every rank" in text


def test_attention_over_a_slice(tmp_path):
    """With whole layers on a slice, attention would see no more than the slice."""
    schedule = SCHEDULE[: SCHEDULE.index("def schedule(")] + (
        "def schedule(s):\n"
        '    s["transformer.drop"].sync("fwd_post", "scatter", axis=1)\n'
        '    s["transformer.ln_f"].sync("fwd_post", "all_gather", axis=1)\n'
    )
    text = refused(tmp_path, GPT, schedule, "SR104")
    assert "`scaled_dot_product_attention` needs the whole axis, but each rank has only" in text
    assert "y = F.scaled_dot_product_attention(q, k, v" in text and '"scatter", axis=1' in text
    assert 'at the module around this: .sync("fwd_pre", "all_gather", axis=1)' in text


def test_llama_scatters_in_its_first_layer(tmp_path):
    output = rewrite(
        "transformers.models.llama.modeling_llama", "llama", ["sequence_parallel=true"]
    )
    text = output.files[output.model_file]
    assert (
        '''\
class ScatteringLlamaDecoderLayer(LlamaDecoderLayer):
    """A `LlamaDecoderLayer` whose input is scattered over the tensor-parallel group."""

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return super().forward(scatter(hidden_states, axis=1), *args, **kwargs)
'''
        in text
    )
    assert text.count("all_gather(") == 3 and text.count("reduce=ReduceScatter(axis=1)") == 2


def test_a_group_of_one_slices_nothing():
    assert tp.scatter(torch.zeros(2, 17), 1).shape == (2, 17)
