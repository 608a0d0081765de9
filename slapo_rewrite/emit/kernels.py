"""`kernels.py` of an output: the functions that rules call, in Triton or in plain PyTorch."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from slapo_rewrite import errors
from slapo_rewrite.changes.imports import EAGER, INDUCTOR, KERNEL_FILES, KERNELS, Reference
from slapo_rewrite.code.import_lines import LINE_LENGTH, import_groups
from slapo_rewrite.emit.used_definitions import (
    Definitions,
    Picked,
    add_import,
    bound_names,
    imported_outside,
)

RUNTIME = Path(__file__).resolve().parents[1] / "runtime"
WITH_KERNELS = "Kernels that the model uses, each with its reference in PyTorch."
WITHOUT = "What the model calls in the place of kernels, in PyTorch's operations."


@functools.cache
def libraries() -> dict[str, Definitions]:
    """The files of kernels by name, in order of dependence."""
    found = _read("kernels")
    ordered: dict[str, Definitions] = {}

    def place(name: str) -> None:
        if name not in ordered:
            for node in found[name].tree.body:
                if isinstance(node, ast.ImportFrom) and node.level and node.module:
                    place(node.module)
            ordered[name] = found[name]

    for name in found:
        place(name)
    return ordered


@functools.cache
def eager_libraries() -> dict[str, Definitions]:
    """The files of the same functions in plain PyTorch, by name, in the order of the kernels."""
    found = _read("eager")
    return {name: found[name] for name in libraries() if name in found}


def _read(folder: str) -> dict[str, Definitions]:
    paths = sorted((RUNTIME / folder).glob("*.py"))
    return {
        p.stem: Definitions(p.read_text(encoding="utf-8")) for p in paths if p.stem != "__init__"
    }


def is_of_kernels(module: str) -> bool:
    """Whether a helper module holds functions that rules call."""
    return module.partition(".")[0] in KERNEL_FILES


def by_backend(
    used: Mapping[str, set[str]], references: Iterable[Reference]
) -> dict[str, set[str]]:
    """The names in use of each helper module, with those of `kernels` divided by backend.

    Functions that are not Triton kernels have keys such as `kernels.eager`.
    """
    known = {(r.module[1:], r.written): r.backend for r in references if r.module.startswith(".")}
    found: dict[str, set[str]] = {}
    for module, names in used.items():
        for name in names:
            backend = known.get((module, name), "")
            found.setdefault(f"{module}.{backend}".rstrip("."), set()).add(name)
    return found


def picked_files(uses: Mapping[str, Iterable[str]]) -> dict[str, Picked]:
    """The files of the functions that rules call, by name; `uses` is a result of `by_backend`."""
    files: dict[str, dict[str, set[str]]] = {}
    for module, names in uses.items():
        file, _, backend = module.partition(".")
        files.setdefault(file, {})[backend] = set(names)
    return {
        file: picked(own.get("", ()), own.get(EAGER, ()), own.get(INDUCTOR, ()))
        for file, own in sorted(files.items())
    }


def picked(
    names: Iterable[str], eager: Iterable[str] = (), compiled: Collection[str] = ()
) -> Picked:
    """The public functions of these names and all that they need, as one file.

    Those in `names` launch kernels, those in `eager` are plain PyTorch, and those in `compiled` are
    plain PyTorch compiled by `torch.compile`.
    """
    names = [*names]
    others = [*eager, *compiled]
    plain = _eager_parts(others, compiled) if others else {}
    parts = _kernel_parts(names, plain.values())
    if plain:
        _check_apart(parts.values(), plain.values())
    every = [(name, part[name]) for name in libraries() for part in (parts, plain) if name in part]
    imports: dict[str, set[str]] = {}
    legend: dict[str, str] = {}
    bodies, last = [], ""
    for name, part in every:
        for line in (line for group in part.imports for line in group):
            for module, alias in imported_outside(line):
                add_import(imports, module, alias)
        # Without kernels, references are below the heading of the functions that call them.
        shown = part if names else plain.get(name)
        body = part.body.strip("\n")
        if shown is not None and (heading := (shown.docstring or "").partition("\n")[0]) != last:
            body, last = f"# {heading}\n\n\n{body}", heading
            legend |= legend_of(shown.docstring or "")
        bodies.append(body)
    docstring = f"{WITH_KERNELS if names else WITHOUT}\n"
    if legend:
        shapes = ", ".join(f"{letter} {meaning}" for letter, meaning in legend.items())
        docstring += "\n" + textwrap.fill(f"Shapes: {shapes}.", LINE_LENGTH) + "\n"
    groups = [group.splitlines() for group in import_groups(imports)]
    gap = "\n\n" if bodies[0].startswith("#") else "\n\n\n"
    return Picked(groups, gap + "\n\n\n".join(bodies), docstring)


def _eager_parts(names: Iterable[str], compiled: Collection[str]) -> dict[str, Picked]:
    """The definitions to copy from each file in `runtime/eager`."""
    wanted = _by_file(names, eager_libraries())
    return {m: eager_libraries()[m].pick(own, compiled) for m, own in wanted.items()}


def _kernel_parts(names: Iterable[str], callers: Iterable[Picked]) -> dict[str, Picked]:
    """The definitions to copy from each file in `runtime/kernels`, those of callers included."""
    files = libraries()
    wanted = _by_file(names, files)
    for module, used in (item for caller in callers for item in caller.helpers.items()):
        wanted.setdefault(module.removeprefix(f"{KERNELS}."), set()).update(used)
    found: dict[str, Picked] = {}
    for module in reversed(files):
        if module in wanted:
            found[module] = files[module].pick(wanted[module])
            for other, used in found[module].helpers.items():
                wanted.setdefault(other, set()).update(used)
    return found


def _by_file(names: Iterable[str], files: Mapping[str, Definitions]) -> dict[str, set[str]]:
    wanted: dict[str, set[str]] = {}
    for name in names:
        home = next((m for m, library in files.items() if name in library.defined), None)
        if home is None:
            raise KeyError(name)
        wanted.setdefault(home, set()).add(name)
    return wanted


def _check_apart(kernels: Iterable[Picked], others: Iterable[Picked]) -> None:
    """Raises `Unsupported` for two functions of one name in one file."""
    one, other = (
        {n for part in parts for node in ast.parse(part.body).body for n in bound_names(node)}
        for parts in (kernels, others)
    )
    if both := sorted(one & other):
        raise errors.Unsupported(
            f"`{both[0]}` would be in one file both with and without a Triton kernel",
            hint="use one backend for all outputs that share a support folder, or leave out "
            "--support",
        )


def legend_of(docstring: str) -> dict[str, str]:
    """The meanings of the letters in a file's shapes; a letter means the same in every file."""
    found = re.search(r"^Shapes: (.*?)\.$", docstring, re.S | re.M)
    parts = [" ".join(part.split()) for part in found[1].split(",")] if found else []
    return {letter: meaning for letter, _, meaning in (part.partition(" ") for part in parts)}
