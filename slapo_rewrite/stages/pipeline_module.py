"""The text of `pipeline.py`."""

from __future__ import annotations

import ast
import builtins
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import black

from slapo_rewrite import errors
from slapo_rewrite.code.dataflow import bound_in, names_in, read_in
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.text import accessor
from slapo_rewrite.errors import Span
from slapo_rewrite.stages.environment import NOT_NONE
from slapo_rewrite.stages.program import Depth
from slapo_rewrite.stages.stage_inputs import Stage, Stages, reads_of
from slapo_rewrite.stages.written_text import rewritten


def forward_text(stages: Stages, stage: Stage, depth: Depth | None = None) -> str:
    """A stage's `forward`."""
    takes = [stages.spelled(v) for v in stage.given]
    gives = ", ".join(stages.spelled(v) for v in stage.hands_on)
    argument, unpacked = arguments(takes, "inputs")
    if stages.by_name:
        argument, unpacked = named_arguments(takes, stages, stage), []
    returned = ", ".join(
        f"{stages.spelled(v)}.contiguous()"
        if v in stages.scattered and v not in stage.given and stage is not stages.stages[-1]
        else stages.spelled(v)
        for v in stage.hands_on
    )
    body = [*unpacked, *stages.lines(stage, depth, gives), f"return {returned}"]
    return defined(f"def forward(self, {argument}):", body)


def loss_text(stages: Stages, depth: Depth | None = None) -> str:
    """The method that makes the loss of what the last stage gives."""
    outputs = [stages.spelled(v) for v in stages.stages[-1].hands_on]
    first, unpacked = arguments(outputs, "outputs")
    second, more = arguments(stages.labels, "labels")
    lines = stages.lines(stages.tail, depth, stages.program.loss)
    last = lines[-1] if lines else ""
    result = stages.program.loss
    if f"\n{last}".rpartition(f"\n{result} = ")[2] != f"\n{last}" and result.isidentifier():
        lines[-1] = f"\n{last}".replace(f"\n{result} = ", "\nreturn ", 1).strip("\n")
        result = ""  # given right away
    body = [*unpacked, *more, *lines, *([f"return {result}"] if result else [])]
    return defined(f"def loss(self, {first}, {second}):", body)


def arguments(names: Sequence[str], together: str) -> tuple[str, list[str]]:
    """A parameter for one value or for a tuple of several, and how that is taken apart."""
    if len(names) == 1:
        return names[0], []
    return together, [f"{', '.join(names)} = {together}"]


def named_arguments(takes: Sequence[str], stages: Stages, stage: Stage) -> str:
    """The parameters of a stage that is given all arguments of the step by name.

    Args:
        takes: What it takes from the stage before.
        stages: All stages.
        stage: The stage.
    """
    named = [stages.spelled(v) for v in stage.named]
    apart = ["/"] if set(takes) & stages.arguments().keys() else []
    return ", ".join([*takes, *apart, *(["*", *named] if named else []), "**_"])


def defined(head: str, body: Iterable[str]) -> str:
    """A function; names that are bound with others and never read begin with an underscore."""
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


# What a stage holds -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What one stage holds.

    Attributes:
        text: The expression for it: `self.bert.embeddings`, `self.bert.encoder.layer[6:]`.
        path: Of the module or parameter, or of the list that the layers are in.
        value: The module, layers or parameter.
        picked: Whether the stage takes elements of it that it works out as it runs.
    """

    text: str
    path: str
    value: Any
    picked: bool = False

    @property
    def tensors(self) -> list[Any]:
        """Its parameters and buffers."""
        if hasattr(self.value, "parameters"):
            return [*self.value.parameters(), *self.value.buffers()]
        return [self.value]


def held_by(stages: Stages, model: Any) -> list[list[Held]]:
    """What each stage holds, in the model's order; what training leaves alone is with the last."""
    found = [_used(stages, number, model) for number in range(len(stages.stages))]
    there = {id(t) for stage in found for h in stage for t in h.tensors}
    names = dict(model.named_modules())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in there:
            path, above = name, name.rpartition(".")[0]
            while above and not _tensors(names[above]) & there:
                path, above = above, above.rpartition(".")[0]
            value = names.get(path, tensor)
            found[-1].append(Held(accessor(path), path, value))
            there |= {id(t) for t in found[-1][-1].tensors}
    return found


