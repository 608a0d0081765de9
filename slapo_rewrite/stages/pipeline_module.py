"""The text of `pipeline.py`."""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import black

from slapo_rewrite import errors
from slapo_rewrite.code.dataflow import bound_in, names_in, parameters_in, read_in
from slapo_rewrite.code.import_lines import import_groups
from slapo_rewrite.stages.defining_files import DefiningFiles
from slapo_rewrite.stages.environment import NOT_NONE, Compared, Count, Unlike
from slapo_rewrite.stages.program import ARGUMENT, Depth
from slapo_rewrite.stages.stage_layout import Stage, Stages
from slapo_rewrite.stages.stage_modules import Held, Tie
from slapo_rewrite.stages.step_loss import FUNCTION
from slapo_rewrite.stages.written_text import rewritten


def forward_text(stages: Stages, stage: Stage, depth: Depth | None = None) -> str:
    """The text of a stage's `forward`."""
    takes = [stages.spelled(v) for v in stage.given]
    argument, unpacked = arguments(takes, "inputs")
    if stages.by_name:
        argument, unpacked = named_arguments(takes, stages, stage), []
    returned = stages.returned(stage)
    body = [*unpacked, *stages.lines(stage, depth, returned), f"return {returned}"]
    return defined(f"def forward(self, {argument}):", body)


def loss_text(stages: Stages, depth: Depth | None = None) -> str:
    """The text of the method that computes the loss from the last stage's outputs."""
    outputs = [stages.spelled(v) for v in stages.stages[-1].hands_on]
    first, unpacked = arguments(outputs, "outputs")
    labels = [(name, ARGUMENT) for name in stages.labels]
    second, more = arguments([stages.spelled(v) for v in labels], "labels")
    lines = stages.lines(stages.tail, depth, stages.program.loss)
    if not {*labels} & {*stages.tail.given, *stages.tail.named}:
        second = f"_{second}"  # the loss needs no labels
    last = lines[-1] if lines else ""
    result = stages.program.loss
    if f"\n{last}".rpartition(f"\n{result} = ")[2] != f"\n{last}" and result.isidentifier():
        lines[-1] = f"\n{last}".replace(f"\n{result} = ", "\nreturn ", 1).strip("\n")
        result = ""  # returned directly
    single = map(stages.spelled, stages.single_numbers(stages.stages[-1]))
    unpacked += [f"({name},) = {name}" for name in single]
    body = [*unpacked, *more, *lines, *([f"return {result}"] if result else [])]
    return defined(f"def step_loss(self, {first}, {second}):", body)


def arguments(names: Sequence[str], together: str) -> tuple[str, list[str]]:
    """A parameter for one value or a tuple of several, and the statement that unpacks it."""
    if len(names) == 1:
        return names[0], []
    return together, [f"{', '.join(names)} = {together}"]


def named_arguments(takes: Sequence[str], stages: Stages, stage: Stage) -> str:
    """The parameters of a stage that gets all arguments of the step by name."""
    named = [stages.spelled(v) for v in stage.named]
    apart = ["/"] if set(takes) & stages.arguments().keys() else []
    return ", ".join([*takes, *apart, *(["*", *named] if named else []), "**_"])


def defined(head: str, body: Iterable[str]) -> str:
    """A function; names that are unpacked but never read get a leading underscore."""
    text = "\n".join([head, textwrap.indent("\n".join(body), "    ")])
    tree = ast.parse(text)
    read = read_in(tree)
    idle = {
        target: f"_{target.id}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for several in node.targets
        if isinstance(several, ast.Tuple)
        for target in several.elts
        if isinstance(target, ast.Name) and target.id not in read and target.id[0] != "_"
    }
    return rewritten(text, idle)


# This method of transformers reads the source file of a class; stages use the model's file.
FILE_READER = "_can_set_experts_implementation"


@dataclass(frozen=True)
class Engine:
    """A library that runs stages."""

    words: str  # its name in words
    module: str  # the runtime module with its `Pipeline`
    offered: tuple[str, ...]  # the methods of `Pipeline` for users


