"""For what share of the modules of Hugging Face models is the expression found that makes them?

    python benchmark/construction_sites.py [--only bert,llama] [--base] [--limit 45]

Builds every causal, masked and sequence-to-sequence language model of the installed transformers
with its default configuration on the meta device, and looks for the construction site of each
module except the root. A family that takes longer than the limit is tried again with two layers,
and marked so.

Each site is held against the place where Python really was when the module was made: the call stack
in `nn.Module.__init__` must pass through exactly the expression that was found. A module whose
making cannot be seen that way (a deep copy, an instance made at import) counts as `unseen`. The
search itself is not told these stacks, as it is where the tool builds a model
(`slapo_rewrite.model.tree.build_model`); the last column says what it finds with them.

Writes `benchmark/results/construction_sites.json`.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import multiprocessing.connection
import platform
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

RESULTS = Path(__file__).parent / "results" / "construction_sites.json"
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}


def families(only: set[str]) -> list[tuple[str, str, str]]:
    """(kind, model type, class name) of every language model, each class and type once."""
    from transformers.models.auto import modeling_auto

    return [
        (kind, model_type, name)
        for kind, mapping in KINDS.items()
        for model_type, names in getattr(modeling_auto, mapping).items()
        if not only or model_type in only
        for name in (names if isinstance(names, tuple | list) else [names])
    ]


def build(model_type: str, name: str, layers: int | None) -> tuple[Any, Any]:
    """A model on the meta device, and the call stacks of its modules."""
    import torch
    import transformers

    from slapo_rewrite.model import construction_calls

    cls = getattr(transformers, name)
    config = (cls.config_class or transformers.CONFIG_MAPPING[model_type])()
    for part in (config, config.get_text_config()):
        for key in ("num_hidden_layers", "num_layers", "n_layer"):
            if layers is not None and isinstance(getattr(part, key, None), int):
                setattr(part, key, layers)
    stacks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
    with torch.device("meta"), construction_calls.recorded(stacks):
        return cls(config), stacks


def measure(model_type: str, name: str, layers: int | None) -> dict[str, Any]:
    """How many modules a model has, of how many the site is found, and why not of the others."""
    from slapo_rewrite import errors
    from slapo_rewrite.code.file import SourceFile
    from slapo_rewrite.model import construction_calls
    from slapo_rewrite.model.join import Sources, find_site
    from slapo_rewrite.model.tree import Tree

    started = time.perf_counter()
    try:
        model, stacks = build(model_type, name, layers)
    except Exception as error:
        return {"unbuilt": f"{error}".splitlines()[0][:160] if str(error) else repr(error)}
    built = time.perf_counter()
    module = sys.modules[type(model).__module__]
    tree = Tree(model)
    file = SourceFile.read(Path(str(module.__file__)), module.__name__)
    sources = Sources(file)
    kinds: collections.Counter[str] = collections.Counter()
    seen: collections.Counter[str] = collections.Counter()
    missed: list[tuple[str, str, str]] = []
    wrong: list[tuple[str, str, str]] = []
    for node in tree.nodes.values():
        if node.parent is None:
            continue
        try:
            site = find_site(sources, node)
            kinds[site.kind] += 1
            stack = stacks.get(node.live)
            if stack is None:
                seen["unseen"] += 1
            elif construction_calls.depth(site.file, site.value, stack) is not None:
                seen["agree"] += 1
            else:
                seen["disagree"] += 1
                wrong.append((node.path, str(site.file.at(site.value)), f"{stack[0]}"))
        except errors.UnfollowableConstruction as error:
            reason = re.sub(r"`[^`]*` ", "", error.message)
            missed.append((node.path, reason, str(error.at)))
    joined = time.perf_counter()
    told = Sources(file)
    with construction_calls.known(stacks):
        found_with = sum(is_found(told, n) for n in tree.nodes.values() if n.parent is not None)
    return {
        "modules": len(tree.nodes) - 1,
        "found": sum(kinds.values()),
        "found_with_stacks": found_with,
        "kinds": dict(kinds),
        "missed": missed,
        "seen": dict(seen),
        "wrong": wrong,
        "build_s": round(built - started, 2),
        "join_s": round(joined - built, 3),
        "layers": layers,
    }


def is_found(sources: Any, node: Any) -> bool:
    from slapo_rewrite import errors
    from slapo_rewrite.model.join import find_site

    try:
        find_site(sources, node)
    except errors.UnfollowableConstruction:
        return False
    return True


def work(connection: multiprocessing.connection.Connection) -> None:
    """Answers families until there are no more."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    while True:
        task = connection.recv()
        if task is None:
            return
        try:
            connection.send(measure(*task))
        except Exception as error:  # a defect of ours must not end the others
            connection.send({"unbuilt": f"defect: {type(error).__name__}: {error}"})