def _tensors(module: Any) -> set[int]:
    return {id(t) for t in (*module.parameters(), *module.buffers())}


def _used(stages: Stages, number: int, model: Any) -> list[Held]:
    stage = stages.stages[number]
    gives = ", ".join(stages.spelled(v) for v in stage.hands_on)
    texts = stages.lines(stage, None, gives)
    if number + 1 == len(stages.stages):
        texts += [*stages.lines(stages.tail, None, stages.program.loss), stages.program.loss]
    found: dict[str, Held] = {}
    for text in texts:
        slices = {
            ast.unparse(node.value): ast.unparse(node)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
        }
        picked = {
            ast.unparse(node.value)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Subscript)
            and not isinstance(node.slice, ast.Slice | ast.Constant)
        }
        for steps in reads_of(model, text):
            path = _longest(model, steps)
            if path:
                spelled = accessor(path)
                is_picked = spelled in picked
                if spelled in slices:
                    spelled = held_slice(slices[spelled])
                is_picked |= spelled in found and found[spelled].picked
                value = eval(spelled, {"self": model})
                found[spelled] = Held(spelled, path, value, is_picked)
    order = {name: n for n, (name, _) in enumerate(model.named_modules())}
    return sorted(found.values(), key=lambda held: order.get(held.path, len(order)))


def held_slice(text: str) -> str:
    """Layers of a list, to the end where a setting of the model says how far."""
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
    first, stop = node.slice.lower, node.slice.upper
    upper = ast.unparse(stop) if isinstance(stop, ast.Constant) else ""
    lower = ast.unparse(first) if first else ""
    listed = ast.unparse(node.value)
    return f"{listed}[{lower}:{upper}]" if lower or upper else listed


def _longest(model: Any, steps: Sequence[str]) -> str:
    """The path to a module that is called, to a list of them, or to a tensor.

    Empty for what is another attribute of a module that is written out: its config, say.
    """
    found, path = model, list[str]()
    for step in steps:
        inner = getattr(found, "_modules", {}).get(step)
        if inner is None:
            tensors = {**found._parameters, **found._buffers}
            if tensors.get(step) is not None:
                return ".".join([*path, step])
            return "" if hasattr(found, step) and _is_written_out(found, step) else ".".join(path)
        found = inner
        path.append(step)
    return ".".join(path)


def _is_written_out(module: Any, step: str) -> bool:
    """Whether reading this attribute does not need what the module holds."""
    return step in vars(module) or callable(getattr(type(module), step, None))


@dataclass(frozen=True)
class Tie:
    """Parameters that the same stages hold.

    Attributes:
        key: What the tie is called.
        names: By stage, the parameters' names there.
    """

    key: str
    names: dict[int, tuple[str, ...]]


def ties_of(held: Sequence[Sequence[Held]], model: Any) -> list[Tie]:
    """The parameters that more than one stage holds, for each group of stages."""
    spelled: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        spelled.setdefault(id(parameter), []).append(name)
    where: dict[int, dict[int, str]] = {}
    for number, stage in enumerate(held):
        for part in stage:
            for tensor in part.tensors:
                names = spelled.get(id(tensor), [])
                own = [n for n in names if f"{n}.".startswith(f"{part.path}.")]
                if own:
                    where.setdefault(id(tensor), {}).setdefault(number, own[0])
    groups: dict[tuple[int, ...], list[dict[int, str]]] = {}
    for by_stage in where.values():
        if len(by_stage) > 1:
            groups.setdefault(tuple(by_stage), []).append(by_stage)
    return [
        Tie(
            next(iter(group[0].values())).rpartition(".")[0].rpartition(".")[2] or "shared",
            {number: tuple(by_stage[number] for by_stage in group) for number in numbers},
        )
        for numbers, group in groups.items()
    ]


