"""Does `--schedule auto` ever send more between GPUs than the plan that a model comes with?

    python -m benchmark.auto_against_tp_plan --seconds 3600

For model families of the installed transformers that have a `base_model_tp_plan`, this plan is
written as a schedule: layers are split over outputs or inputs as in the plan, logits and the like
are gathered, and `infer_sync` adds the sums, with one sum of gradients for each layer, as in
transformers. This schedule and `auto`'s are applied to the model in its default configuration, and
the collectives of a step are counted as by `slapo-rewrite plan`, without memory and processes; for
a model that needs values, those of a small one are counted.

`auto` may split layers that the plan leaves whole, and sends more for them. So it is counted again
without layers that are not in the plan, and again with gathered logits, as in the plan.

Each family runs in a separate process, with a time limit. Its result is in
`results/auto_against_tp_plan.json`; a run continues where the last one ended. A plan that cannot be
written like this, or a step that does not run without values, is reported, and not counted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmark import report, zoo
from benchmark.collectives import ROUNDS, Listener, kind_of
from slapo_rewrite.model.meta_device import pretend_world

if TYPE_CHECKING:
    from slapo_rewrite.auto.shard_groups import Group
    from slapo_rewrite.model.emitted import Emitted
    from slapo_rewrite.project import Project

NAME = "auto_against_tp_plan"
RECORDS = report.FOLDER / "results" / f"{NAME}.json"
WORLD = 2
ROWS = 512  # of the tokens that a schedule's inputs have: about 8,000 tokens
# Less than this is rounding: a bias whose gradient is summed, say.
SAME = 1.001
LIMIT_S = 300

# How transformers' styles split a layer: its outputs, or its inputs.
OUTPUTS, INPUTS = "outputs", "inputs"
STYLES = {
    "colwise": OUTPUTS,
    "colwise_rep": OUTPUTS,
    "colwise_gather_output": OUTPUTS,
    "packed_colwise": OUTPUTS,
    "rowwise": INPUTS,
    "rowwise_rep": INPUTS,
    "rowwise_split_input": INPUTS,
    "embedding_rowwise": 0,
    "embedding_colwise": 1,
}
# What else they do at a layer's border.
BORDERS = {
    "colwise_rep": '.sync("fwd_post", "all_gather", axis=-1)',
    "colwise_gather_output": '.sync("fwd_post", "all_gather", axis=-1)',
    "rowwise_rep": '.sync("fwd_pre", "scatter", axis=-1)',
    "rowwise_split_input": '.sync("fwd_pre", "scatter", axis=-1)',
}
# Styles that split nothing: what they sum, `infer_sync` finds.
WHOLE = {
    *("replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "replicate"),
    *("local_params", "moe_identity_expert"),
}
EXPERTS = "moe_tp_experts"


class NotCounted(Exception):
    """A plan has no schedule that says the same, or its step does not run, in words."""


def schedules_of(model: nn.Module, plan: Mapping[str, str]) -> Iterator[list[str]]:
    """Lines of schedules that split what a plan splits.

    They differ in where the sums of experts stand, of which not every place is legal: where
    `infer_sync` finds them, around the experts, or around these and what runs beside them.

    Args:
        model: The model.
        plan: By patterns of modules and parameters, how they are split.

    Raises:
        NotCounted: Something is split in a way that there is no line for.
    """
    lines = [line for pattern, style in plan.items() for line in _lines(model, pattern, style)]
    experts = [pattern for pattern, style in plan.items() if style == EXPERTS]
    blocks = [pattern.rpartition(".")[0] for pattern in experts]
    for around in dict.fromkeys([(), tuple(experts), tuple(blocks)]):
        sums = [f's["{p}"].sync("{m}", "all_reduce")' for p in around for m in MODES]
        yield [*lines, *sums, "s.infer_sync()"]


MODES = ("fwd_post", "bwd_post")


def _lines(model: nn.Module, pattern: str, style: str) -> Iterator[str]:
    """The lines for an entry of a plan; none where the model has nothing of that name."""
    module = next((m for p, m in model.named_modules() if fnmatchcase(p, pattern)), None)
    held = next((p for n, p in model.named_parameters() if fnmatchcase(n, pattern)), None)
    if style in WHOLE or style == EXPERTS or (module is None and held is None):
        return
    if style not in STYLES:
        raise NotCounted(f"`{style}` has no counterpart")
    parts = ", parts=2" if style.startswith("packed") else ""
    if held is not None:
        owner, _, name = pattern.rpartition(".")
        axis = held.dim() - (2 if STYLES[style] == OUTPUTS and held.dim() > 1 else 1)
        yield f's["{owner}"].shard("{name}", axis={axis}{parts})'
        return
    assert module is not None
    for axis, names in _parameters(module, style).items():
        yield f's["{pattern}"].shard({names!r}, axis={axis}{parts})'
    if style in BORDERS:
        yield f's["{pattern}"]{BORDERS[style]}'


def _parameters(module: nn.Module, style: str) -> dict[int, list[str]]:
    """The parameters of a layer that a style splits, by axis."""
    from slapo_rewrite.auto.flow import is_column, is_row
    from slapo_rewrite.model.layers import splits_of

    way = STYLES[style]
    if isinstance(way, int):
        return {way: ["weight"]}
    found: dict[int, list[str]] = {}
    for (name, axis), split in (splits_of(module) or {}).items():
        if (is_row if way == INPUTS else is_column)(split) and getattr(module, name) is not None:
            found.setdefault(axis, []).append(name)
    if not found:
        raise NotCounted(f"`{style}` of a {type(module).__name__} has no counterpart")
    return found


@dataclass(frozen=True)
class Schedule:
    """A schedule of a family.

    Attributes:
        source: The modeling module.
        text: The schedule file.
        settings: Knobs, as `name=value`.
    """

    source: str
    text: str
    settings: tuple[str, ...] = ()


def taken(schedule: Schedule, is_small: bool) -> tuple[dict[str, float], float | None]:
    """Bytes that go over the wire in a step, by kind, and the step's predicted seconds.

    Args:
        schedule: What is carried out.
        is_small: Whether the small model runs, with values, of which no time is predicted; else the
            full one is counted.

    Raises:
        RewriteError: It is refused.
        NotCounted: The step does not run.
    """
    from slapo_rewrite.auto.placement_search import ON
    from slapo_rewrite.emit.rewrite import try_out
    from slapo_rewrite.model.folded_step import StepShape
    from slapo_rewrite.plan.candidates import Predictor, Way
    from slapo_rewrite.plan.rewritten_step import counted_rewrite
    from slapo_rewrite.project import Project

    found: dict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "s.py"
        file.write_text(schedule.text, encoding="utf-8")
        project = Project(schedule.source, str(file))
        if is_small:
            count = lambda emitted, _: found.update(_small(project, emitted))  # noqa: E731
            try_out(project, schedule.settings, count)
            return dict(found), None
        shape = StepShape(None, torch.bfloat16, is_gpu=True)
        counted = counted_rewrite(project, schedule.settings, [WORLD], shape)[WORLD]
    if isinstance(counted, str):
        raise NotCounted(counted)
    predictor = Predictor((counted[0], None), ON, "bf16", WORLD, lambda stages: ())
    for piece in predictor.unfolded.pieces(0.0):
        for part in (piece.forward, piece.backward):
            for name, size in part.sent.items():
                found[kind_of(name)] += ROUNDS.get(kind_of(name), 1) * size.of(ROWS)
    return dict(found), predictor.predicted(Way(tensor=WORLD, rows=ROWS)).seconds


def _small(project: Project, emitted: Emitted) -> Counter[str]:
    from slapo_rewrite.model import small_model

    schedule = project.schedule.module
    with pretend_world(WORLD):
        model = small_model.build_small(schedule, emitted.module).train()
        inputs = small_model.training_inputs(schedule, model)
        with Listener() as listener:
            small_model.loss_of(schedule, model(**inputs), inputs).backward()
    found = Counter[str]()
    for (kind, _, size), number in listener.sent.items():
        found[kind] += ROUNDS.get(kind, 1) * size * number
    return found


def outcomes(name: str) -> Iterator[dict[str, Any]]:
    """The outcome of one family; runs user code, so in a separate process."""
    from slapo_rewrite import errors
    from slapo_rewrite.auto.derive import derive
    from slapo_rewrite.auto.shard_groups import lines_of

    found: dict[str, Any] = {"family": name}
    try:
        derived = derive(name)
        found["model"], found["share"] = derived.title.split()[0], round(derived.share, 3)
        model = built(name, derived.text)
        if not (plan := getattr(model, "tp_plan", None)):
            raise NotCounted("the model that is trained has no plan")

        def with_lines(lines: Iterable[str]) -> Schedule:
            body = "".join(f"    {line}\n" for line in lines)
            return Schedule(name, f"{derived.head}\n\ndef schedule(s):\n{body}")

        auto = Schedule(name, derived.text)
        ours = {"auto": auto}
        shared = [group for group in derived.groups if is_in(group, plan)]
        if len(shared) < len(derived.groups):
            ours["shared"] = with_lines(lines_of(shared))
        if "parallel_loss:" in derived.text:
            ours["gathered"] = replace(auto, settings=("parallel_loss=false",))
        found |= counted(ours, [with_lines(lines) for lines in schedules_of(model, plan)])
    except errors.RewriteError as error:
        found["why"] = f"refused: {error.message}"
    except NotCounted as error:
        found["why"] = str(error)
    yield found


def is_in(group: Group, plan: Mapping[str, str]) -> bool:
    """Whether a plan splits some of what a group does."""
    split = {pattern for pattern, style in plan.items() if style in STYLES}
    names = {f"{shard.pattern}.{name}" for shard in group.shards for name in shard.names}
    return bool(split & {*names, *group.patterns})


def built(source: str, text: str) -> nn.Module:
    """The model of a schedule file, on the meta device."""
    from slapo_rewrite.project import Project

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "s.py"
        file.write_text(text, encoding="utf-8")
        model: nn.Module = Project(source, str(file)).tree.root.live
    return model


def counted(ours: Mapping[str, Schedule], plans: Sequence[Schedule]) -> dict[str, Any]:
    """The collectives of each: in the full model, or a small one if that needs values.

    Raises:
        RewriteError: All ways to write the plan are refused; the first one's.
        NotCounted: The step does not run.
    """
    try:
        return _counted(ours, plans, is_small=False)
    except NotCounted:
        return _counted(ours, plans, is_small=True)


def _counted(
    ours: Mapping[str, Schedule], plans: Sequence[Schedule], is_small: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {"small": is_small}
    took = {"plan": _first(plans, is_small)}
    took |= {name: taken(schedule, is_small) for name, schedule in ours.items()}
    for name, (sent, seconds) in took.items():
        found[f"{name}_bytes"] = sent
        if seconds is not None:
            found[f"{name}_seconds"] = seconds
    return found


def _first(plans: Sequence[Schedule], is_small: bool) -> tuple[dict[str, float], float | None]:
    """The collectives of the first legal plan."""
    from slapo_rewrite import errors

    refused: errors.RewriteError | None = None
    for schedule in plans:
        try:
            return taken(schedule, is_small)
        except errors.RewriteError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def with_plans() -> list[str]:
    """The modeling modules of families that have a plan, in an order drawn once."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"

    def has_plan(name: str) -> bool:
        files = (folder / name.split(".")[2]).glob("configuration_*.py")
        return any("base_model_tp_plan = {" in file.read_text("utf-8") for file in files)

    return [name for name in zoo.families() if has_plan(name)]


