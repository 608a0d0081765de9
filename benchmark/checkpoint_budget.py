"""Is the choice of `checkpoint(budget=...)` ever slower than the best share of whole layers?

    python -m benchmark.checkpoint_budget

Four families at their published sizes, with five budgets each, spaced evenly between the least
memory of a step and its memory without recomputation. Seconds are those of a step's operators,
predicted for one GPU; the best share is the smallest share of first layers that fits. The CPU time
of the choice is measured for Llama with 126 layers and with 2.

Writes `benchmark/results/checkpoint_budget.json`.
"""

from __future__ import annotations

import gc
import importlib
import time
from types import SimpleNamespace
from typing import Any

from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config

from benchmark import report
from slapo_rewrite.model.tree import Tree, build_model
from slapo_rewrite.primitives.recompute_budget import Step, counted, search_of
from slapo_rewrite.simulate.recompute_search import RecomputeSearch

NAME = "checkpoint_budget"
BUDGETS = 5
LLAMA: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
         "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip


def _llama(depth: int) -> Any:
    return lambda m: m.LlamaForCausalLM(LlamaConfig(num_hidden_layers=depth, **LLAMA))


# By the family: what is built, the lists of layers, rows of a micro-batch, tokens of a row.
MODELS: dict[str, tuple[Any, tuple[str, ...], int, int]] = {
    "bert": (lambda m: m.BertForMaskedLM(BertConfig()), ("bert.encoder.layer",), 16, 512),
    "gpt2": (lambda m: m.GPT2LMHeadModel(GPT2Config()), ("transformer.h",), 8, 1024),
    "llama": (_llama(32), ("model.layers",), 1, 4096),
    "t5": (
        lambda m: m.T5ForConditionalGeneration(T5Config()),
        ("encoder.block", "decoder.block"),
        16,
        512,
    ),
}
SAID = {"bert": "BERT-base", "gpt2": "GPT-2", "llama": "Llama 3 8B", "t5": "T5-small"}


def searched(family: str, build: Any, depth_seconds: list[float] | None = None) -> RecomputeSearch:
    """The search over what a model can recompute."""
    _, lists, rows, tokens = MODELS[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    tree = Tree(build_model(build, module))
    layers = {node.path for path in lists for node in tree.nodes[path].children.values()}
    step = Step(0.0, rows, tokens, "bf16", 1, 0, 1)
    start = time.process_time()
    search = search_of(counted(SimpleNamespace(model=build), layers, step, tree), layers, step)
    if depth_seconds is not None:
        none, least = search.judged(search.same(0)).peak, search.judged(search.shares()[-1]).peak
        search.least((none + least) / 2)
        depth_seconds.append(time.process_time() - start)
    return search


def results() -> list[dict[str, Any]]:
    """For each family and budget what is chosen, and the best share."""
    found = []
    for family, (build, _, rows, tokens) in MODELS.items():
        search = searched(family, build)
        none, low = search.judged(search.same(0)), search.smallest()
        shares = [none, *map(search.judged, search.shares())]
        for number in range(BUDGETS):
            budget = low + (none.peak - low) * (number + 0.5) / BUDGETS
            chosen = search.least(budget)
            assert chosen is not None
            best = min((s for s in shares if s.peak <= budget), key=lambda s: s.seconds)
            found.append(
                {
                    "model": family,
                    "rows": rows,
                    "tokens": tokens,
                    "budget": round(budget),
                    "peak": round(chosen.peak),
                    "seconds": chosen.seconds,
                    "share_peak": round(best.peak),
                    "share_seconds": best.seconds,
                    "plain_seconds": none.seconds,
                }
            )
            print(found[-1], flush=True)
    return found


def depths() -> dict[str, float]:
    """CPU seconds of a choice for a Llama of 2 and of 126 layers, the least of five runs."""
    took: dict[int, list[float]] = {2: [], 126: []}
    for _ in range(5):
        for depth, own in took.items():
            gc.collect()
            gc.disable()
            searched("llama", _llama(depth), own)
            gc.enable()
    return {str(depth): min(own) for depth, own in took.items()}


def table(content: dict[str, Any]) -> str:
    """How much longer than without recomputation, in the README's Markdown."""
    rows = []
    for family, said in SAID.items():
        own = [r for r in content["cases"] if r["model"] == family]
        row: list[Any] = [f"{said}, {own[0]['rows']} x {own[0]['tokens']}"]
        for r in own:
            longer = [r[name] / r["plain_seconds"] - 1 for name in ("seconds", "share_seconds")]
            row.append(f"{r['budget'] / 2**30:.2f}: {longer[0]:+.1%} / {longer[1]:+.1%}")
        rows.append(row)
    header = ["GiB: chosen / best share", *(f"budget {n + 1}" for n in range(BUDGETS))]
    took = content["depth_seconds"]
    return report.rendered(header, rows) + (
        f"\nA choice for a Llama of 126 layers takes {took['126'] / took['2']:.2f} times the CPU "
        "time of one for 2 layers.\n"
    )


def main() -> None:
    content = {
        "versions": report.versions(("torch", "transformers")),
        "cases": results(),
        "depth_seconds": depths(),
    }
    report.write(NAME, content, table(content))


if __name__ == "__main__":
    main()
