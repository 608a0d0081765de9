"""The functions of a schedule file that describe the model and a step, and trial runs of them."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_rewrite import errors
from slapo_rewrite.model import small_model
from slapo_rewrite.model.results import tensors
from slapo_rewrite.schedule.load import check_functions, syntax_span

OWN_LOSS = "What the model computes itself."
STAND_IN_LOSS = "A stand-in, since the model computes no loss itself: write your own here."
# The most elements of made-up inputs: enough for a few small images or short videos.
MOST_NUMBERS = 2_000_000


class DoesNotRun(Exception):
    """A step failed when it was tried; the message says why."""


@dataclass(frozen=True)
class Step:
    """How the model is built, and one training step of it, as text of a schedule file."""

    title: str  # the model's title
    imports: tuple[tuple[str, str], ...]  # names that the functions import: (module, name)
    model: str  # the expression that `model(m)` returns
    # The expression that `verify_model(m)` returns; None if the tool makes the small model.
    twin: str | None = None
    # The items, as expressions, of the dictionary that `inputs(model)` returns; None if the tool
    # makes the inputs.
    inputs: Mapping[str, str] | None = None
    # The expression that `loss(outputs)` returns; None if the model computes the loss.
    loss: str | None = None
    # Whether the user's own `loss` computes it from other outputs, such as logits.
    is_worked_out: bool = False

    def text(self) -> str:
        """The text of the functions in the schedule file."""
        modules = dict.fromkeys(module for module, _ in self.imports)
        lines = [
            f"from {module} import {', '.join(n for m, n in self.imports if m == module)}"
            for module in modules
        ]
        if self.inputs is not None:
            lines = ["import torch", *lines]
        parts = ["\n".join(lines)] if lines else []
        parts.append(f'def model(m):\n    """{self.title}."""\n    return {self.model}')
        if self.twin is not None:
            words = "A small model, without dropout, for verification."
            parts.append(f'def verify_model(m):\n    """{words}"""\n    return {self.twin}')
        if self.inputs is not None:
            items = "".join(f"        {name!r}: {value},\n" for name, value in self.inputs.items())
            parts.append(
                f'def inputs(model):\n    """One generated batch."""\n    return {{\n{items}    }}'
            )
        if self.loss is not None:
            parts.append(self.loss_text())
        return "\n\n\n".join(parts) + "\n"

    @property
    def has_loss(self) -> bool:
        """Whether the model computes the loss itself."""
        return not self.is_worked_out and (self.loss is None or not self.loss.endswith("()"))

    def loss_text(self) -> str:
        """The function `loss`."""
        words = OWN_LOSS if self.has_loss else STAND_IN_LOSS
        return f'def loss(outputs):\n    """{words}"""\n    return {self.loss}'

    def namespace(self) -> types.SimpleNamespace:
        """The names that the text defines."""
        names: dict[str, Any] = {}
        exec(compile(self.text(), "<schedule>", "exec", dont_inherit=True), names)
        check_functions(names, self.title, lambda name: None)
        return types.SimpleNamespace(**names)


@dataclass(frozen=True)
class Given(Step):
    """A step described by the user's own file."""

    written: str = ""  # the file's text

    @classmethod
    def read(cls, file: Path) -> Given:
        """The step of a file."""
        return cls(str(file), (), "", written=file.read_text(encoding="utf-8"))

    def tree(self) -> ast.Module:
        """The parsed file.

        Raises:
            ScheduleError: It does not parse, or defines no `model`.
        """
        try:
            tree = ast.parse(self.written)
        except SyntaxError as error:
            at = syntax_span(error, self.title)
            raise errors.ScheduleError(f"the file does not parse: {error.msg}", at=at) from None
        if not any(isinstance(n, ast.FunctionDef) and n.name == "model" for n in tree.body):
            raise errors.ScheduleError(
                f"`{self.title}` defines no function `model`",
                hint="write `def model(m): ...` in it, which builds the model from module `m`",
            )
        return tree

    def text(self) -> str:
        """The file's text, with a stand-in `loss` appended if it needs one."""
        if self.loss is None:
            return self.written
        return f"{self.written.rstrip()}\n\n\n{self.loss_text()}\n"


