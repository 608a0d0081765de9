"""Writes the text of a derived schedule file, in the style of one written by hand."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from slapo_rewrite import __version__
from slapo_rewrite.auto.shard_groups import GATHER, Found, Group
from slapo_rewrite.code.text import with_wildcards
from slapo_rewrite.groups import grouped

LINE_LENGTH = 100
NONE_PAYS = (
    "At these sizes collectives take longer than splitting saves: split only to save memory, or "
    "for a larger model of this kind."
)

_HEADER = """
Derived from the model by slapo-rewrite {version}: which layers can be split, and how long their
collectives take, for one layer of each kind. `slapo-rewrite explain` shows the collectives that
`infer_sync` adds. This is an ordinary schedule: edit it, and use it with `--schedule FILE`.
"""


def schedule_text(
    title: str,
    head: str,
    found: Found,
    lists: Mapping[str, str],
    uncounted: Collection[str],
    cuts: bool,
    why: str,
) -> str:
    """The whole text of the file.

    Args:
        title: The model's title.
        head: The functions other than `schedule`.
        found: The layers that are split.
        lists: The paths of the lists whose elements can be checkpointed, with the selector of the
            modules in an element.
        uncounted: Those lists of which all elements are checkpointed, or none.
        cuts: Whether the model can be cut into stages.
        why: The comment if there are no lists.
    """
    head, quotes = head.lstrip(), '"' * 3
    header = ""
    if not head.startswith((quotes, "'" * 3)):
        header = f"{quotes}{title}.\n{_HEADER.format(version=__version__)}{quotes}\n\n"
    knobs = ["s"]
    has_loss = any(group.head for group in found.groups)
    if found.groups:
        knobs.append("tensor_parallel: bool = True")
    if has_loss:
        knobs.append("parallel_loss: bool = True")
    if lists:
        knobs.append("ckpt_ratio: float = 0.0")
    step = _budget_step(head, lists, uncounted, bool(found.groups))
    knobs += [f"{name}: {default}" for name, default in step.items()]
    knobs += ["fuse: bool = False", 'autocast: str = ""']
    if cuts:
        knobs += ["pipeline_stages: int = 1", 'pipeline_engine: str = "deepspeed"']
    body = _docstring(found, bool(lists), step, cuts, has_loss)
    main = next(iter(lists)) if len(lists) == 1 else None
    body += ["if fuse:", "    s.apply_all()"]
    if main is not None:
        body.append(f'layers = s["{main}"]')
    if found.groups:
        body.append("if tensor_parallel:")
        none_pays = not any(group.pays for group in found.groups)
        if none_pays:
            body += [*(f"    {line}" for line in _comment(NONE_PAYS, LINE_LENGTH - 8)), ""]
        for group in _together(found.groups):
            body += [f"    {line}" for line in _written(group, main, none_pays)]
        body += [f"    {line}" for line in _left(found)]
        body.append("    s.infer_sync()")
    else:
        body += [*_left(found)]
    # Before `checkpoint`, so that a memory budget takes the casts into account.
    body += ["if autocast:", "    s.autocast(autocast)"]
    shares = [
        f"{_selected(path, main)}[:ckpt_ratio]{parts}.checkpoint()"
        for path, parts in lists.items()
        if path not in uncounted
    ]
    if step:
        given = ", ".join(["budget=memory", *(f"{name}={name}" for name in list(step)[1:])])
        given += ', precision="fp32" if autocast else "bf16"'  # of weights, which have no casts
        shares = [
            *("if memory:", f'    layers["*"].checkpoint({given})'),
            *("else:", f"    {shares[0]}"),
        ]
    body += shares
    if uncounted:
        body.append("if ckpt_ratio >= 0.5:  # what makes these does not count them: all, or none")
        body += [
            f"    {_selected(path, main)}[:]{parts}.checkpoint()"
            for path, parts in lists.items()
            if path in uncounted
        ]
    if not lists:
        body += _comment(why)
    if cuts:
        body += [
            "if pipeline_stages != 1:",
            "    s.cut_evenly(pipeline_stages, target=pipeline_engine)",
        ]
    function = f"def schedule({', '.join(knobs)}):\n" + textwrap.indent("\n".join(body), "    ")
    import black

    text = f"{header}{head.rstrip()}\n\n\n{function}\n"
    return black.format_str(text, mode=black.Mode(line_length=LINE_LENGTH))


def _budget_step(
    head: str, lists: Mapping[str, str], uncounted: Collection[str], is_split: bool
) -> dict[str, str]:
    """The parameters for a memory budget and for the step that has to fit, with defaults.

    Empty unless there is exactly one list, of single layers, to choose from.
    """
    if len(lists) != 1 or uncounted or any(lists.values()):
        return {}
    # With `inputs` in the file, these determine the sequence length.
    length = {} if "\ndef inputs(" in head else {"sequence": "int = 512"}
    shared = {"ranks": "int = 1"} if is_split else {}
    return {"memory": 'str = ""', "batch": "int = 8", **length, **shared}


def _docstring(
    found: Found, has_lists: bool, step: Collection[str], cuts: bool, has_loss: bool
) -> list[str]:
    does = []
    if found.groups:
        does.append("splits the layers")
    if has_lists:
        does.append("checkpoints the first `ckpt_ratio` of them")
    first = (" and ".join(does) or "leaves the model as it is").capitalize()
    lines = [f'"""{first}.', ""]
    if has_loss:
        lines += textwrap.wrap(
            "With `parallel_loss` the logits stay split where training computes a loss of them, "
            "and only the loss is summed; without it they are gathered on every rank.",
            LINE_LENGTH - 4,
        )
    if step:
        rows = "`batch` rows" + " of `sequence` tokens" * ("sequence" in step)
        held = "each of `ranks` GPUs that share layers" if "ranks" in step else "a GPU"
        lines += textwrap.wrap(
            'With `memory` (such as "40GiB") the layers to recompute are chosen so that a step of '
            f"{rows} fits on {held}, in the least time; `ckpt_ratio` is then ignored.",
            LINE_LENGTH - 4,
        )
    lines.append("With `fuse` every rule that pays is applied first, before layers are split.")
    lines.append('With `autocast` "bfloat16" or "float16" products are in half precision.')
    if cuts:
        lines += textwrap.wrap(
            "With `pipeline_stages` above 1 the output has a `pipeline.py` with this number of "
            'stages, for DeepSpeed, or with `pipeline_engine` "torch" for '
            "`torch.distributed.pipelining`.",
            LINE_LENGTH - 4,
        )
    return [*lines, '"""']


