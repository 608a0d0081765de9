"""The text of `pipeline.py` for `torch.distributed.pipelining`."""

from __future__ import annotations

from typing import ClassVar

from slapo_rewrite.stages.pipeline_module import PipelineModule


class TorchText(PipelineModule):
    """Everything that `pipeline.py` is made of, for torch's own schedules."""

    engine: ClassVar[str] = "`torch.distributed.pipelining`"

    def head(self) -> str:
        """What stands before the classes."""
        if not self.shared:
            return super().head()
        shared = [
            {number: names[place] for number, names in tie.names.items()}
            for tie in self.shared
            for place in range(len(next(iter(tie.names.values()))))
        ]
        return (
            f"{super().head()}# Parameters that several stages hold: their names, by stage.\n"
            f"SHARED = {tuple(shared)!r}\n"
        )

    def engine_helpers(self) -> dict[str, set[str]]:
        """The names of helper modules that only what is written for this engine uses."""
        names = {"Schedule", "draw_apart", "own_numbers", "placed"}
        names.add("unwrapped" if self.gathers else "state_of")
        names |= {"start_alike"} if self.shared else set()
        names |= {"tensor_parallel_group"} if self.has_shards else set()
        return {"torch_pipeline": names}

    def functions(self) -> str:
        """`build`, `schedule`, `batch`, `to_full` and `load_full`."""
        count = len(self.stages.stages)
        names = ", ".join(self.name(n) for n in range(count))
        given = self.stages.arguments()
        (label,) = self.stages.labels
        taken = [p for p in self.stages.program.parameters if p in {*given.values(), label}]
        named = "".join(f'"{name}": {argument}, ' for name, argument in given.items())
        groups = "    set_group(tensor_parallel_group(mesh))\n" if self.has_shards else ""
        alike = "    start_alike(stages, SHARED)\n" if self.shared else ""
        if self.gathers:
            state = "    named = {}\n    for stage in stages:\n"
            state += "        named |= full_state_dict(unwrapped(stage))\n"
        else:
            state = "    named = state_of(stages)\n"
        apart = ", but for those of one tensor-parallel group" if groups else ""
        axis = "; along `tp` they divide its weights" if groups else ""
        return f'''\
STAGES = ({names})


def build(*args, mesh, **kwargs):
    """The stages of this rank, each a `torch.distributed.pipelining.PipelineStage`.

    Each rank makes the weights of its own stages only, the same as the whole model
    would have from the same seed; so ranks are to be seeded alike. From then on each
    draws random numbers of its own, for dropout{apart}.

    Args:
        *args: Those of `{self.model.__name__}`.
        mesh: A mesh. Along its axis `pp` ranks hold the stages of one model, round and
            round where there are fewer of them{axis}.
        **kwargs: Those of `{self.model.__name__}`.

    Raises:
        ValueError: The stages cannot be laid out on the mesh.
    """
    numbers = own_numbers(mesh, len(STAGES))
{groups}    stages = placed(STAGES, numbers, mesh, *args, **kwargs)
{alike}    draw_apart(mesh)
    return stages


def schedule(stages, kind, n_microbatches, **options):
    """A schedule, with the model's own loss; its `step` and `eval` take a `batch`.

    Args:
        stages: What `build` returns, wrapped for data parallelism or not.
        kind: A class: `Schedule1F1B`, say, or where a rank has several stages
            `ScheduleInterleaved1F1B`, for which torch needs `fully_shard` where it
            takes no `DistributedDataParallel`.
        n_microbatches: How many equal parts a batch is divided into.
        **options: Those of the class.

    Raises:
        ValueError: The class is for one stage on a rank, and there are several.
    """
    return Schedule(stages, kind, n_microbatches, {"SHARED, " * bool(self.shared)}**options)


def batch({", ".join(taken)}):
    """The model's arguments as a schedule takes them, on every rank the same."""
    return {{{named}"target": {label}}}


def to_full(stages, first_rank_only=False):
    """The original's state dict, on every rank. Every rank calls it.

    Args:
        stages: What `build` returns, wrapped for data parallelism or not.
        first_rank_only: Give it to the first process alone, on its CPU; the others get
            an empty dictionary, and none but the first holds more than its stages.
    """
{state}    return gathered(named, stages[0].group, first_rank_only)


def load_full(stages, full):
    """Takes the original's state dict; do it before the stages are wrapped."""
    for stage in stages:
        held = {{n: t for n, t in full.items() if has_place(stage.submod, n)}}
        stage.submod.load_state_dict(held)
'''
