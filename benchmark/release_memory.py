"""How much memory of a training step and a forward pass do `release` and `step_in_backward` save?

    python -m benchmark.release_memory [MODEL ...] [WHAT ...]

Models of published sizes, on the meta device in float32: the original, and rewritten by
`s.release()`, by `s.step_in_backward()`, and by both. Torch's `MemTracker` gives the peak of the
bytes of all live tensors, including weights, gradients, moments and batch: in a training step
(forward, backward, and AdamW, with existing moments, one parameter after the other), without
recomputation and with every layer recomputed, and in a forward pass in eval mode without gradients,
with the head and without. In a forward pass the weights are left out.

Writes `benchmark/results/release_memory.json`.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import AdamW

from benchmark import report
from slapo_rewrite.emit.rewrite import try_out
from slapo_rewrite.model.costs import OnMeta
from slapo_rewrite.model.emitted import Emitted
from slapo_rewrite.project import Project

NAME = "release_memory"
ROWS = 8
WAYS = ("original", "release", "step_in_backward", "both")
ONE_ROW = "a step of one row, layers recomputed"
SHOWN = {"step": "a step", "recomputed": "a step, layers recomputed", ONE_ROW: ONE_ROW}
# In training, dropout of attention's weights has torch write them out on a CPU, and never on a GPU.
ATTENTION = {
    **dict.fromkeys(SHOWN, ("eager",)),
    **dict.fromkeys(("eval", "eval, no head"), ("eager", "sdpa")),
}


@dataclass(frozen=True)
class Model:
    """A model that is measured.

    Attributes:
        label: What it is called.
        head: Its class.
        config: The configuration's class and arguments.
        layers: The selection of its layers.
        tokens: How many a row has.
    """

    label: str
    head: str
    config: str
    layers: str
    tokens: int


MODELS = {
    "gpt2": Model(
        "GPT-2 XL", "GPT2LMHeadModel", "GPT2Config(n_embd=1600, n_layer=48, n_head=25)",
        "transformer.h.*", 1024,
    ),
    "bert": Model(
        "BERT-large", "BertForMaskedLM", "BertConfig(hidden_size=1024, num_hidden_layers=24, "
        "num_attention_heads=16, intermediate_size=4096)", "bert.encoder.layer.*", 512,
    ),
    "llama": Model(
        "Llama-3.2-1B", "LlamaForCausalLM", "LlamaConfig(vocab_size=128256, hidden_size=2048, "
        "intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, "
        "num_key_value_heads=8, tie_word_embeddings=True)", "model.layers.*", 2048,
    ),
    "t5": Model(
        "T5-base", "T5ForConditionalGeneration", "T5Config(d_model=768, d_ff=3072, "
        "num_layers=12, num_heads=12, decoder_start_token_id=0)",
        "{encoder,decoder}.block.*", 512,
    ),
}  # fmt: skip
SCHEDULE = """\
from transformers import {name}


def model(m):
    config = {config}
    config._attn_implementation = "{attention}"
    return m.{head}(config)


def schedule(s, release: bool = False, steps: bool = False, recomputed: bool = False):
    if release:
        s.release(sequence={tokens})
    if steps:
        s.step_in_backward()
    if recomputed:
        s["{layers}"].checkpoint()