def check_one_group(ties: Sequence[Tie], at: Span | None) -> None:
    """Refuses more groups of stages with shared parameters than DeepSpeed can keep in step.

    Raises:
        CannotCut: There are several.
    """
    if len(ties) > 1:
        one, other = (next(iter(tie.names.values()))[0] for tie in ties[:2])
        raise errors.CannotCut(
            f"`{one}` and `{other}` are shared by different stages, and DeepSpeed ties a stage to "
            "one group of others only",
            at=at,
            hint='cut so that the same stages share both, or for target="torch"',
        )


def check_picked(held: Sequence[Sequence[Held]], at: Span | None) -> None:
    """Refuses stages that each take elements of one container, worked out as they run.

    All of them would hold the whole of it, and DeepSpeed keep it in step by gradients that each
    has for its own elements only.

    Raises:
        CannotCut: There are such stages.
    """
    seen: dict[str, int] = {}
    for number, stage in enumerate(held):
        for part in stage:
            picks = part.picked and hasattr(part.value, "parameters")
            if picks and any(True for _ in part.value.parameters()):
                first = seen.setdefault(part.path, number)
                if first != number:
                    raise errors.CannotCut(
                        f"stages {first} and {number} both take elements of `{part.path}` by a key "
                        "that is worked out, so each would hold all of it",
                        at=at,
                        hint='cut for target="torch", or keep each element in the layer it goes '
                        "with",
                    )


