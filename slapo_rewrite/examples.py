"""Examples and conditions of primitives and rules, which are shown as documentation and tested."""

from __future__ import annotations

import enum
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A source file, a schedule for it, and the resulting changed lines.

    It is shown by `slapo-rewrite primitives NAME` and run as a test. `printed` is what the schedule
    prints; `about` says what the example shows, if there are several.
    """

    source: str
    schedule: str
    diff: str = ""
    printed: str = ""
    about: str = ""


@dataclass(frozen=True)
class Refusal:
    """A schedule that is refused for a source file, with the error's code."""

    source: str
    schedule: str
    code: str


@dataclass(frozen=True)
class Sample:
    """The base of examples: a source file, and the begin of a schedule file for it."""

    source: str
    setting: str

    def example(self, schedule: str, diff: str = "", printed: str = "", about: str = "") -> Example:
        """An example with these statements of a schedule."""
        return Example(self.source, self.scheduled(schedule), diff, printed, about)

    def refused(self, code: str, *schedule: str) -> Refusal:
        """A refusal of these statements of a schedule."""
        return Refusal(self.source, self.scheduled("\n".join(schedule)), code)

    def scheduled(self, statements: str) -> str:
        """The schedule file with these statements in its `schedule`."""
        written = textwrap.indent(statements.rstrip("\n"), "    ")
        return f"{self.setting}def schedule(s):\n{written}\n"


def setting(
    model: str,
    inputs: str = '{"x": torch.randn(2, 8)}',
    loss: str | None = "outputs.square().mean()",
    imports: str = "",
) -> str:
    """The begin of an example's schedule file: model, inputs and loss."""
    functions = {"model(m)": f"m.{model}", "inputs(model)": inputs, "loss(outputs)": loss}
    written = [f"def {name}:\n    return {value}\n" for name, value in functions.items() if value]
    return "\n\n".join([f"import torch\n{imports}", *written, ""])


class Numerics(enum.Enum):
    """How the results of a replacement compare with the original computation's."""

    EXACT = "exact"  # bitwise, forward and backward
    REASSOCIATED = "reassociated"  # the same formula, rounded differently
    APPROXIMATE = "approximate"  # another formula, within a bound
    RESEEDED = "reseeded"  # other random numbers


class Twice(enum.Enum):
    """Whether a replacement supports second derivatives."""

    AS_BEFORE = "as before"
    ON_A_CPU = "as before on a CPU; a kernel has no second derivative, and torch says so"
    NEVER = "torch's operation has no second derivative, and says so"


@dataclass(frozen=True)
class Conditions:
    """Properties beyond an ordinary training step; each is tested with the rule's examples."""

    double_backward: Twice  # second derivatives
    autocast: str = "outputs and gradients have the types that they had"  # under `torch.autocast`
    # For a model in bfloat16 or float16.
    half_precision: str = "outputs and gradients have the types that they had, rounded elsewhere"
    empty_batches: str = "as before"  # inputs without rows

    def lines(self) -> list[str]:
        """One line for each, for the rule's page."""
        return [
            f"double backward: {self.double_backward.value}",
            f"autocast: {self.autocast}",
            f"half precision: {self.half_precision}",
            f"empty batches: {self.empty_batches}",
        ]


BY_KERNEL, BY_OPERATIONS = Conditions(Twice.ON_A_CPU), Conditions(Twice.AS_BEFORE)