def known() -> dict[str, dict[str, Any]]:
    """The outcomes that are there, by family."""
    if not RECORDS.exists():
        return {}
    return {found["family"]: found for found in report.read(NAME)["families"]}


def is_counted(found: Mapping[str, Any]) -> bool:
    """Whether both were counted."""
    return "plan_bytes" in found


def times(found: Mapping[str, Any], what: str = "auto") -> float:
    """The ratio of the bytes that `auto` and the plan send.

    Args:
        found: A family's outcome.
        what: `auto`; `shared`, without what has no part in the plan; `gathered`, with whole logits.
    """
    ours, theirs = (sum(found[f"{each}_bytes"].values()) for each in (what, "plan"))
    return ours / theirs if theirs else float("inf")


def of_shared(found: Mapping[str, Any]) -> float:
    """Likewise, of what both split."""
    return times(found, "shared" if "shared_bytes" in found else "auto")


def table(outcomes: Iterable[dict[str, Any]]) -> str:
    """The results for the README."""
    outcomes = list(outcomes)
    own = [found for found in outcomes if is_counted(found)]
    rows = []
    kinds = {
        "all that `auto` splits": [times(f) for f in own],
        "what both split": [of_shared(f) for f in own],
        "all, logits gathered by both": [
            times(f, "gathered") for f in own if "gathered_bytes" in f
        ],
        "predicted seconds of a step": [
            f["auto_seconds"] / f["plan_seconds"] for f in own if "auto_seconds" in f
        ],
    }
    for what, ratios in kinds.items():
        cheap = sum(ratio <= SAME for ratio in ratios)
        row: list[Any] = [what, len(ratios), f"{cheap} ({cheap / max(1, len(ratios)):.0%})"]
        rows.append([*row, *(f"{f(ratios):.2f}" for f in (statistics.median, max))])
    text = report.rendered(
        ["`auto` over the plan", "families", "same or less", "median", "most"], rows
    )
    dear = sorted((f for f in own if times(f) > SAME), key=times)
    names = ", ".join(f"{_short(f)} {times(f):.2f} ({of_shared(f):.2f}{_gained(f)})" for f in dear)
    why = Counter(_kind(found) for found in outcomes if not is_counted(found))
    left = "; ".join(f"{count} {words}" for words, count in why.most_common())
    text += (
        "\n`auto` sends more for these families (in brackets: over the plan for what both split; "
        "then, where it was predicted, the time of a step over the time with only what both "
        f"split): {names}.\n"
    )
    return f"{text}Not counted: {left}.\n"


