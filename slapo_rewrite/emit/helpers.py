"""The helper modules of an output, reduced to the definitions in use."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterable, Mapping

import black

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import KERNELS, MODULES
from slapo_rewrite.code.file import SourceFile
from slapo_rewrite.code.import_lines import import_groups
from slapo_rewrite.code.text import joined_path
from slapo_rewrite.emit import kernels
from slapo_rewrite.emit.kernels import RUNTIME as RUNTIME
from slapo_rewrite.emit.used_definitions import (
    MARK,
    Definitions,
    Picked,
    add_import,
    bound_names,
    imported_outside,
    with_features,
)
from slapo_rewrite.schedule.load import ScheduleFile

# In order of dependence: each module follows those that it needs.
RUNTIME_ORDER = (
    "annotations", "given_classes", "remaking", "recomputation", "shards", "copies", "guards",
    "packed_axes", "tensor_parallel", "vocab_parallel_loss", "rng", "conv1d", "replicated",
    "grouped_query", "convolution", "embedding_bag", "multihead_attention", "transformer_layers",
    "normalization", "mixed_norms", "mixed_precision", "mixed_conv1d", "mixed_attention",
    "mixed_parallel", "mixed_parallel_conv1d", "mixed_parallel_convolution", "mixed_parallel_norms",
    "weights", "loading", "deferred_init", "distributed_checkpoint", "lora", "pretrained",
    "backward_steps", "stages", "checkpoints", "deepspeed_pipeline", "torch_pipeline",
)  # fmt: skip

# Functions that outputs offer to users, beside those that the model file calls.
SURFACE = {
    "tensor_parallel": {"set_group"},
    "loading": {"build", "full_state_dict", "to_full", "to_local"},
}
# The key, among helper modules, for keyword arguments and attributes in use. Lines of a runtime
# module marked "for NAME" by a comment are left out unless a keyword argument, an attribute or a
# module in use has the name.
FEATURES = "features"
# Helpers that are added on request, and their modules.
OPTIONAL = {
    "add_adapters": "lora",
    "build_deferred": "deferred_init",
    "load_pretrained": "loading",
    "save_pretrained": "loading",
    "sharded_state": "distributed_checkpoint",
}


def optional_helpers(names: Iterable[str]) -> dict[str, set[str]]:
    """The helpers of these names, by module; raises `UsageError` for an unknown name."""
    found: dict[str, set[str]] = {}
    for name in names:
        if name not in OPTIONAL:
            raise errors.UsageError(
                f"there is no helper `{name}`",
                hint=errors.did_you_mean(name, OPTIONAL) or f"choose from {', '.join(OPTIONAL)}",
            )
        found.setdefault(OPTIONAL[name], set()).add(name)
    return found


def helper_files(
    used: Mapping[str, set[str]], schedule: ScheduleFile, header: str
) -> dict[str, str]:
    """The helper files, by name.

    `used` has the names that the model file uses from each helper module. The schedule defines the
    classes and functions of `modules`.
    """
    return _laid_out(_picked(used, schedule), header)


def library_files(uses: Mapping[str, Iterable[str]], header: str) -> dict[str, str]:
    """The helper files, by name, without the schedule's own code.

    Names that no library defines any more are left out.
    """
    known: dict[str, set[str]] = {}
    for module, names in uses.items():
        if kernels.is_of_kernels(module):
            files = kernels.eager_libraries() if "." in module else kernels.libraries()
            libraries = [*files.values()]
        else:
            libraries = [runtime_library(module)] if module in RUNTIME_ORDER else []
        defined = {n for library in libraries for n in library.defined.keys() | library.handed_on}
        if found := set(names) if module == FEATURES else defined & set(names):
            known[module] = found
    return _laid_out(_library(known), header)


def _laid_out(helpers: Mapping[str, Picked], header: str) -> dict[str, str]:
    files: dict[str, str] = {}
    for module, picked in helpers.items():
        gap = "\n\n" if picked.imports else "\n\n\n"
        text = f'"""{picked.docstring}"""{gap}{picked.text}'
        if module == MODULES:  # the user's own code, whose layout may not be black's
            text = black.format_str(text, mode=black.Mode())
        files[f"{module}.py"] = f"{header}\n{text}"
    return files


def inlined_helpers(used: Mapping[str, set[str]], schedule: ScheduleFile, file: SourceFile) -> str:
    """The helpers as one text, to be inserted after the imports of the model file."""
    apart = [m.partition(".")[0] for m in used if kernels.is_of_kernels(m)]
    if len(set(apart)) > 1:
        raise errors.Unsupported(
            f"two backends implement one function of {', '.join(sorted(set(apart)))}",
            hint="leave out --single-file: helpers are then separate files",
        )
    picked = _picked(used, schedule)
    order = [m for m in (*RUNTIME_ORDER, KERNELS, MODULES) if m in picked]
    imports: dict[str, set[str]] = {}
    for module in order:
        for line in (line for group in picked[module].imports for line in group):
            _add_missing(line, file, imports)
    for module in order:
        for node in ast.parse(picked[module].body).body:
            for name in bound_names(node):
                if name in file.names:
                    raise errors.NameTaken(
                        f"`{name}` means something else in {file.path.name}",
                        at=file.at(file.classes.get(name) or file.functions.get(name) or node),
                        hint="leave out --single-file: helpers are then separate files",
                    )
    bodies = [picked[module].body.strip("\n") for module in order]
    return "\n\n".join([*import_groups(imports), "\n" + "\n\n\n".join(bodies)])


def _add_missing(line: str, file: SourceFile, imports: dict[str, set[str]]) -> None:
    """Adds the imports of a line that the model file lacks: names by module."""
    for module, alias in imported_outside(line):
        meaning = joined_path(module, alias.name)
        name = alias.asname or alias.name
        known = file.imports.get(name if module or alias.asname else name.split(".")[0])
        if known == meaning:
            continue
        if name in file.names:
            raise errors.NameTaken(
                f"`{name}` means something else in {file.path.name} than `{meaning}`",
                hint="leave out --single-file: helpers are then separate files",
            )
        add_import(imports, module, alias)


def _picked(used: Mapping[str, set[str]], schedule: ScheduleFile) -> dict[str, Picked]:
    """The definitions in use of each helper module, and those that they need."""
    own = {MODULES: _copied(schedule, _plain(used[MODULES]))} if MODULES in used else {}
    return {**own, **_library(library_uses(used, schedule))}


def library_uses(used: Mapping[str, set[str]], schedule: ScheduleFile) -> dict[str, set[str]]:
    """The names in use of each helper module, also by the schedule's own code."""
    wanted = {module: _plain(names) for module, names in used.items()}
    if MODULES in wanted:
        copied = _copied(schedule, wanted.pop(MODULES))
        named = {FEATURES: named_features([copied.body])} if copied.helpers else {}
        for module, names in {**copied.helpers, **named}.items():
            wanted.setdefault(module, set()).update(names)
    return wanted