class Worker:
    """A process that measures one family at a time and can be ended."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.task: tuple[str, str, str] | None = None
        self.layers: int | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, task: tuple[str, str, str], layers: int | None = None) -> None:
        """Sends a family to the process."""
        self.task, self.layers = task, layers
        self.deadline = time.monotonic() + self.limit_s
        self.connection.send((task[1], task[2], layers))

    def poll(self) -> dict[str, Any] | None:
        """The answer, once there is one; a family over its limit is begun again with two layers."""
        try:
            if self.connection.poll(0.02):
                return dict(self.connection.recv())
        except EOFError:
            self._start()
            return {"unbuilt": "the process died"}
        if time.monotonic() < self.deadline:
            return None
        self.process.kill()
        self.process.join()
        self._start()
        if self.layers is None and self.task is not None:
            self.begin(self.task, layers=2)
            return None
        return {"unbuilt": f"takes longer than {self.limit_s:.0f} s, even with two layers"}

    def end(self) -> None:
        """Lets the process end."""
        self.connection.send(None)
        self.process.join(5)


def run(tasks: list[tuple[str, str, str]], limit_s: float) -> dict[tuple[str, str, str], Any]:
    workers = [Worker(limit_s) for _ in range(2)]
    pending = list(reversed(tasks))
    results: dict[tuple[str, str, str], Any] = {}
    while len(results) < len(tasks):
        for worker in workers:
            if worker.task is None and pending:
                worker.begin(pending.pop())
            if worker.task is not None and (answer := worker.poll()) is not None:
                results[worker.task] = answer
                worker.task = None
                if sys.stderr.isatty():
                    print(f"\r{len(results)}/{len(tasks)} ", end="", file=sys.stderr)
    for worker in workers:
        worker.end()
    return {task: results[task] for task in tasks}


def report(results: dict[tuple[str, str, str], Any], seconds: float) -> dict[str, Any]:
    import torch
    import transformers

    built = {k: r for k, r in results.items() if "modules" in r}
    totals: dict[str, Any] = {}
    heads = ("families", "modules", "found", "share", "with stacks")
    print(f"{'kind':8}" + "".join(f" {head:>11}" for head in heads))
    for kind in [*KINDS, "all"]:
        rows = [r for k, r in built.items() if kind in (k[0], "all")]
        modules, found = sum(r["modules"] for r in rows), sum(r["found"] for r in rows)
        share = found / modules if modules else 0.0
        with_stacks = sum(r["found_with_stacks"] for r in rows)
        totals[kind] = {
            "families": len(rows),
            "modules": modules,
            "found": found,
            "share": round(share, 5),
            "found_with_stacks": with_stacks,
        }
        cells = (len(rows), modules, found, f"{share:.2%}", with_stacks)
        print(f"{kind:8}" + "".join(f" {cell:>11}" for cell in cells))
    kinds: collections.Counter[str] = collections.Counter()
    for row in built.values():
        kinds.update(row["kinds"])
    print("\nfound by:", ", ".join(f"{k} {n}" for k, n in kinds.most_common()))
    seen: collections.Counter[str] = collections.Counter()
    for row in built.values():
        seen.update(row["seen"])
    counts = ", ".join(f"{k} {n}" for k, n in seen.items())
    print(f"\nheld against the running constructors: {counts}")
    wrong = [(k[1], *w) for k, r in built.items() for w in r["wrong"]]
    for model_type, path, found_at, made_at in wrong[:20]:
        print(f"  {model_type}: {path} found at {found_at}, made at {made_at}")
    print("\nmissed:")
    reasons: dict[str, list[str]] = {}
    for (_, model_type, _), row in built.items():
        for path, reason, at in row["missed"]:
            reasons.setdefault(reason, []).append(f"{model_type}: {path} ({at})")
    for reason, places in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"  {len(places):6} {reason}\n         e.g. {places[0]}")
    shortened = [k[1] for k, r in built.items() if r["layers"] is not None]
    print(f"\nwith two layers only, being slow to build: {', '.join(shortened) or 'none'}")
    unbuilt = {f"{k[1]}/{k[2]}": r["unbuilt"] for k, r in results.items() if "unbuilt" in r}
    print(f"\nnot built from a default configuration: {len(unbuilt)}")
    for name, why in unbuilt.items():
        print(f"  {name}: {why}")
    print(
        f"\n{seconds:.0f} s in all, {sum(r['join_s'] for r in built.values()):.1f} s of it joining"
    )
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "totals": totals,
        "found_by": dict(kinds.most_common()),
        "against_running_constructors": dict(seen),
        "missed": {r: len(p) for r, p in sorted(reasons.items(), key=lambda i: -len(i[1]))},
        "two_layers": shortened,
        "unbuilt": unbuilt,
        "families": {f"{k[0]}/{k[1]}/{k[2]}": [r["modules"], r["found"]] for k, r in built.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="model types, separated by commas")
    parser.add_argument("--base", action="store_true", help="base models too, of every modality")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds for one family")
    arguments = parser.parse_args()
    if arguments.base:
        KINDS["base"] = "MODEL_MAPPING_NAMES"
    only = set(filter(None, arguments.only.split(",")))
    started = time.perf_counter()
    results = run(families(only), arguments.limit)
    figures = report(results, time.perf_counter() - started)
    if not only and not arguments.base:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