def _gained(found: Mapping[str, Any]) -> str:
    """The time of a step over that where only what both split is split; empty without one."""
    if "shared_seconds" not in found:
        return ""
    return f"; {found['auto_seconds'] / found['shared_seconds']:.2f}"


def _short(found: Mapping[str, Any]) -> str:
    return str(found["family"].split(".")[2])


def _kind(found: Mapping[str, Any]) -> str:
    why = str(found.get("why") or found["auto"])
    if why.startswith("refused: no model of"):
        return "whose original does not run on generated inputs"
    if why.startswith("refused"):
        return "whose plan is refused"
    if "has no counterpart" in why:
        return "whose plan has a style that the benchmark cannot write"
    if "has no plan" in why:
        return "whose trained model has no plan"
    return "that did not finish in time, or whose step does not run"


def results(done: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The results to write: versions, and every outcome in the order of the families."""
    packages = report.versions(("torch", "transformers"))
    return {"versions": packages, "families": [done[n] for n in with_plans() if n in done]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="when to stop beginning more")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one family")
    parser.add_argument("--only", nargs="+", help="families by a part of their names, again")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    importlib.import_module("transformers.modeling_utils")  # what every family needs
    importlib.import_module("slapo_rewrite.auto.derive")
    done = known()
    tried = {n for n, f in zoo.known().items() if zoo.runs(f)}
    names = sorted((n for n in with_plans() if n not in done), key=lambda n: n not in tried)
    if options.only:
        names = [n for n in with_plans() if any(part in n for part in options.only)]
    end = time.monotonic() + options.seconds
    for name in names:
        if time.monotonic() > end:
            break
        found = zoo.in_process(name, lambda name=name: outcomes(name), options.limit)
        done[name] = found
        RECORDS.write_text(json.dumps(results(done), indent=1) + "\n", encoding="utf-8")
        said = f"{times(found):.3f}" if is_counted(found) else found.get("why") or found["auto"]
        print(name.split(".")[2], said, flush=True)
    report.write(NAME, results(done), table(done.values()))


if __name__ == "__main__":
    main()