def _plain(names: Iterable[str]) -> set[str]:
    """Names without the module that qualifies them."""
    return {name.rpartition(".")[2] for name in names}


def _library(uses: Mapping[str, set[str]]) -> dict[str, Picked]:
    """The definitions of names of helper modules, and those that they need."""
    features = frozenset(uses.get(FEATURES, ()))
    while True:
        found = _picks({m: {*names} for m, names in uses.items() if m != FEATURES}, features)
        more = features | named_features(picked.body for picked in found.values()) | found.keys()
        if more == features:
            return found
        features = more


def _picks(wanted: dict[str, set[str]], features: Collection[str]) -> dict[str, Picked]:
    """The same for a given set of features in use."""
    called = [module for module in wanted if kernels.is_of_kernels(module)]
    _close(wanted, features)
    split = _shards_something(wanted, features)
    if split or {"weights", "loading"} & wanted.keys():
        wanted.setdefault("loading", set()).update(SURFACE["loading"])
        if split:
            wanted["tensor_parallel"].add("clip_grad_norm_")
        _close(wanted, features)
    if "shards" in wanted:  # users call `tensor_parallel.set_group`
        wanted.setdefault("tensor_parallel", set(SURFACE["tensor_parallel"]))
        _close(wanted, features)
    found = kernels.picked_files({m: wanted.pop(m) for m in called})
    for module in sorted(wanted):
        found[module] = runtime_library(module, features).pick(wanted[module])
    return found


def named_features(texts: Iterable[str]) -> set[str]:
    """The features that texts use, by a keyword argument or an attribute."""
    return {n for text in texts for found in _features()[0].findall(text) for n in found if n}


@functools.cache
def _features() -> tuple[re.Pattern[str], dict[str, frozenset[str]]]:
    """The regular expression of features, and the features of each runtime module."""
    marks = {m: frozenset(MARK.findall(_runtime_text(m))) for m in RUNTIME_ORDER}
    names = "|".join(sorted({n for own in marks.values() for n in own}.difference(RUNTIME_ORDER)))
    return re.compile(rf"\b({names})=|\.({names})\b"), marks


@functools.cache
def _runtime_text(module: str) -> str:
    return (RUNTIME / f"{module}.py").read_text(encoding="utf-8")


def runtime_library(module: str, features: Collection[str] | None = None) -> Definitions:
    """The definitions of a runtime module, which can be picked one by one.

    `features` are those in use (see FEATURES), by default all.
    """
    marks = _features()[1][module]
    return _with_features(module, marks if features is None else marks.intersection(features))


@functools.cache
def _with_features(module: str, features: frozenset[str]) -> Definitions:
    return Definitions(with_features(_runtime_text(module), features))


def _close(wanted: dict[str, set[str]], features: Collection[str]) -> None:
    """Adds the names of other runtime modules that the wanted names need."""
    waiting = [m for m in wanted if not kernels.is_of_kernels(m)]
    for module in waiting:
        wanted[module] |= SURFACE.get(module, set())
    while waiting:
        module = waiting.pop()
        library = runtime_library(module, features)
        for other, names in library.pick(wanted[module]).helpers.items():
            if not names <= wanted.get(other, set()):
                waiting.append(other)
                wanted.setdefault(other, set(SURFACE.get(other, ()))).update(names)


def _shards_something(wanted: Mapping[str, set[str]], features: Collection[str]) -> bool:
    """Whether any parameter is sharded, so that there is something to gather."""
    library = runtime_library("tensor_parallel", features)
    return "record_shard" in library.closure(wanted.get("tensor_parallel", ()))


def _copied(schedule: ScheduleFile, names: set[str]) -> Picked:
    try:
        picked = Definitions(schedule.text, schedule.tree).pick(names)
    except KeyError as error:
        raise errors.ScheduleError(
            f"{error} is not defined at the top level of `{schedule.path}`",
            hint="define it there as a class or function",
        ) from None
    picked.docstring = "Modules and functions that the schedule defines."
    return picked
