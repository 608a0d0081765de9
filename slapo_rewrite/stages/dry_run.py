"""Runs a small model: records the kinds of its values, and checks that stages compute the same."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import traceback
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slapo_rewrite import errors
from slapo_rewrite.code.blocks import blocks, statements, with_statements
from slapo_rewrite.code.names import is_name
from slapo_rewrite.errors import Span
from slapo_rewrite.model import small_model
from slapo_rewrite.model.meta_build import READS
from slapo_rewrite.model.results import tensors
from slapo_rewrite.runtime.loading import named_tensors
from slapo_rewrite.runtime.stages import keep, own_tensors, tensors_of
from slapo_rewrite.stages.environment import rounds_of
from slapo_rewrite.stages.fewer_layers import Kept, is_short_of
from slapo_rewrite.stages.loops import path_of
from slapo_rewrite.stages.program import ARGUMENT, Program, Version
from slapo_rewrite.stages.stage_layout import Stage, Stages
from slapo_rewrite.stages.stage_modules import Held
from slapo_rewrite.stages.step_loss import step_loss
from slapo_rewrite.stages.value_kinds import ValueKind, described


@dataclasses.dataclass(frozen=True)
class Written:
    """Stages with their executable functions."""

    stages: Stages
    functions: Sequence[Callable[..., Any]]  # the `forward` of each stage; the last makes the loss
    held: Sequence[Sequence[str]]  # for each stage, the paths of what it holds
    sizes: Sequence[Sequence[str]]  # for each stage, the modules that it reads sizes of


class Trial:
    """One training step of a small model.

    Attributes:
        inputs: The arguments of the step.
        expected: The model's loss.
        loss: How the loss is computed from the model's result.

    Args:
        full: The model at its full size, with the full lengths of its lists.
        cause: The schedule's line, for errors.
        kept: The layers that the small model should have; all of them if not given.
    """

    def __init__(
        self,
        schedule: Any,
        module: ModuleType,
        full: nn.Module,
        cause: Span | None,
        kept: Kept | None = None,
    ) -> None:
        self.schedule, self.full, self.cause, self.kept = schedule, full, cause, kept or {}
        self.world = vars(module)
        try:
            try:
                outputs = self._run(schedule, self._deep, module, full)
            except Exception:
                if self.kept or not hasattr(schedule, "verify_model"):
                    raise
                outputs = self._run(schedule, small_model.build_small, module)
        except Exception as error:
            raise errors.CannotCut(
                f"no small model to cut runs: {error}",
                at=cause,
                hint="define verify_model(m) and inputs(model) in the schedule",
            ) from error
        try:
            self.expected = small_model.loss_of(schedule, outputs, self.inputs)
        except ValueError as error:
            raise errors.CannotCut(str(error), at=cause) from error
        self.loss = step_loss(schedule, outputs, self.expected, self.inputs, cause)

    def _deep(self, schedule: Any, module: ModuleType, full: nn.Module) -> nn.Module:
        """A small model with the kept layers, or with all."""
        lengths = {len(full.get_submodule(p)): n for p, n in self.kept.items()}  # type: ignore[arg-type]
        model = small_model.build_deep(schedule, module, full, lengths)
        if self.kept and not is_short_of(model, full, self.kept):
            raise ValueError("the configuration does not say which layers there are")
        return model

    def _run(self, schedule: Any, build: Callable[..., nn.Module], *args: Any) -> Any:
        """Builds and runs a small model; returns its result."""
        with small_model.drawing(0):
            self.model = build(schedule, *args)
            self._inputs = apart(small_model.step_inputs(schedule, self.model))
            self.more_inputs = apart(small_model.step_inputs(schedule, self.model, seed=8))
        self.pristine = copy.deepcopy(self.model)
        self.model.train()
        self.given = small_model.model_inputs(schedule, self.model, self.inputs)
        return self.step()

    def step(self) -> Any:
        """Runs the model; returns its result."""
        with self.seeded():
            scene = self.scene()
            return self.model(**{name: scene[name] for name in self.given})

    @property
    def inputs(self) -> dict[str, Any]:
        """A copy of the step's arguments, since a `forward` may write into them."""
        return copy.deepcopy(self._inputs)

    def seeded(self) -> contextlib.AbstractContextManager[None]:
        """Fixes the random numbers to the same ones for each run."""
        return small_model.drawing(1)

    def depth(self, listed: str, number: int) -> int:
        """The number of layers before a cut in the small model, for that number in the full one."""
        path = path_of(listed)
        if path in self.kept:
            return bisect_left(self.kept[path], number)
        small, full = (m.get_submodule(path) for m in (self.model, self.full))
        return round(number * len(small) / len(full))  # type: ignore[arg-type]

    def paths_of(self, held: Held) -> list[str]:
        """The paths in the small model of a module, or of the layers, that a stage holds."""
        match ast.parse(held.text, mode="eval").body:
            case ast.Subscript(value=layers, slice=ast.Slice(lower=lower, upper=upper)):
                listed = ast.unparse(layers)
                within: Any = self.model.get_submodule(held.path)
                names = rounds_of(within) or [*map(str, range(len(within)))]
                first = self.depth(listed, ast.literal_eval(lower)) if lower else 0
                stop = self.depth(listed, ast.literal_eval(upper)) if upper else len(names)
                return [f"{held.path}.{name}" for name in names[first:stop]]
        try:
            attrgetter(held.path)(self.model)
        except AttributeError as error:
            raise errors.CannotCut(
                f"the small model has no `{held.path}`, which a stage would hold",
                at=self.cause,
                hint="build one that has it in verify_model(m) of the schedule",
            ) from error
        return [held.path]

    def scene(self) -> dict[str, Any]:
        """The variables at the start of a step; statements may write to the inputs."""
        inputs = {n: v.clone() if isinstance(v, Tensor) else v for n, v in self.inputs.items()}
        return {**self.world, "self": self.model, **inputs}

    def seen(self, program: Program, with_records: bool = False) -> dict[Version, ValueKind]:
        """The kind of each value of a program; `with_records` allows to send records in parts."""
        scene = self.scene()
        world = self.world if with_records else {}
        found = {(n, ARGUMENT): described(scene.get(n)) for n in program.parameters}
        names = {*program.parameters, *(n for piece in program.pieces for n in piece.binds)}
        reading = _Reading()
        with self.seeded():
            for number, piece in enumerate(program.pieces):
                before = small_model.random_states()
                try:
                    with reading:
                        exec(compile(piece.source(self.depth), "<stage>", "exec"), scene)
                except Exception as error:
                    raise errors.CannotCut(
                        "this works in the model, but fails when only the statements of `forward` "
                        f"run: {type(error).__name__}: {error}",
                        at=piece.at,
                        also=[self.cause],
                        hint="the effects of decorators and hooks on `forward` are not known: pass "
                        "what they add in inputs(model), build a model without them (with "
                        "output_router_logits=False, for example), or cut elsewhere",
                    ) from error
                drawn = before != small_model.random_states()
                for name in piece.binds:
                    value = scene.get(name)
                    is_free = not reading.has_read  # whether it is independent of tensors' contents
                    (_, kind), *parts = described(value, drawn, world, is_free).named(name)
                    if names & {part for part, _ in parts}:  # a part's name is taken
                        kind, parts = ValueKind("other", is_drawn=drawn), []
                    found[name, number] = kind
                    found.update({(part, number): each for part, each in parts})
        return found

    def read_for_content(self, stages: Stages) -> tuple[int, str] | None:
        """A statement, and a value that it needs the contents of, not just the shape.

        Another value of the same shape stands in for that value. If other numbers in it change what
        the stage reads of the results, the contents matter.
        """
        values = {(name, ARGUMENT): value for name, value in self.scene().items()}
        reached: list[set[int]] = []
        scene = self.scene()
        for number, piece in enumerate(stages.program.pieces):
            reached.append(lines_run(piece.source(self.depth), scene))
            own = own_containers(scene)
            values.update({(name, number): own.get(name) for name in piece.binds})
        for stage in [*stages.stages, stages.tail]:
            for fill in (0.0, 1e30, -1e30, float("nan")) if stage.borrowed else ():
                if found := self._misread(stage, stages.program, values, reached, fill):
                    return found
        return None

    def _misread(
        self,
        stage: Stage,
        program: Program,
        values: Mapping[Version, Any],
        reached: Sequence[Set[int]],
        fill: float,
    ) -> tuple[int, str] | None:
        """The same for one stage, with the stand-ins filled with a number."""
        other: dict[Version, Any] = {}
        for number in stage.again:
            piece = program.pieces[number]
            reads = {version[0]: stage.anew.get(version, version) for version in piece.reads}
            scene = own_containers(self.scene() | {n: values.get(v) for n, v in reads.items()})
            scene |= {n: other[v] for n, v in reads.items() if v in other}
            filled = {name: like for (n, name), like in stage.borrowed.items() if n == number}
            for name, like in filled.items():
                assert like is not None
                scene[name] = torch.full(like[0], fill, dtype=like[1])
            tainted = {*filled, *(name for name, version in reads.items() if version in other)}
            source = piece.source(self.depth)
            for name in sorted(tainted):
                if not all_ran(source, name, reached[number]):
                    return number, name
            with contextlib.suppress(Exception):  # a failing statement binds nothing
                exec(compile(source, "<stage>", "exec"), scene)
            had = {(name, number): scene.get(name) for name in piece.binds}
            other |= {v: each for v, each in had.items() if not is_same(values[v], each)}
        own = [n for n in stage.pieces if n not in stage.again]
        read = [v for n in own for v in program.pieces[n].reads]
        of_loss = () if stage.hands_on else program.loss_reads
        for version in (*read, *stage.hands_on, *of_loss):
            if version in other:
                return version[1], next(name for _, name in stage.borrowed)
        return None

    def check_numbers(self, stages: Stages) -> None:
        """Raises if numbers that are sent as a shape depend on the contents of the inputs."""
        program = stages.program
        sent = {v: stages.seen[v] for stage in stages.stages for v in (*stage.given, *stage.joined)}
        sent = {v: kind for v, kind in sent.items() if kind.kind in ("shape", "several")}
        if not sent:
            return
        model = copy.deepcopy(self.pristine).train()
        with self.seeded(), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.abs().mean())
        scene = {**self.world, "self": model, **other_data(self.inputs, self.more_inputs)}
        for number, piece in enumerate(program.pieces):
            exec(compile(piece.source(self.depth), "<stage>", "exec"), scene)
            for name in piece.binds:
                for part, kind in described(scene.get(name), False, self.world, True).named(name):
                    if sent.get((part, number), kind).structure() != kind.structure():
                        raise errors.CannotCut(
                            f"`{name}` is needed after the cut and cannot get there: it holds "
                            "numbers that depend on the data, but the sizes that stages send are "
                            "fixed",
                            at=piece.at,
                            also=[self.cause],
                            hint="cut where it is no longer needed, or compute it from shapes",
                        )

    def check(self, written: Written) -> None:
        """Raises unless the stages, run in turn, give the model's loss and gradients.

        Each stage runs in a model of its own with only the modules that it holds or reads sizes of,
        as it will in training.
        """
        whole = copy.deepcopy(self.pristine).train()
        versions = {name: p._version for name, p in whole.named_parameters()}
        expected = self._loss(whole, self.inputs)
        try:
            wanted = gradients([whole], expected)
        except RuntimeError as error:
            raise errors.CannotCut(
                f"the model's own backward pass fails: {error}", at=self.cause
            ) from error
        if not all(bool(each.isfinite().all()) for each in (expected, *wanted.values())):
            raise errors.CannotCut(
                "the model's own loss or gradients are not finite here, so stages cannot be "
                "compared with it",
                at=self.cause,
                hint="give finite weights in verify_model(m), or other inputs in inputs(model)",
            )
        models = self.apart_in_stages(written)
        try:
            result = self.chained(models, written, self.scene())
        except Exception as error:
            raise self.failing(error, written) from error
        close = is_close(result, expected)
        had = gradients(models, result) if close else {}
        for name, gradient in wanted.items():
            if name not in had or not torch.allclose(had[name], gradient, rtol=1e-3, atol=1e-6):
                close = False
        if not close or any(bool(had[name].any()) for name in had.keys() - wanted.keys()):
            raise self.unlike(written)
        del result, had, expected, wanted  # frees memory of the size of the model
        self.check_later_steps(whole, models, written)
        self.check_state(whole, models)
        if written.stages.by_name:
            self.check_kept(whole, versions)
            self.check_joined(models, written)

    def unlike(self, written: Written) -> errors.CannotCut:
        """The error for stages with other results; names the first value that differs."""
        stages = written.stages
        program, model = stages.program, copy.deepcopy(self.pristine).train()
        scene, wanted = {**self.scene(), "self": model}, []
        last = {max(stage.pieces): stage for stage in stages.stages}
        with self.seeded():
            for number, piece in enumerate(program.pieces):
                exec(compile(piece.source(self.depth), "<stage>", "exec"), scene)
                if number in last:
                    own = [scene.get(name) for name, _ in last[number].hands_on]
                    wanted.append([v.clone() if isinstance(v, Tensor) else v for v in own])
            is_model = is_close(eval(program.loss, scene), self.expected)
        found: list[tuple[Any, ...]] = []
        self.chained(self.apart_in_stages(written), written, self.scene(), found)
        for stage, has, values in zip(stages.stages, found, wanted, strict=True):
            for (name, number), one, other in zip(stage.hands_on, has, values, strict=True):
                if not is_model or not isinstance(other, Tensor) or one.shape != other.shape:
                    continue  # numbers are sent in another form
                if not is_close(one, other):
                    return errors.CannotCut(
                        "the stages do not compute what the model computes: stage "
                        f"{stages.stages.index(stage)} would have another `{name}`, since it does "
                        "not see what an earlier stage changes in place",
                        at=program.pieces[number].at if number != ARGUMENT else self.cause,
                        also=[self.cause],
                        hint="pass on what is changed (an attribute, a buffer, memory that two "
                        "names share) as a value, or cut elsewhere",
                    )
        return errors.CannotCut(
            "the stages do not compute what the model computes: its "
            + ("gradients differ" if is_model else "`forward` does more than its statements say"),
            at=self.cause,
            hint="cut elsewhere, or write the modules on the way to the cut more plainly",
        )

    def check_later_steps(
        self, whole: nn.Module, models: Sequence[nn.Module], written: Written
    ) -> None:
        """Raises unless the loss of a second step is the model's as well, also in eval mode.

        What one stage changes stays unchanged in the others; eval mode may run other code.
        """
        data = other_data(self.inputs, self.more_inputs)
        for mode in ("training", "eval mode"):
            trains = mode == "training"
            for model in (whole, *models):
                model.train(trains)
            with torch.set_grad_enabled(trains):
                try:
                    wanted = self._loss(whole, data)
                except Exception:  # for example, no loss in eval mode
                    continue
                scene = {**self.world, **copy.deepcopy(data)}
                try:
                    result = self.chained(models, written, scene)
                except Exception as error:
                    raise self.failing(error, written, f" in {mode}") from error
            if not is_close(result, wanted):
                raise errors.CannotCut(
                    f"the stages compute something else in {mode} after a step: what runs around "
                    "the model's `forward`, or what one stage changes and another reads",
                    at=self.cause,
                    hint="cut so that one stage reads and changes it, or pass it on as a value",
                )

    def check_kept(self, whole: nn.Module, versions: Mapping[str, int]) -> None:
        """Raises if `forward` writes into a parameter: torch makes an extra call to find sizes.

        `versions` has the version counters of parameters from before.
        """
        for name, parameter in whole.named_parameters():
            if parameter._version != versions[name]:
                raise errors.CannotCut(
                    f"`forward` writes into `{name}`, but torch calls each stage one more time, "
                    "to find the sizes",
                    at=self.cause,
                    hint='cut with target="deepspeed", which does not',
                )

    @torch.no_grad()
    def check_joined(self, models: Sequence[nn.Module], written: Written) -> None:
        """Raises if the last stage's outputs for two micro-batches cannot be concatenated."""
        made: list[list[Any]] = []
        data = other_data(self.inputs, self.more_inputs)
        half = max(
            (len(v) // 2 for v in data.values() if isinstance(v, Tensor) and v.dim()), default=0
        )
        for start in (0, half):
            made.append([])
            part = {
                name: value[start : start + half]
                if isinstance(value, Tensor) and value.dim()
                else value
                for name, value in data.items()
            }
            with contextlib.suppress(Exception):  # for example, rows that do not form a micro-batch
                self.chained(models, written, {**self.world, **part}, made[-1])
        pairs = zip(*(tensors(each[-1:]) for each in made), strict=False)
        for one, other in pairs if len(made[0]) == len(made[1]) == len(models) else ():
            if one.shape[1:] != other.shape[1:]:
                raise errors.CannotCut(
                    f"in eval mode the output has shape {list(one.shape)} for one micro-batch and "
                    f"{list(other.shape)} for another, depending on values, so the outputs cannot "
                    "be joined",
                    at=self.cause,
                    hint="return the same shape for each row, or run the model without stages",
                )

    def check_state(self, whole: nn.Module, models: Sequence[nn.Module]) -> None:
        """Raises unless each stage's buffers and weights are the model's after some steps."""
        own = dict(named_tensors(whole))
        for number, model in enumerate(models):
            for name, tensor in named_tensors(model):
                if not is_close(tensor, own[name]):
                    raise errors.CannotCut(
                        f"`{name}` is updated as the model runs, and stage {number} would not have "
                        "all of the updates",
                        at=self.cause,
                        hint="cut so that only one stage holds it",
                    )

    def _loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of a whole model."""
        inputs = copy.deepcopy(inputs)
        with self.seeded():
            outputs = model(**{name: inputs[name] for name in self.given})
        return small_model.loss_of(self.schedule, outputs, inputs)

    def failing(self, error: Exception, written: Written, mode: str = "") -> errors.CannotCut:
        """The error for stages that raise, with the place of the statement."""
        texts = {function.__code__: str(function.__doc__) for function in written.functions}
        line, program = "", written.stages.program
        for frame, number in traceback.walk_tb(error.__traceback__):
            if text := texts.get(frame.f_code):
                line = text.splitlines()[number - 1].strip()
        sources = ((piece.source(self.depth), piece.at) for piece in program.pieces)
        places = (at for text, at in sources if line in map(str.strip, text.splitlines()))
        return errors.CannotCut(
            f"the stages fail{mode} where the model does not: {type(error).__name__}: {error}",
            at=next(places, self.cause),
            also=[self.cause],
            hint="cut elsewhere, or write the modules on the way to the cut more plainly",
        )

    def apart_in_stages(self, written: Written) -> list[nn.Module]:
        """A separate model for each stage, as in a process of its own."""
        models = []
        each = zip(written.functions[:-1], written.held, written.sizes, strict=True)
        for function, paths, shells in each:
            whole = self.pristine
            own = {id(tensor) for tensor in tensors_of([attrgetter(path)(whole) for path in paths])}
            tensors = (t for module in whole.modules() for t in own_tensors(module).values())
            # Tensors that the stage does not hold are removed below, so they are not copied.
            model: Any = copy.deepcopy(whole, {id(t): t for t in tensors if id(t) not in own})
            keep(model, [attrgetter(path)(model) for path in paths], shells)
            # Hooks around the model's `forward`, for example, apply to that of each stage.
            model.__class__ = type("Stage", (type(model),), {"forward": function})
            models.append(model.train())
        return models

    def chained(
        self,
        models: Sequence[nn.Module],
        written: Written,
        inputs: Mapping[str, Any],
        outputs: list[tuple[Any, ...]] | None = None,
    ) -> Any:
        """The loss of the stages, run in turn; no stage sees in-place changes by another.

        `outputs` collects the outputs of each stage.
        """

        def copied(names: Sequence[str]) -> tuple[Any, ...]:
            return tuple(copy.deepcopy(inputs[name]) for name in names)

        stages = written.stages
        given = copied([name for name, _ in stages.stages[0].given])
        arguments = stages.arguments()
        labels = copied(stages.labels)
        with self.seeded():
            for model in models:
                if stages.by_name:
                    named = dict(zip(arguments, copied([*arguments.values()]), strict=True))
                    given = model(*given, **named)
                else:
                    given = model(given[0] if len(given) == 1 else given)
                given = given if isinstance(given, tuple) else (given,)
                given = tuple(v.clone() if isinstance(v, Tensor) else v for v in given)
                if outputs is not None:
                    outputs.append(tuple(v.clone() if isinstance(v, Tensor) else v for v in given))
            return written.functions[-1](
                models[-1],
                given[0] if len(given) == 1 else given,
                labels[0] if len(labels) == 1 else labels,
            )


class _Reading(TorchFunctionMode):
    """Records whether anything reads the contents of a tensor."""

    has_read = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.has_read |= getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


def is_close(one: Any, other: Tensor) -> bool:
    """Whether a value equals a tensor up to rounding."""
    if not isinstance(one, Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    # Exact equality first: it takes a tenth of the time, and unchanged tensors are equal.
    return torch.equal(one, other) or torch.allclose(
        one, other, rtol=1e-5, atol=1e-6, equal_nan=True
    )


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, also inside tuples and data classes."""
    if one is other:  # some fields may not be readable: one that differs between layers raises
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(is_same(one[k], other[k]) for k in one)
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(is_same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)


def own_containers(scene: Mapping[str, Any]) -> dict[str, Any]:
    """The same variables, with copies of lists and dictionaries."""
    return {n: copy.copy(v) if isinstance(v, dict | list) else v for n, v in scene.items()}


def lines_run(source: str, scene: dict[str, Any]) -> set[int]:
    """Runs statements; returns the first lines of those that were reached."""
    reached = scene["_reached"] = set[int]()

    def marked(each: ast.stmt, made: ast.stmt) -> list[ast.stmt]:
        return [*ast.parse(f"_reached.add({each.lineno})").body, made]

    (function,) = ast.parse("def piece(): pass").body
    assert isinstance(function, ast.FunctionDef)
    function.body = ast.parse(source).body
    exec(compile(ast.Module(with_statements(function, marked).body, []), "<stage>", "exec"), scene)
    return reached


def all_ran(text: str, name: str, reached: Set[int]) -> bool:
    """Whether every statement that reads a name was reached."""
    for statement in statements(ast.parse(text).body):
        inner = {n for block in blocks(statement) for s in block for n in ast.walk(s)}
        own = [n for n in ast.walk(statement) if n not in inner]
        lines = {n.lineno for n in own if isinstance(n, ast.expr | ast.stmt)}
        reads = any(is_name(n, name) for n in own)
        if reads and not lines & reached:
            return False
    return True


def apart(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs with a shorter decoder sequence than the encoder's, so that the lengths differ."""
    ids, targets = inputs.get("input_ids"), inputs.get("decoder_input_ids")
    if not (isinstance(ids, Tensor) and isinstance(targets, Tensor) and ids.shape == targets.shape):
        return inputs
    return {
        name: value[:, :-4].contiguous() if name.startswith(("decoder_", "labels")) else value
        for name, value in inputs.items()
    }


def other_data(inputs: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of the same shapes with other contents, and without padding."""
    found = dict(inputs)
    for name, value in inputs.items():
        other = more.get(name)
        if isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape == other.shape:
            is_mask = not value.is_floating_point() and bool(((value == 0) | (value == 1)).all())
            found[name] = torch.ones_like(value) if is_mask else other
    return found


def gradients(models: Sequence[nn.Module], loss: Tensor) -> dict[str, Tensor]:
    """The gradient of each parameter that has one, summed over the models that have it."""
    named = [(n, p) for model in models for n, p in model.named_parameters() if p.requires_grad]
    if not named:  # all parameters are frozen
        return {}
    parameters = [parameter for _, parameter in named]
    found: dict[str, Tensor] = {}
    each = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    for (name, _), gradient in zip(named, each, strict=True):
        if gradient is not None:
            found[name] = found[name] + gradient if name in found else gradient
    return found
