"""What does tensor parallelism add to the host's time of a training step?

    python -m benchmark.host_time [--only MODEL ...]

Small models of 16 layers run forward, backward and gradient clipping on one thread: the original,
and the bundled schedule's output as the first of one, two and eight ranks, of which the others need
not exist (torch's `fake` backend: collectives cost only their calls). Layers of width 64 are bound
by the host's work, like layers on a GPU that waits for it. Original and output take turns; ratios
are of CPU times of one round, and their median counts. If the timed model is not split, or alone
does not compute the original's loss, the script stops.

Writes `benchmark/results/host_time.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmark import report
from benchmark.tensor_parallel import MOST_SHARE, held
from slapo_rewrite.emit.rewrite import rewrite
from slapo_rewrite.emit.write import write
from slapo_rewrite.model.meta_device import pretend_world

NAME = "host_time"
WORLDS = (1, 2, 8)
ROUNDS, STEPS = 9, 10
LAYERS, HIDDEN, HEADS, VOCABULARY = 16, 64, 8, 256
# The class that is trained, and what its configuration is made of.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": HIDDEN,
            "d_kv": HIDDEN // HEADS,
            "d_ff": 2 * HIDDEN,
            "num_layers": LAYERS // 2,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
    ),
}
SLICED = ("bert", "gpt2", "llama")  # whose schedules have sequence parallelism
Clip = Callable[[nn.Module], Any]


def built(module: Any, model: str) -> nn.Module:
    """A small model of a module's classes, to be trained."""
    import transformers

    cls, config, sizes = MODELS[model]
    made = getattr(transformers, config)(**sizes, vocab_size=VOCABULARY, use_cache=False)
    torch.manual_seed(0)
    own: nn.Module = getattr(module, cls)(made)
    return own.train()


def loss_of(model: nn.Module) -> Tensor:
    """The loss of a row of tokens."""
    ids = torch.zeros(1, HEADS, dtype=torch.long)
    found: Tensor = model(input_ids=ids, labels=ids).loss
    return found


def check_is_split(ours: nn.Module, whole: nn.Module, world: int) -> None:
    """Refuses to time something else: a rank of several that holds all, or other numbers.

    Raises:
        RuntimeError: It is that.
    """
    share = held(ours) / held(whole)
    if world > 1 and share > MOST_SHARE:
        raise RuntimeError(f"one of {world} ranks holds {share:.2f} of the parameters")
    if world == 1:
        pair = loss_of(ours.eval()), loss_of(whole.eval())
        if not torch.allclose(*pair):
            raise RuntimeError(f"a loss of {pair[0]}, the original's is {pair[1]}")
        ours.train(), whole.train()


def seconds(model: nn.Module, clip: Clip, steps: int) -> float:
    """CPU time of a step."""
    before = time.process_time()
    for _ in range(steps):
        loss_of(model).backward()
        clip(model)
        model.zero_grad()
    return (time.process_time() - before) / steps


def measure(
    model: str, is_sliced: bool, folder: Path, rounds: int = ROUNDS, steps: int = STEPS
) -> dict[str, Any]:
    """The original's time and, at each world size, the output's over it."""
    source = f"transformers.models.{model}.modeling_{model}"
    name = f"{model}_{is_sliced}"
    write(folder / name, rewrite(source, model, ["sequence_parallel=true"] * is_sliced).files)
    sys.path.insert(0, str(folder))
    output = importlib.import_module(f"{name}.modeling_{model}")
    clip_parts = importlib.import_module(f"{name}.tensor_parallel").clip_grad_norm_
    whole = built(importlib.import_module(source), model)
    found: dict[str, Any] = {}
    times = []
    for world in WORLDS:
        ratios = []
        with pretend_world(world) if world > 1 else contextlib.nullcontext():
            ours = built(output, model)
            check_is_split(ours, whole, world)
            for number in range(rounds + 1):
                pair = (
                    seconds(whole, clip_whole, steps),
                    seconds(ours, lambda m: clip_parts(m, 1.0), steps),
                )
                if number:  # the first round is a warm-up
                    ratios.append(pair[1] / pair[0])
                    times.append(pair[0])
        found[f"at {world}"] = round(statistics.median(ratios), 3)
    return {"original ms": round(1000 * min(times), 2), **found}


def clip_whole(model: nn.Module) -> Any:
    """Clips gradients as in one process."""
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def table(results: dict[str, Any]) -> str:
    """The results for the README."""
    header = ["model", "original, ms", *(f"ranks: {world}" for world in WORLDS)]
    rows = [
        [name, f"{row['original ms']:.1f}", *(f"{row[f'at {world}']:.2f}" for world in WORLDS)]
        for name, row in results["models"].items()
    ]
    return report.rendered(header, rows)


def main() -> None:
    """Measures and writes down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    only = parser.parse_args().only
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        models = {}
        for name in only:
            models[name] = measure(name, False, Path(folder))
            if name in SLICED:
                models[f"{name}, sequence parallel"] = measure(name, True, Path(folder))
    results: dict[str, Any] = {
        "versions": report.versions(("torch", "transformers")),
        "machine": report.machine(),
        "models": models,
    }
    if only == list(MODELS):
        report.write(NAME, results, table(results))
    else:
        print(table(results))


if __name__ == "__main__":
    main()
