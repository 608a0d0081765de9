"""What is said of primitives and rules, shown as documentation and tested: examples, conditions."""

from __future__ import annotations

import enum
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A source file, a schedule for it, and the changed lines that come of it.

    It is shown by `slapo-rewrite primitives NAME` and run as a test. What the schedule prints
    stands in `printed`, and what it shows, where there are several, in `about`.
    """

    source: str
    schedule: str
    diff: str = ""
    printed: str = ""
    about: str = ""


@dataclass(frozen=True)
class Refusal:
    """A schedule line that is refused for a source file, with the error's code."""

    source: str
    schedule: str
    code: str


@dataclass(frozen=True)
class Sample:
    """What examples are worked on: a source file, and how a schedule file for it begins."""

    source: str
    setting: str

    def example(self, schedule: str, diff: str = "", printed: str = "", about: str = "") -> Example:
        """What comes of the statements of a schedule."""
        return Example(self.source, self.scheduled(schedule), diff, printed, about)

    def refused(self, code: str, *schedule: str) -> Refusal:
        """That the statements of a schedule are refused."""
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
    """What an example's schedule file says before the schedule: model, inputs and loss."""
    functions = {"model(m)": f"m.{model}", "inputs(model)": inputs, "loss(outputs)": loss}
    written = [f"def {name}:\n    return {value}\n" for name, value in functions.items() if value]
    return "\n\n".join([f"import torch\n{imports}", *written, ""])


class Numerics(enum.Enum):
    """How the numbers of a replacement compare with those of what it replaces."""

    EXACT = "exact"  # to the bit, forward and backward
    REASSOCIATED = "reassociated"  # the same formula, rounded elsewhere
    APPROXIMATE = "approximate"  # another formula, within a bound
    RESEEDED = "reseeded"  # other random numbers


class Twice(enum.Enum):
    """Whether gradients of gradients can be taken of what is written."""

    AS_BEFORE = "as before"
    ON_A_CPU = "as before on a CPU; a kernel has no second derivative, and torch says so"
    NEVER = "torch's operation has no second derivative, and says so"


@dataclass(frozen=True)
class Conditions:
    """What holds besides an ordinary training step; each is tested with the rule's examples."""

    double_backward: Twice  # gradients of gradients
    autocast: str = "outputs and gradients have the types that they had"  # under `torch.autocast`
    # Of a model in bfloat16 or float16.
    half_precision: str = "outputs and gradients have the types that they had, rounded elsewhere"
    empty_batches: str = "as before"  # of inputs without a row

    def lines(self) -> list[str]:
        """One line for each, for the rule's page."""
        return [
            f"double backward: {self.double_backward.value}",
            f"autocast: {self.autocast}",
            f"half precision: {self.half_precision}",
            f"empty batches: {self.empty_batches}",
        ]


BY_KERNEL, BY_OPERATIONS = Conditions(Twice.ON_A_CPU), Conditions(Twice.AS_BEFORE)