def _selected(path: str, main: str | None) -> str:
    """The selection of a path, relative to `layers` if it is in that list."""
    if path == main:
        return "layers"
    if main is not None and path.startswith(f"{main}."):
        return f'layers["{path.removeprefix(f"{main}.")}"]'
    return f's["{path}"]'


def _together(groups: Iterable[Group]) -> Iterator[Group]:
    """The groups, merged if they differ only in numbers in their paths."""
    alike: dict[object, list[Group]] = {}
    for group in groups:
        shards = tuple((with_wildcards(s.pattern), s.arguments()) for s in group.shards)
        syncs = (tuple(map(with_wildcards, paths)) for paths in (group.results, group.summed))
        said = (group.rows, group.is_experts, group.pays, group.head, group.gathered)
        alike.setdefault((shards, *syncs, said), []).append(group)
    for same in alike.values():
        by_place = zip(*(group.shards for group in same), strict=True)
        yield replace(
            same[0],
            shards=tuple(itertools.chain(*by_place)),
            summed=tuple(path for group in same for path in group.summed),
            results=tuple(path for group in same for path in group.results),
            parameters=sum(group.parameters for group in same),
        )


def _written(group: Group, main: str | None, none_pays: bool) -> list[str]:
    """The lines of a group, one for all modules that are split alike."""
    slow = "" if group.pays or none_pays else " It takes longer than it saves: only for memory."
    lines = _comment(_reason(group) + slow, LINE_LENGTH - 8)
    alike = grouped((shard.arguments(), shard.pattern) for shard in group.shards)
    for arguments, patterns in alike.items():
        lines += [f"{_selected(path, main)}.shard({arguments})" for path in _joined(patterns)]
    for sync, paths in (
        ('"fwd_post", "all_reduce"', group.results),
        ('"bwd_post", "all_reduce"', group.summed),
        (GATHER, group.patterns if group.gathered else ()),
    ):
        lines += [f"{_selected(path, main)}.sync({sync})" for path in _joined(paths)]
    if group.head is not None:
        at = _selected(group.head, main)
        lines += ["if parallel_loss:", f'    {at}.sync("bwd_post", "all_reduce")']
    return lines


def _reason(group: Group) -> str:
    size = f"{_spoken(group.parameters)} parameters"
    if group.rows:
        return f"{size}: each rank has the same number of {group.rows}."
    if group.is_experts:
        more = len({*group.patterns}) > 1 and not {*group.results} <= {*group.patterns}
        beside = " and of the layers beside them, and their results are summed once" if more else ""
        return f"{size}: each rank has a part of every expert{beside}."
    roles = grouped((shard.pattern, shard.arguments()) for shard in group.shards)
    if len({*map(tuple, roles.values())}) == 1:
        return f"{size}: their results are joined."
    return f"{size}: split by outputs, then by inputs, and the results are summed."


def _spoken(number: int) -> str:
    for name, size in (("billion", 10**9), ("million", 10**6), ("thousand", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return str(number)


def _left(found: Found) -> list[str]:
    """A comment on layers that are not split."""
    by_reason = grouped((reason, pattern) for pattern, reason in found.whole.items())
    lines: list[str] = []
    for reason, patterns in by_reason.items():
        said = ", ".join(f"`{path}`" for path in _joined(patterns))
        lines += _comment(f"Left whole: {said}: {reason}.", LINE_LENGTH - 8)
    return lines


def _joined(paths: Iterable[str]) -> list[str]:
    """The same modules in fewer patterns: `{q,k}` merges paths that differ in one name."""
    found = [path.split(".") for path in paths]
    for place in range(-1, -1 - max(map(len, found), default=0), -1):
        alike: dict[tuple[str, ...], list[list[str]]] = {}
        for path in found:
            others = (*path[:place], "", *path[len(path) + place + 1 :])
            alike.setdefault(others if len(path) >= -place else tuple(path), []).append(path)
        found = []
        for same in alike.values():
            first = same[0]
            if len(same) > 1:
                names = [path[place] for path in same]
                if all(map(str.isdigit, names)):
                    names.sort(key=int)
                first = [*first[:place], f"{{{','.join(names)}}}", *first[len(first) + place + 1 :]]
            found.append(first)
    return [".".join(path) for path in found]


def _comment(text: str, width: int = LINE_LENGTH - 4) -> list[str]:
    wrapper = textwrap.TextWrapper(
        width,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(" ".join(text.split()))


def shared(lists: Iterable[str]) -> list[str]:
    """The lists that are not inside another list."""
    known = list(lists)
    return [p for p in known if not any(p.startswith(f"{other}.") for other in known)]
