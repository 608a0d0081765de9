# Written by slapo-rewrite 0.2.0 for modeling_opt.py; rewrite.json says from what.
"""Stages run by `torch.distributed.pipelining`: building, loading, training."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.nn.parallel import DistributedDataParallel

from .deferred_init import default_generator
from .guards import mark_parts
from .recomputation import EarlierBuffers
from .shards import named_world, rank, set_group
from .stages import SendableGradients, Stage, check_names, gathered, load_held


class Pipeline:
    """The stages of a model, for the schedules of `torch.distributed.pipelining`.

    Args:
        stages: The classes of the stages.
        inputs: The model's arguments that stages take, by their names there.
        label: The model's argument that the loss takes.
        shared: For each parameter that several stages hold, its name there, by stage.
        unread: The model's arguments that it never reads.
    """

    # These depend on whether ranks share a stage: how ranks are laid out, which of a
    # stage's parameters a rank counts, and over which further groups it sums a norm.
    lay_out: Callable[[DeviceMesh], None]
    counted: Callable[[nn.Module], list[nn.Parameter]]
    further_groups: Callable[[], list[Any]]

    def __init__(
        self,
        stages: tuple[type[Stage], ...],
        inputs: Mapping[str, str],
        label: str,
        shared: Sequence[Mapping[int, str]] = (),
        unread: Sequence[str] = (),
    ) -> None:
        self.stages, self.inputs, self.label = stages, inputs, label
        self.shared, self.unread = shared, unread

    def build(self, *args: Any, mesh: DeviceMesh, **kwargs: Any) -> list[PipelineStage]:
        """The stages of this rank, each a `torch.distributed.pipelining.PipelineStage`.

        Each rank makes the weights of its own stages only, which are those of the whole
        model from the same seed: seed all ranks alike. Afterwards each rank draws its
        own random numbers, for dropout, except within a tensor-parallel group.

        Args:
            *args: The arguments of the model's class.
            mesh: The device mesh. The ranks along its axis `pp` hold the stages of one
                model, in turn if there are fewer ranks than stages; those along `tp`
                divide its weights, if the model was written for that.
            **kwargs: The arguments of the model's class.

        Raises:
            ValueError: The stages cannot be laid out on the mesh.
        """
        numbers = own_numbers(mesh, len(self.stages))
        self.lay_out(mesh)
        device, group = torch.device(mesh.device_type), mesh.get_group("pp")
        generator = default_generator(torch.get_default_device())
        before = generator.get_state()
        stages = []
        for number in numbers:
            generator.set_state(before)  # each stage draws what the whole model would
            module = self.stages[number](*args, **kwargs).to(device)
            module.register_forward_pre_hook(with_sendable_gradients)
            if number < len(self.stages) - 1:
                module.register_forward_hook(with_outputs_apart)
            stages.append(
                PipelineStage(module, number, len(self.stages), device, group=group)
            )
        start_alike(stages, self.shared)
        draw_apart(mesh)
        return stages

    def schedule(
        self,
        stages: Sequence[PipelineStage],
        kind: Any,
        n_microbatches: int,
        **options: Any,
    ) -> "Schedule":
        """A schedule, with the model's own loss; its `step` and `eval` take a `batch`.

        Args:
            stages: What `build` returns, wrapped for data parallelism or not.
            kind: A class, such as `Schedule1F1B`; if a rank has several stages, such as
                `ScheduleInterleaved1F1B`, for which torch needs `fully_shard` where it
                takes no `DistributedDataParallel`.
            n_microbatches: How many equal parts a batch is divided into.
            **options: Further arguments of the class.

        Raises:
            ValueError: The class runs one stage per rank, and there are several.
        """
        return Schedule(stages, kind, n_microbatches, self.shared, **options)

    def batch(self, **inputs: Any) -> dict[str, Any]:
        """The model's arguments as a schedule takes them, on every rank the same.

        Raises:
            TypeError: These are not the arguments that the stages were written for.
        """
        read = inputs.keys() - {*self.unread}
        check_names(read, {*self.inputs.values(), self.label})
        given = {name: inputs[argument] for name, argument in self.inputs.items()}
        return {**given, "target": inputs[self.label]}

    def to_full(
        self, stages: Sequence[PipelineStage], first_rank_only: bool = False
    ) -> dict[str, Tensor]:
        """The original's state dict, on every rank. Every rank calls it.

        Args:
            stages: What `build` returns, wrapped for data parallelism or not.
            first_rank_only: Gather it on the CPU of the first process only; the others
                get an empty dictionary, and hold no more than their stages.
        """
        named: dict[str, Tensor] = {}
        for stage in stages:
            named |= unwrapped(stage).full_state()
        return gathered(named, stages[0].group, first_rank_only)

    def load_full(
        self, stages: Sequence[PipelineStage], full: Mapping[str, Tensor]
    ) -> None:
        """Loads the original's state dict. Call it before the stages are wrapped."""
        for stage in stages:
            load_held(stage.submod, full)

    def clip_grad_norm_(
        self, stages: Sequence[PipelineStage], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` by the norm of the whole model's gradients.

        It would scale by the norm of a rank's own stages, and shared parameters would
        drift apart. Every rank calls this one, with the stages that `build` returned.
        """
        copies = [{n: at[n] for n in at if n > min(at)} for at in self.shared]
        known = {id(p) for names in copies for p in parameters_of(stages, names)}
        modules = [unwrapped(stage) for stage in stages]
        given = [p for m in modules for p in m.parameters() if p.grad is not None]
        counted = {id(p) for m in modules for p in self.counted(m)} - known
        norm: Any = nn.utils.get_total_norm(
            [p.grad for p in given if id(p) in counted], norm_type
        )
        if hasattr(norm, "full_tensor"):  # FSDP2 divides gradients over the replicas
            norm = norm.full_tensor()
        kind = torch.promote_types(norm.dtype, torch.float32)
        # Of one type, for all stages: some may have no gradients.
        norm = norm.to(stages[0].device, torch.float64)
        for group in (stages[0].group, *self.further_groups()):
            norms = [torch.empty_like(norm) for _ in range(dist.get_world_size(group))]
            dist.all_gather(norms, norm, group)
            norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        norm = norm.to(kind)
        nn.utils.clip_grads_with_norm_(given, max_norm, norm)
        return norm  # type: ignore[no-any-return]


class ShardedPipeline(Pipeline):
    """A pipeline with its weights divided over tensor-parallel groups."""

    def lay_out(self, mesh: DeviceMesh) -> None:
        """Sets the tensor-parallel group: the ranks along the axis `tp`, if any."""
        if "tp" in (mesh.mesh_dim_names or ()):
            set_group(mesh.get_group("tp"))
        else:
            alone = [dist.get_rank()]
            set_group(dist.new_group(alone, use_local_synchronization=True))

    def counted(self, stage: nn.Module) -> list[nn.Parameter]:
        """Split parameters, and on the first rank those that every rank has whole."""
        for module in stage.modules():
            if hasattr(module, "sharded_parameters"):  # FSDP2 has put others in
                mark_parts(module)
        is_first = rank() == 0
        return [p for p in stage.parameters() if getattr(p, "model_parallel", is_first)]

    def further_groups(self) -> list[Any]:
        """The ranks that share layers."""
        return [named_world().group]


def draw_apart(mesh: DeviceMesh) -> None:
    """Makes each rank draw its own random numbers from now on, for dropout.

    Ranks that differ on the axis `tp` only keep drawing the same ones.
    """
    seeds = torch.randint(2**62, mesh.mesh.shape, device="cpu")
    axes = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True)
    place = tuple(0 if name == "tp" else number for name, number in axes)
    torch.manual_seed(int(seeds[place]))


def own_numbers(mesh: DeviceMesh, count: int) -> range:
    """The numbers of the stages that this rank holds.

    Args:
        mesh: The mesh. With fewer ranks on its axis `pp` than there are stages, they
            are dealt out in turn: with two ranks the first holds the stages 0 and 2.
        count: How many stages there are.

    Raises:
        ValueError: They cannot be laid out on the mesh.
    """
    axes = mesh.mesh_dim_names or ()
    if "pp" not in axes:
        raise ValueError(
            f"the mesh has no axis `pp` for the {count} stages, only {axes}: name its axes "
            "in `init_device_mesh`"
        )
    ranks = mesh.size(axes.index("pp"))
    if count % ranks:
        raise ValueError(
            f"the model is cut into {count} stages, which {ranks} ranks on the axis "
            "`pp` cannot hold evenly: change the cuts in the schedule, or the mesh"
        )
    return range(mesh.get_local_rank("pp"), count, ranks)


def with_sendable_gradients(module: nn.Module, given: tuple[Any, ...]) -> Any:
    """Gives a stage's inputs gradients that torch sends to the stage before.

    It sends no others, and some versions wait for all of them.
    """
    return SendableGradients.apply(*given) if given else None  # type: ignore[no-untyped-call]


def with_outputs_apart(module: nn.Module, given: object, outputs: Any) -> Any:
    """Passes on other tensors than the stage has saved for its backward pass.

    Torch detaches outputs in place if a schedule divides that pass (zero bubble).
    """
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    apart: Any = SendableGradients.apply
    return tuple(apart(each)[0] if each.requires_grad else each for each in several)


class SameSizes:
    """Refuses outputs of other shapes than the first, which the next stage expects."""

    def __init__(self) -> None:
        self.sizes: list[torch.Size] = []

    def __call__(self, module: nn.Module, given: object, outputs: Any) -> None:
        """Checks the shapes of a stage's outputs."""
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        sizes = [tensor.shape for tensor in several]
        self.sizes = self.sizes or sizes
        if sizes != self.sizes:
            raise ValueError(
                f"`{type(module).__name__}` returns tensors of sizes {sizes}, and at first "
                f"returned {self.sizes}: sizes that depend on the batch cannot be sent"
            )


def spare_buffers(module: nn.Module) -> None:
    """Makes the next call of a module leave its buffers and attributes unchanged.

    A new schedule's first call only determines sizes, from meaningless numbers, which
    batch norms and step counters would count.
    """
    buffers = EarlierBuffers(module)
    attributes = [(vars(each), dict(vars(each))) for each in module.modules()]

    def before(*_: object) -> None:
        buffers.__enter__()

    def after(*_: object) -> None:
        buffers.__exit__()
        for now, earlier in attributes:
            now.update(earlier)
        for hook in hooks:
            hook.remove()

    hooks = (
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after),
    )


def unwrapped(stage: PipelineStage) -> Any:
    """A stage's module without its data-parallel wrapper."""
    module = stage.submod
    return module.module if isinstance(module, DistributedDataParallel) else module


class Schedule:
    """Runs a schedule of `torch.distributed.pipelining` over this rank's stages.

    Torch fixes the sizes of stages' outputs at a schedule's first step. For a batch of
    other sizes the schedule is made again, which costs one more micro-batch.

    Args:
        stages: The stages of this rank, wrapped for data parallelism or not.
        kind: The schedule's class.
        n_microbatches: How many parts a batch is divided into, by rows.
        shared: For each parameter that several stages hold, its name there, by stage.
        **options: Further arguments of the class.

    Raises:
        ValueError: The schedule runs one stage per rank, and there are several.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        kind: Any,
        n_microbatches: int,
        shared: Sequence[Mapping[int, str]] = (),
        **options: Any,
    ) -> None:
        self.takes_several = issubclass(kind, PipelineScheduleMulti)
        if len(stages) > 1 and not self.takes_several:
            raise ValueError(
                f"`{kind.__name__}` runs one stage on a rank, but there are "
                f"{len(stages)}: use `ScheduleInterleaved1F1B`, for example"
            )
        self.stages, self.kind, self.n_microbatches = stages, kind, n_microbatches
        self.shared, self.options = shared, options
        self.made_for: Any = None
        self.schedule: Any = None
        self.hooks: list[Any] = []

    def step(self, **batch: Any) -> list[Tensor]:
        """Adds the gradients of the mean of all micro-batches' losses.

        Those of shared parameters are added up over the stages. Every rank on the axis
        `pp` passes the whole batch.

        Args:
            **batch: What `batch` returns.

        Returns:
            Each micro-batch's loss on the last stage's rank, elsewhere an empty list.
        """
        losses: list[Tensor] = []
        schedule = self.fitting(batch, trains=True)
        # Torch divides all gradients by the number of micro-batches, and shared ones are
        # added up, as if there had been none before.
        every: list[Any] = [p for s in self.stages for p in s.submod.parameters()]
        before = [(p, p.grad) for p in every if p.grad is not None]
        for parameter, _ in before:
            parameter.grad = None
        schedule.step(**batch, losses=losses, return_outputs=False)
        sum_shared_gradients(self.stages, self.shared)
        for parameter, gradient in before:
            if parameter.grad is not None:
                gradient += parameter.grad
            parameter.grad = gradient
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def eval(self, **batch: Any) -> tuple[Any, list[Tensor]]:
        """Runs all stages forward, as they are: put them into `eval` mode yourself.

        Args:
            **batch: What `batch` returns. Without labels there are no losses.

        Returns:
            The last stage's outputs of the whole batch, and each micro-batch's loss, on
            the last stage's rank; elsewhere None and an empty list.
        """
        losses: list[Tensor] = []
        wanted = None if batch["target"] is None else losses
        schedule = self.fitting(batch, trains=False)
        return schedule.eval(**batch, losses=wanted), losses

    def fitting(self, batch: Mapping[str, Any], trains: bool) -> Any:
        """Torch's schedule for batches like this one.

        Raises:
            ValueError: The batch cannot be divided, or has no labels to train with, or
                the schedule expects the stages on other ranks.
        """
        target = batch["target"]
        if target is None and trains:
            raise ValueError("training needs labels, but they are None")
        sizes = {
            name: (value.shape, value.dtype) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        if self.made_for == (trains, sizes):
            return self.schedule
        rows = {n: v.shape[0] for n, v in batch.items() if isinstance(v, Tensor)}
        number = max(rows.values())
        if number % self.n_microbatches or min(rows.values()) < number:
            raise ValueError(
                f"a batch of {rows} rows cannot be divided into {self.n_microbatches} "
                "equal micro-batches"
            )
        stages = [
            PipelineStage(
                s.submod, s.stage_index, s.num_stages, s.device, group=s.group
            )
            for s in self.stages
        ]
        self.schedule = self.kind(
            stages if self.takes_several else stages[0],
            self.n_microbatches,
            loss_fn=None if target is None else self.loss,
            **self.options,
        )
        if any(
            s.stage_index_to_group_rank[s.stage_index] != s.group_rank for s in stages
        ):
            raise ValueError(
                f"`{self.kind.__name__}` places stages on ranks differently than `build`, "
                "round robin: use `ScheduleInterleavedZeroBubble`, for example"
            )
        for hook in self.hooks:
            hook.remove()
        for stage in stages:
            spare_buffers(unwrapped(stage))
        self.hooks = [
            unwrapped(stage).register_forward_hook(SameSizes())
            for stage in stages
            if not stage.is_last
        ]
        self.made_for = trains, sizes
        return self.schedule

    def loss(self, outputs: Any, labels: Tensor) -> Tensor:
        """The model's own loss; only called on the rank with the last stage."""
        return unwrapped(self.stages[-1]).step_loss(outputs, labels)  # type: ignore[no-any-return]


def sum_shared_gradients(
    stages: Sequence[PipelineStage], shared: Sequence[Mapping[int, str]]
) -> None:
    """Sums the gradients of parameters that several stages hold, on each of them.

    Every rank that holds one of these stages calls it.

    Args:
        stages: The stages of this rank.
        shared: For each parameter that several stages hold, its name there, by stage.
    """
    for names in shared:
        held = [p for p in parameters_of(stages, names) if p.requires_grad]
        for parameter in held:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(parameter.grad) for parameter in held]
        if gradients:
            total: Any = sum(from_ranks(stages[0], names, sum(gradients)))  # type: ignore[arg-type]
            for gradient in gradients:
                gradient.copy_(total)


@torch.no_grad()
def start_alike(
    stages: Sequence[PipelineStage], shared: Sequence[Mapping[int, str]]
) -> None:
    """Copies shared parameters from the first stage that holds them to the others.

    Every rank on the axis `pp` calls it.
    """
    if stages and shared:
        dist.barrier(stages[0].group)  # so that any two ranks may go on by themselves
    for names in shared:
        held = parameters_of(stages, names)
        if held:
            first = from_ranks(stages[0], names, held[0])[0]
            for parameter in held:
                parameter.copy_(first)


def parameters_of(
    stages: Sequence[PipelineStage], names: Mapping[int, str]
) -> list[nn.Parameter]:
    """A shared parameter in each of this rank's stages that hold it."""
    return [
        attrgetter(names[stage.stage_index])(unwrapped(stage))
        for stage in stages
        if stage.stage_index in names
    ]


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor that FSDP2 has divided; others as they are."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def from_ranks(
    stage: PipelineStage, numbers: Mapping[int, Any], tensor: Tensor
) -> list[Tensor]:
    """The tensors of all ranks that hold one of some stages, in the ranks' order.

    Args:
        stage: A stage of this rank.
        numbers: The stages' numbers.
        tensor: What this rank sends to all others.
    """
    holders = sorted({stage.stage_index_to_group_rank[number] for number in numbers})
    group: Any = stage.group
    tensor = tensor.contiguous()
    found, transfers = [], []
    for holder in holders:
        found.append(tensor)
        if holder != stage.group_rank:
            found[-1] = torch.empty_like(tensor)
            peer = dist.get_global_rank(group, holder)
            transfers += [
                dist.P2POp(dist.isend, tensor, peer, group),
                dist.P2POp(dist.irecv, found[-1], peer, group),
            ]
    for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
        transfer.wait()
    return found