DEEPSPEED = Engine(
    "DeepSpeed's pipeline engine",
    "deepspeed_pipeline",
    ("build", "batch", "to_full", "load_full", "read_checkpoint", "write_checkpoint"),
)
TORCH = Engine(
    "`torch.distributed.pipelining`",
    "torch_pipeline",
    ("build", "schedule", "batch", "clip_grad_norm_", "to_full", "load_full"),
)


@dataclass(frozen=True)
class PipelineText:
    """The contents of `pipeline.py`."""

    stages: Stages
    held: Sequence[Sequence[Held]]  # what each stage holds
    sizes: Sequence[Sequence[str]]  # modules of other stages that each stage reads sizes of
    shared: Sequence[Tie]  # the parameters that several stages hold
    model: type  # the model's class
    files: DefiningFiles  # the files that define its classes
    settings: Mapping[str, Any]  # attributes of the model that decided branches
    fixed: tuple[str, ...]  # those of them that methods may set between steps
    # The names of each tied parameter in the model, with `*` for numbers.
    ties: Sequence[tuple[str, ...]]
    has_shards: bool  # whether weights are divided over a tensor-parallel group as well
    # Whether the schedule's function computes the loss from the outputs.
    has_function: bool = False
    warnings: tuple[str, ...] = ()  # deviations from the request, in words

    def name(self, number: int) -> str:
        """The name of a stage's class."""
        return f"{self.model.__name__}Stage{number}"

    def classes(self) -> str:
        """The base class of all stages, and the stages."""
        return "\n\n\n".join([self._base(), *map(self._class, range(len(self.stages.stages)))])

    def _base(self) -> str:
        model = self.model.__name__
        lines = [
            f"class {model}Stage({self._kind}Stage, {model}):",
            f'    """A stage of `{model}`."""',
        ]
        if self.settings:
            some = any(value is NOT_NONE for value in self.settings.values())
            pairs = (f"{path!r}: {shown(value)}" for path, value in self.settings.items())
            lines += [
                "",
                "    # Stages leave out what the model does where these are something else"
                f"{', `...`: where None' if some else ''}.",
                f"    SETTINGS = {{{', '.join(pairs)}}}",
            ]
        if self.ties:
            lines += [
                "",
                "    # The names of parameters that have several, numbers as `*`.",
                f"    TIES = {tuple(self.ties)!r}",
            ]
        if self.fixed:
            lines += [
                "",
                "    def __init__(self, *args, **kwargs):",
                "        super().__init__(*args, **kwargs)",
                f"        self.register_forward_pre_hook(FixedSettings({self.fixed!r}))",
            ]
        return "\n".join([*lines, *self._answers_for_the_file()])

    def _class(self, number: int) -> str:
        stage, count = self.stages.stages[number], len(self.stages.stages)
        held = [h.text for h in self.held[number]]
        sizes = (
            f"# Modules of other stages, whose sizes it reads.\nSIZES = {(*self.sizes[number],)!r}"
        )
        methods = [
            *([sizes] if self.sizes[number] else []),
            f"def held(self):\n    return {', '.join(held)}{',' * (len(held) == 1)}",
            forward_text(self.stages, stage),
            *([loss_text(self.stages)] if number + 1 == count else []),
        ]
        text = textwrap.indent("\n\n".join(methods), "    ")
        return f"class {self.name(number)}({self.model.__name__}Stage):\n{text}"

    def _answers_for_the_file(self) -> list[str]:
        """The method by which transformers reads the model's file instead of the stages'."""
        found = getattr(self.model, FILE_READER, None)
        if found is None or not found():
            return []
        return [
            "",
            "    @classmethod",
            f"    def {FILE_READER}(cls):",
            f"        return {self.model.__name__}.{FILE_READER}()",
        ]

    def functions(self) -> str:
        """The tuple of stages, the pipeline, and the functions for users."""
        names = ", ".join(map(self.name, range(len(self.stages.stages))))
        given = ", ".join(f"{key}={value!r}" for key, value in self._pipeline().items() if value)
        offered = [f"{name} = pipeline.{name}" for name in self.engine.offered]
        made = f"pipeline = {self._kind}Pipeline(STAGES, {given})"
        return "\n".join([f"STAGES = ({names})", made, *offered])

    def _pipeline(self) -> dict[str, Any]:
        """The keyword arguments of the runtime's `Pipeline`; empty ones are left out later."""
        shared = tuple(
            {number: names[place] for number, names in tie.names.items()}
            for tie in self.shared
            for place in range(len(next(iter(tie.names.values()))))
        )
        if self.stages.by_name:
            (label,) = self.stages.labels
            read = self.stages.arguments()
            named: dict[str, Any] = {"inputs": read, "label": label}
        else:
            read = {name: name for name, _ in self.stages.stages[0].given}
            named = {"inputs": (*read,), "labels": (*self.stages.labels,)}
        known = {*read.values(), *self.stages.labels}
        unread = tuple(name for name in self.stages.program.parameters if name not in known)
        return {**named, "shared": shared, "unread": unread}

    def helpers(self) -> dict[str, set[str]]:
        """The names that the file uses from each helper module."""
        kind = self._kind
        of_schedule = {"modules": {FUNCTION}} if self.has_function else {}
        engine = {self.engine.module: {f"{kind}Pipeline"}}
        inexact = (v for v in self.settings.values() if isinstance(v, Unlike | Compared | Count))
        some = {type(value).__name__ for value in inexact}
        some |= {"FixedSettings"} if self.fixed else set()
        return {"stages": {f"{kind}Stage", *some}, **engine, **of_schedule}

    @property
    def _kind(self) -> str:
        return "Sharded" if self.has_shards else "Unsharded"

    @property
    def engine(self) -> Engine:
        """The library that runs the stages."""
        return TORCH if self.stages.by_name else DEEPSPEED

    def written(self, header: str) -> str:
        """The text of the file, below a header comment."""
        body = f"{self.classes()}\n\n\n{self.functions()}\n"
        what = f"`{self.model.__name__}` in {len(self.stages.stages)} stages"
        imports = "\n\n".join(import_groups(self._imports(body)))
        text = f'{header}\n"""{what}, for {self.engine.words}."""\n\n{imports}\n\n{body}'
        return black.format_str(text, mode=black.Mode())

    def _imports(self, body: str) -> dict[str, set[str]]:
        """The imports of the file: names by module, '' for the module itself."""
        tree = ast.parse(body)
        names = names_in(tree)
        bound = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        bound |= bound_in(tree) | parameters_in(tree)
        imports = {f".{module}": set(used) for module, used in self.helpers().items()}
        known = {name for module in imports.values() for name in module}
        self._check_names(known.union(*(bound_in(statement) for statement in tree.body)))
        for name in sorted(names - bound - known - set(dir(builtins)) - {"self"}):
            origin = self.files.origin(name)
            if origin is not None:
                module, wanted = origin
                imports.setdefault(module, set()).add(wanted)
        return imports

    def _check_names(self, taken: set[str]) -> None:
        """Raises if a name that stages read from a model file has another meaning in this file."""
        texts = [forward_text(self.stages, stage) for stage in self.stages.stages]
        for text in (*texts, loss_text(self.stages)):
            tree = ast.parse(text)
            for name in sorted((names_in(tree) - bound_in(tree) - parameters_in(tree)) & taken):
                if self.files.origin(name) is not None:
                    home = self.files.origins.get(name, (self.files.main.file.path.name,))[0]
                    raise errors.NameTaken(
                        f"a stage reads `{name}` of {home}, which means something else in "
                        "pipeline.py",
                        hint="give it another name there",
                    )


def shown(value: object) -> str:
    """The source text of a setting's value."""
    if isinstance(value, Unlike):
        return f"Unlike({value.other!r})"
    if isinstance(value, Compared):
        return f"Compared({value.sign!r}, {value.other!r})"
    if isinstance(value, Count):
        return f"Count({value.number})"
    return "..." if value is NOT_NONE else repr(value)