def in_a_line(error: Exception) -> str:
    """An error's type and first non-empty line; some messages begin with an empty line."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()}"


def tried(
    step: Step, module: types.ModuleType, twins: dict[str | None, nn.Module] | None = None
) -> Step:
    """Runs a step; returns it, with a stand-in for the loss if it has none.

    Args:
        step: The step to run.
        module: The source's module.
        twins: Small models built for earlier steps, by expression; this one is added.

    Raises:
        DoesNotRun: It fails on the small model.
    """
    schedule = step.namespace()
    twins = {} if twins is None else twins
    try:
        small_model.seed_torch(0)
        with small_model.one_thread():
            if step.twin not in twins:
                twins[step.twin] = small_model.build_small(schedule, module).train()
            model = twins[step.twin]
            inputs = small_model.step_inputs(schedule, model)
            if step.inputs is not None:
                _check_small(inputs)
            outputs = model(**small_model.model_inputs(schedule, model, inputs))
    except Exception as error:
        raise DoesNotRun(in_a_line(error)) from error
    if step.loss is not None:
        return step
    with _Reads(outputs) as reads:
        has_loss = _has_loss(schedule, outputs, inputs)
    return replace(
        step,
        loss=None if has_loss else _stand_in(outputs, model),
        is_worked_out=has_loss and reads.found,
    )


def _check_small(inputs: Mapping[str, Any]) -> None:
    numbers = sum(tensor.numel() for tensor in tensors(inputs))
    if numbers > MOST_NUMBERS:
        raise DoesNotRun(f"its generated inputs hold {numbers} numbers, too many for a small model")


class _Reads(TorchFunctionMode):
    """Records whether a returned tensor of more than one element is used in a computation."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._values = {id(t) for _, t in _named(outputs, "outputs") if t.numel() > 1}
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= any(id(tensor) in self._values for tensor in tensors((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _has_loss(schedule: Any, outputs: Any, inputs: Mapping[str, Any]) -> bool:
    try:
        return small_model.loss_of(schedule, outputs, inputs).requires_grad
    except ValueError:
        return False


def _stand_in(outputs: Any, model: nn.Module) -> str:
    """An expression for a scalar that depends on the model's outputs.

    It is computed from the output that depends on the most parameters: other outputs may be mere
    statistics, such as the number of codes used.

    Raises:
        DoesNotRun: No output has a gradient.
    """
    named = [(n, t) for n, t in _named(outputs, "outputs") if t.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]

    def order(pair: tuple[str, torch.Tensor]) -> tuple[bool, int, bool]:
        tensor = pair[1]
        found = torch.autograd.grad(tensor.sum(), parameters, retain_graph=True, allow_unused=True)
        reached = sum(each is not None for each in found)
        # Masked logits are infinite, and cannot be compared.
        return not tensor.isfinite().all(), -reached, tensor.numel() != 1

    for name, tensor in sorted(named, key=order):
        # Not a mean of squares, which is constant for outputs of a layer norm.
        return name if tensor.numel() == 1 else f"{name}.float().square().add(1).sqrt().mean()"
    raise DoesNotRun("nothing that the model returns has a gradient")


def _named(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a model's outputs, each with its expression."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            inner = f"{name}.{key}" if hasattr(value, str(key)) else f"{name}[{key!r}]"
            yield from _named(item, inner)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _named(item, f"{name}[{number}]")


def first_that_runs(steps: Iterator[Step], module: types.ModuleType) -> tuple[Step | None, str]:
    """The first of a model's steps that runs, and the error of the first step if it failed."""
    why = ""
    twins: dict[str | None, nn.Module] = {}
    for step in steps:
        try:
            return tried(step, module, twins), why
        except DoesNotRun as error:
            why = why or str(error)
    return None, why