def shared_names(model: Any) -> list[tuple[str, ...]]:
    """The names of parameters that have several, numbers written as `*`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(re.sub(r"\d+", "*", name))
    return sorted({tuple(sorted(set(group))) for group in names.values() if len(group) > 1})


# The file ---------------------------------------------------------------------------------------


PARTITIONED = """

    Where a topology has an axis `model`, the engine's configuration needs
    `"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}`."""


WRITE_LAYERS = '''\
def write_checkpoint(folder, full, *args, **kwargs):
    """Writes the original's state dict as a checkpoint of the stages.

    What loads it is `engine.load_checkpoint(folder, load_module_only=True)`.

    Args:
        folder: Where the checkpoint goes.
        full: The original's state dict.
        *args: Those of `{model}`.
        **kwargs: Those of `{model}`.

    Raises:
        FileExistsError: The folder has such a checkpoint already.
    """
    write_layers(folder, full, [partial(stage, *args, **kwargs) for stage in STAGES])'''
WRITE_PARTS = '''\
def write_checkpoint(folder, full, *args, tensor_parallel_size=1, **kwargs):
    """Writes the original's state dict as a checkpoint of the stages.

    What loads it is `engine.load_checkpoint(folder, load_module_only=True)`.

    Args:
        folder: Where the checkpoint goes.
        full: The original's state dict.
        *args: Those of `{model}`.
        tensor_parallel_size: How many ranks are to share each stage.
        **kwargs: Those of `{model}`.

    Raises:
        FileExistsError: The folder has such a checkpoint already.
        ValueError: The model does not divide over so many ranks.
    """
    stages = [partial(stage, *args, **kwargs) for stage in STAGES]
    write_parts(folder, full, stages, tensor_parallel_size)'''


# Asks the text of the file that defines a class; for a stage the model's file is to answer.
FILE_READER = "_can_set_experts_implementation"


@dataclass(frozen=True)
class PipelineModule:
    """Everything that `pipeline.py` is made of, for DeepSpeed's engine.

    Attributes:
        stages: The stages.
        held: What each of them holds.
        shared: The parameters that several hold.
        model: The model's class.
        file: The file that defines it.
        settings: Attributes of the model that branches were left out for.
        ties: The names that each shared parameter has in the model, numbers written as `*`.
        has_shards: Whether weights are divided over a tensor-parallel group as well.
        gathers: Whether the output has functions that put divided weights together.
    """

    stages: Stages
    held: Sequence[Sequence[Held]]
    shared: Sequence[Tie]
    model: type
    file: SourceFile
    settings: Mapping[str, Any]
    ties: Sequence[tuple[str, ...]]
    has_shards: bool
    gathers: bool

    engine: ClassVar[str] = "DeepSpeed's pipeline engine"

    def name(self, number: int) -> str:
        """What a stage's class is called."""
        return f"{self.model.__name__}Stage{number}"

    def classes(self) -> str:
        """The stages as classes."""
        return "\n\n\n".join(self._class(n) for n in range(len(self.stages.stages)))

    def _class(self, number: int) -> str:
        stage = self.stages.stages[number]
        held = self.held[number]
        paths = [h.text.removeprefix("self.") for h in held]
        lines = [
            f"class {self.name(number)}({self.model.__name__}):",
            *_docstring(f"Stage {number}: {_listed([f'`{p}`' for p in paths])}."),
            "",
            "    def __init__(self, *args, **kwargs):",
            "        with Recording(torch.get_default_device()) as recording:",
            "            super().__init__(*args, **kwargs)",
        ]
        if self.settings:
            lines.append("        check_settings(self, SETTINGS)")
        lines += [
            "        check_ties(self, TIES)",
            f"        keep(self, recording, {', '.join(h.text for h in held)})",
        ]
        if self.gathers:
            model = self.model.__name__
            lines.append(f"        draw_parts(self, recording, partial({model}, *args, **kwargs))")
        lines += [
            "",
            *self._answers_for_the_file(),
            textwrap.indent(forward_text(self.stages, stage), "    "),
        ]
        if number + 1 == len(self.stages.stages):
            lines += ["", textwrap.indent(loss_text(self.stages), "    ")]
        return "\n".join(lines)

    def _answers_for_the_file(self) -> list[str]:
        """The methods by which transformers reads the file that defines a class."""
        found = getattr(self.model, FILE_READER, None)
        if found is None or not found():
            return []
        return [
            "    @classmethod",
            f"    def {FILE_READER}(cls):",
            f"        return {self.model.__name__}.{FILE_READER}()",
            "",
        ]

    def functions(self) -> str:
        """`build`, `batch`, and what loads and saves."""
        count, model = len(self.stages.stages), self.model.__name__
        names = ", ".join(self.name(n) for n in range(count))
        given = [name for name, _ in self.stages.stages[0].given]
        inputs = given[0] if len(given) == 1 else f"({', '.join(given)})"
        labels = self.stages.labels
        answer = labels[0] if len(labels) == 1 else f"({', '.join(labels)})"
        taken = [p for p in self.stages.program.parameters if p in {*given, *labels}]
        held = "stage_of(module, STAGES)"
        state = f"full_state_dict({held})" if self.gathers else f"{held}.state_dict()"
        specs = "".join(f"{self._spec(n)},\n" for n in range(count))
        partitioned = PARTITIONED if self.has_shards else ""
        groups = "    set_group(model_parallel_group(topology))\n" if self.has_shards else ""
        parts = "    take_own_parts(stage_of(module, STAGES))\n" if self.has_shards else ""
        join = "joined" if self.gathers else "united"
        writing = (WRITE_PARTS if self.has_shards else WRITE_LAYERS).format(model=model)
        return f'''\
STAGES = ({names})


def build(*args, num_stages=None, topology=None, dynamic_shape=False, **kwargs):
    """A `PipelineModule` of the stages, for `deepspeed.initialize`.

    Each rank makes the weights of its own stage only, the same as the whole model
    would have from the same seed; so ranks are to be seeded alike. From then on each
    stage of each replica draws random numbers of its own, for dropout.{partitioned}

    `engine.eval_batch(data)` gives the loss in eval mode, and with `return_logits=True`
    the logits as well, on the last stage; it cannot leave the loss out.

    Args:
        *args: Those of `{model}`.
        num_stages: {count}, if it is given.
        topology: Which ranks hold which stage; without it, each stage is held by as
            many ranks as there are, in data parallel.
        dynamic_shape: Whether batches are of several shapes, which are then sent with
            them.
        **kwargs: Those of `{model}`.

    Raises:
        ValueError: The model is cut into other stages, or there are other processes.
    """
    check_layout(len(STAGES), num_stages, topology)

    def loss(outputs, labels):
        return stage_of(module, STAGES).loss(outputs, labels)

{groups}    layers = [{specs}]
    module = PipelineModule(
        layers,
        num_stages=None if topology else len(STAGES),
        topology=topology,
        loss_fn=loss,
        partition_method="uniform",
        dynamic_shape=dynamic_shape,
    )
    count_once(module, layers, STAGES)
{parts}    seed_apart(module)
    return module


def batch({", ".join(taken)}):
    """The model's arguments as the inputs and labels that the engine takes.

    All are tensors. What is trained is the mean of the losses of all micro-batches.
    """
    return {inputs}, {answer}


def to_full(module, first_rank_only=False):
    """The original's state dict, on every rank. Every rank calls it.

    Args:
        module: What `build` returns.
        first_rank_only: Give it to the first process alone, on its CPU; the others get
            an empty dictionary, and none but the first holds more than a stage.
    """
    group = module.mpu().get_pipe_parallel_group()
    return gathered({state}, group, first_rank_only)


def load_full(module, full):
    """Takes the original's state dict; do it before `deepspeed.initialize`."""
    stage = stage_of(module, STAGES)
    stage.load_state_dict({{n: t for n, t in full.items() if has_place(stage, n)}})


def read_checkpoint(folder, *args, tag=None, **kwargs):
    """The original's state dict, from what `engine.save_checkpoint(folder)` wrote.

    One process is enough, without an engine, and the original model loads it. The
    weights are those that the engine computes with: rounded ones, where it trains in
    half precision.

    Args:
        folder: That of `save_checkpoint`.
        *args: Those of `{model}`.
        tag: The checkpoint's; without it, the latest is read.
        **kwargs: Those of `{model}`.

    Raises:
        ValueError: The checkpoint is of other stages, or of another model.
    """
    files = layer_files(folder, tag, len(STAGES))
    return {join}(files, partial({model}, *args, **kwargs))


{writing}
'''

    def _spec(self, number: int) -> str:
        name = self.name(number)
        tie = next((tie for tie in self.shared if number in tie.names), None)
        if tie is None:
            return f"LayerSpec({name}, *args, **kwargs)"
        names = tie.names[number]
        tied = repr(names[0]) if len(names) == 1 else repr(list(names))
        return f"TiedLayerSpec({tie.key!r}, {name}, *args, tied_weight_attr={tied}, **kwargs)"

    def head(self) -> str:
        """What stands before the classes."""
        text = "# The names of parameters that have several, numbers as `*`.\n"
        text += f"TIES = {tuple(self.ties)!r}\n"
        if not self.settings:
            return text
        some = any(value is NOT_NONE for value in self.settings.values())
        pairs = (f"{path!r}: {shown(value)}" for path, value in self.settings.items())
        return (
            "# The stages leave out what the model does where these are something else"
            f"{', `...`: where None' if some else ''}.\n"
            f"SETTINGS = {{{', '.join(pairs)}}}\n{text}"
        )

    def helpers(self) -> dict[str, set[str]]:
        """The names that it uses of each helper module."""
        stages = {"check_ties", "gathered", "has_place", "keep"}
        stages |= {"check_settings"} if self.settings else set()
        found = {"stages": stages, "deferred_init": {"Recording"}}
        if self.has_shards:
            found["tensor_parallel"] = {"set_group"}
        if self.gathers:
            stages.add("draw_parts")
            found["loading"] = {"full_state_dict"}
        for module, names in self.engine_helpers().items():
            found.setdefault(module, set()).update(names)
        return found

    def engine_helpers(self) -> dict[str, set[str]]:
        """The names of helper modules that only what is written for this engine uses."""
        names = {"check_layout", "count_once", "seed_apart", "stage_of"}
        names |= {"model_parallel_group", "take_own_parts"} if self.has_shards else set()
        checkpoints = {"layer_files", "joined" if self.gathers else "united"}
        checkpoints.add("write_parts" if self.has_shards else "write_layers")
        return {"stages": names, "checkpoints": checkpoints}

    def written(self, header: str) -> str:
        """The whole file.

        Args:
            header: A comment that says what made it.

        Raises:
            NameTaken: What a stage runs has a name that the file needs for something else.
        """
        body = f"{self.head()}\n\n{self.classes()}\n\n\n{self.functions()}\n"
        count = len(self.stages.stages)
        text = (
            f'{header}\n"""`{self.model.__name__}` in {count} stages, for {self.engine}."""\n\n'
            f"{_import_text(self._imports(body))}\n\n{body}"
        )
        return black.format_str(text, mode=black.Mode())

    def _imports(self, body: str) -> dict[str, set[str]]:
        """What the file imports: names by module, '' for the module itself."""
        tree = ast.parse(body)
        names = names_in(tree)
        bound = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        bound |= bound_in(tree) | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        imports = {f".{module}": set(used) for module, used in self.helpers().items()}
        if specs := {"PipelineModule", "LayerSpec", "TiedLayerSpec"} & names:
            imports["deepspeed.pipe"] = specs
        imports |= {"functools": {"partial"} & names, "torch": {""}}
        known = {name for module in imports.values() for name in module}
        self._check_names(known | {n.name for n in tree.body if isinstance(n, ast.FunctionDef)})
        for name in sorted(names - bound - known - set(dir(builtins)) - {"self"}):
            origin = self._origin(name)
            if origin is not None:
                module, wanted = origin
                imports.setdefault(module, set()).add(wanted)
        return imports

    def _check_names(self, taken: set[str]) -> None:
        """Refuses names that the stages read of the model's file and that mean another thing here.

        Raises:
            NameTaken: There is one.
        """
        texts = [forward_text(self.stages, stage) for stage in self.stages.stages]
        for text in (*texts, loss_text(self.stages)):
            tree = ast.parse(text)
            for name in sorted((names_in(tree) - bound_in(tree)) & taken):
                if self._origin(name) is not None:
                    raise errors.NameTaken(
                        f"`{name}` of {self.file.path.name} is read by a stage, and means "
                        "something else in pipeline.py",
                        hint="give it another name in the model's file",
                    )

    def _origin(self, name: str) -> tuple[str, str] | None:
        """Where a name of the model's file comes from: a module, and what is imported of it."""
        for node in ast.walk(self.file.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name.split(".")[0]) != name:
                        continue
                    shown = alias.name + (f" as {alias.asname}" if alias.asname else "")
                    if isinstance(node, ast.Import):
                        return shown, ""
                    return "." * node.level + (node.module or ""), shown
        if name in self.file.names:
            return f".{self.file.path.stem}", name
        return None


def shown(value: object) -> str:
    """A setting's value as source."""
    return "..." if value is NOT_NONE else repr(value)


def _import_text(imports: Mapping[str, set[str]]) -> str:
    groups: list[list[str]] = [[], [], []]
    own = sys.stdlib_module_names
    for module in sorted(imports):
        if "" in imports[module]:
            groups[module.split(".")[0] not in own].append(f"import {module}")
    for module in sorted(imports):
        group = groups[2 if module.startswith(".") else module.split(".")[0] not in own]
        if names := sorted(imports[module] - {""}):
            group.append(f"from {module} import {', '.join(names)}")
    return "\n\n".join("\n".join(group) for group in groups if group)


def _docstring(text: str) -> list[str]:
    if len(text) <= 78:
        return [f'    """{text}"""']
    first, _, rest = text.partition(": ")
    wrapped = textwrap.wrap(rest[0].upper() + rest[1:] if rest[0].isalpha() else rest, 84)
    return [f'    """{first}.', "", *(f"    {line}" for line in wrapped), '    """']


def _listed(items: Sequence[str]) -> str:
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last