"""


@dataclass(frozen=True)
class Case:
    """A case to measure.

    Attributes:
        model: The family.
        attention: Transformers' implementation of it.
        way: What the schedule has.
        what: A training step, one with every layer recomputed, or a forward pass in eval mode.
    """

    model: str
    attention: str
    way: str
    what: str

    @property
    def settings(self) -> list[str]:
        """The arguments of `--set`."""
        return [
            f"release={self.way in ('release', 'both')}",
            f"steps={self.way in ('step_in_backward', 'both')}",
            f"recomputed={self.what in ('recomputed', ONE_ROW)}",
        ]


def cases(model: str, whats: Sequence[str]) -> Iterator[Case]:
    """The cases of a model."""
    for what, attentions in ATTENTION.items():
        if what in whats:
            for way in WAYS if what in SHOWN else WAYS[:2]:
                yield from (Case(model, attention, way, what) for attention in attentions)


def measured(case: Case) -> float:
    """The most bytes."""
    model = MODELS[case.model]
    source = f"transformers.models.{case.model}.modeling_{case.model}"
    importlib.import_module(source)
    fields = {**asdict(model), "attention": case.attention}
    text = SCHEDULE.format(name=model.config.partition("(")[0], **fields)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "s.py"
        path.write_text(text)
        found: list[float] = []
        try_out(
            Project(source, str(path)),
            case.settings,
            lambda emitted, shortening: found.append(_counted(case, text, emitted)),
        )
        return found[0]


def _counted(case: Case, schedule: str, emitted: Emitted) -> float:
    names: dict[str, Any] = {}
    exec(schedule, names)
    with torch.device("meta"), OnMeta(is_gpu=False):
        live: Any = names["model"](emitted.module)
        ids = torch.zeros(
            1 if case.what == ONE_ROW else ROWS, MODELS[case.model].tokens, dtype=torch.long
        )
        batch: dict[str, Any] = {"input_ids": ids}
        if case.model == "t5":
            batch["decoder_input_ids"] = ids.clone()
        if case.model != "bert":
            batch["use_cache"] = False
        if case.what in SHOWN:
            return _of_step(live.train(), {**batch, "labels": ids.clone()}, case)
        if case.what == "eval":
            return _of_forward(live, live.eval(), batch)
        if case.model == "t5":
            return _of_forward(live, live.encoder.eval(), {"input_ids": ids})
        return _of_forward(live, live.base_model.eval(), batch)


def _of_forward(whole: nn.Module, model: nn.Module, batch: dict[str, Any]) -> float:
    tracker = MemTracker()
    tracker.track_external(whole)
    weights = tracker.get_tracker_snapshot("current")[torch.device("meta")]["Total"]
    with tracker, torch.no_grad():
        model(**batch)
    return float(tracker.get_tracker_snapshot("peak")[torch.device("meta")]["Total"] - weights)


def _of_step(model: Any, batch: dict[str, Any], case: Case) -> float:
    optimizers: list[torch.optim.Optimizer]
    if case.way in ("step_in_backward", "both"):
        make: Any = lambda name, parameter: AdamW([parameter], foreach=False)  # noqa: E731
        optimizers = list(model.step_in_backward(make).values())
        updating: list[torch.optim.Optimizer] = []
    else:
        optimizers = updating = [AdamW(model.parameters(), foreach=False)]

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:  # they make their moments
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    tracker = MemTracker()
    given = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    tracker.track_external(model, *optimizers, *given)
    with tracker:
        model(**batch).loss.backward()
        for optimizer in updating:
            optimizer.step()
            optimizer.zero_grad()
    return float(tracker.get_tracker_snapshot("peak")[torch.device("meta")]["Total"])


def table(content: dict[str, Any]) -> str:
    """The peaks in GiB, and what is saved of the original's, in the README's Markdown."""
    found = {
        (c["model"], c["what"], c["attention"], c["way"]): c["bytes"] for c in content["cases"]
    }
    rows = []
    models = [name for name in MODELS if any(c["model"] == name for c in content["cases"])]
    for model, (what, attentions) in itertools.product(models, ATTENTION.items()):
        for attention in attentions:
            if (model, what, attention, "original") not in found:
                continue
            base = found[model, what, attention, "original"]
            shown = f"{MODELS[model].label}, {SHOWN.get(what, what)} ({attention})"
            row: list[Any] = [shown, f"{base / 2**30:.2f}"]
            for way in WAYS[1:]:
                have = found.get((model, what, attention, way))
                row.append("" if have is None else f"{have / base - 1:+.1%}")
            rows.append(row)
    header = ["most memory", "original, GiB", *(f"`{w}`" for w in WAYS[1:3]), "both"]
    return report.rendered(header, rows)


def main() -> None:
    models = [name for name in sys.argv[1:] if name in MODELS] or MODELS
    whats = [name for name in sys.argv[1:] if name in ATTENTION] or [*ATTENTION]
    for model in models:
        own = []
        for case in cases(model, whats):
            own.append({**asdict(case), "bytes": measured(case)})
            print(f"{own[-1]['bytes'] / 2**30:.3f} GiB {case}", flush=True)
        file = report.FOLDER / "results" / f"{NAME}.json"
        earlier = report.read(NAME)["cases"] if file.is_file() else []
        others = [c for c in earlier if c["model"] != model or c["what"] not in whats]
        content = {
            "versions": report.versions(("torch", "transformers")),
            "rows": ROWS,
            "tokens": {name: each.tokens for name, each in MODELS.items()},
            "cases": [*others, *own],
        }
        report.write(NAME, content, table(content))


if __name__ == "__main__":
    main()
