"""`cut_evenly`: cuts a model into pipeline stages of about the same size."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby, pairwise, zip_longest

from slapo_rewrite import errors
from slapo_rewrite.changes.state import ModuleRequests
from slapo_rewrite.examples import Sample
from slapo_rewrite.model.small_model import training_inputs
from slapo_rewrite.model.tree import Node
from slapo_rewrite.primitives.base import Call, Chosen
from slapo_rewrite.primitives.cut_pipeline_stage import MODEL, SAMPLE, STACK, CutPipelineStage
from slapo_rewrite.simulate.balance import stage_ends
from slapo_rewrite.simulate.hardware import hardware, step_seconds

MEASURES = ("cost", "layers", "parameters")


class CutEvenly(CutPipelineStage):
    """Cut a model into `n` pipeline stages, between its layers, as `cut_pipeline_stage` does.

    Layers are the elements of module lists, or else of `nn.Sequential`, as far as a training step
    calls them. If some are more than twice as large as others, or there are too few, lists inside
    of layers are divided as well, such as the blocks of a Swin's stages. With `by="parameters"`,
    the default, the largest stage is as small as possible; modules before the layers, such as
    embeddings, count with the first layer, and modules after them with the last. With
    `by="layers"` all layers count the same.

    With `by="cost"` the time of the slowest stage is minimised, forward and backward, as predicted
    for the arguments that the schedule's `inputs` returns, on one GPU of the type h200 in
    `simulate/hardware.toml`. An embedding then costs almost nothing, and a head much: it can be a
    stage by itself, after the last layer.

    If a cut between layers is not possible, it is moved after another module which divides the
    parameters as evenly as possible; a warning says where and why.

    `target` is the library that runs the stages: `"deepspeed"`, or `"torch"`
    (`torch.distributed.pipelining`).

    Rewrite:
        s.cut_evenly(2)
        -->
        s["layers"][1].cut_pipeline_stage()

        s.cut_evenly(2, by="cost")  # where the head costs more than the layers
        -->
        s["layers"][3].cut_pipeline_stage()

        s.cut_evenly(2, target="torch")
        -->
        s["layers"][1].cut_pipeline_stage(target="torch")

    Shapes: Unchanged.
    Numerics: Exact.
    State: As with `cut_pipeline_stage`.

    Raises:
        SR206 more stages than the layers allow, or an unknown measure; SR305 a model whose costs
        cannot be counted; errors of `cut_pipeline_stage`.

    Source: Slapo, arXiv 2302.08005, section 3.3.3.
    """

    name = "cut_evenly"
    examples = (
        SAMPLE.example("s.cut_evenly(2)"),
        Sample(
            STACK.replace("(width, 1)", "(width, 9 * width)"),
            MODEL.replace("torch.randn(2, 1)", "torch.randn(2, 72)"),
        ).example('s.cut_evenly(2, by="cost")'),
        SAMPLE.example('s.cut_evenly(2, target="torch")'),
    )
    refusals = (
        SAMPLE.refused("SR206", "s.cut_evenly(5)"),
        SAMPLE.refused("SR206", 's.cut_evenly(2, by="size")'),
        SAMPLE.refused("SR206", 's.cut_evenly(6, by="cost")'),
        SAMPLE.refused("SR206", 's.cut_evenly(2, target="tf")'),
        Sample(STACK, MODEL.partition("def inputs")[0]).refused(
            "SR305", 's.cut_evenly(2, by="cost")'
        ),
        SAMPLE.refused("SR306", 's["layers"][1].cut_pipeline_stage()', "s.cut_evenly(2)"),
    )

    @staticmethod
    def takes(  # type: ignore[override]
        n: int, by: str = "parameters", target: str = "deepspeed"
    ) -> None:
        """`cut_evenly(n, by="parameters", target="deepspeed")`."""

    def apply(self, call: Call, node: Node, state: ModuleRequests) -> ModuleRequests:
        """Marks the layer."""
        found = super().apply(call, node, state)
        assert found.cut is not None
        may_move = call.arguments["n"] == 2
        return replace(found, cut=replace(found.cut, may_move=may_move, instead=call.instead))

    def choose(self, call: Call, nodes: list[Node]) -> Chosen:
        """The last layer of each stage except the last stage.

        Layers that contain lists of layers are divided as well if there are too few layers, or some
        are more than twice as large as others.
        """
        n, by = call.arguments["n"], call.arguments["by"]
        if by not in MEASURES:
            raise errors.BadArgument(
                f"`by` is {' or '.join(MEASURES)}, not {by!r}",
                hint=errors.did_you_mean(str(by), MEASURES),
            )
        layers = [layer for node in nodes for layer in layers_in(node, "ModuleList")]
        layers = layers or [layer for node in nodes for layer in layers_in(node, "Sequential")]
        if not layers:
            raise errors.BadArgument(
                "there are no layers to cut between: the model has no nn.ModuleList, and no "
                "nn.Sequential",
                hint="cut_pipeline_stage() ends a stage after any module that `forward` calls",
            )
        ways = [measured(call, by, layers)]
        inner = [each for layer in layers for each in layers_inside(layer)]
        if len(inner) > len(layers) and (n > len(ways[0][1]) or are_unlike(layers)):
            once = called_layers(call, inner, once=True)
            ways += [measured(call, by, once)] if len(once) == len(inner) else []
        _, layers, sizes = max((len(sizes), layers, sizes) for layers, sizes in ways)
        if not 2 <= n <= len(sizes):
            raise errors.BadArgument(
                f"{len(layers)} layers cannot be cut into {n!r} stages",
                hint=f"2 to {len(sizes)} stages are possible" if len(sizes) > 1 else None,
            )
        ends = [
            [layers[end - 1] for end in stage_ends(sizes, n)[:-1]]
            for layers, sizes in ways
            if n <= len(sizes)
        ]
        outer = tuple(layer.path for layer in ends[0]) if len(ends) > 1 else ()
        return Chosen(ends[-1], instead=outer)


def layers_in(node: Node, kind: str) -> list[Node]:
    """The elements of the outermost containers of a kind."""
    return [layer for each in lists_in(node, kind) for layer in each.children.values()]


def lists_in(node: Node, *kinds: str) -> list[Node]:
    """The outermost containers of some kinds."""
    if node.cls.__name__ in kinds:
        return [node]
    return [each for child in node.children.values() for each in lists_in(child, *kinds)]


def layers_inside(layer: Node) -> list[Node]:
    """The layers in a layer's own lists of one class, as a ConvNeXt's blocks; or the layer."""
    lists = [[*each.children.values()] for each in lists_in(layer, "ModuleList", "Sequential")]
    alike = [inner for inner in lists if len({each.cls for each in inner}) == 1]
    found = [layers_inside(each) for inner in alike for each in inner]
    return [each for several in found for each in several] or [layer]


def are_unlike(layers: list[Node]) -> bool:
    """Whether some layers are more than twice as large as others."""
    sizes = [sum(p.numel() for p in layer.live.parameters()) for layer in layers]
    return max(sizes) > 2 * min(sizes)


def measured(call: Call, by: str, layers: list[Node]) -> tuple[list[Node], list[float]]:
    """The layers after which a stage may end, with the sizes of the parts that end there."""
    if by == "cost":
        return timed(call, layers)
    idle: list[Node] = []
    if len({*map(list_of, layers)}) > 1 or len(layers) == 1:
        called = called_layers(call, layers)
        idle = [layer for layer in layers if layer not in called]
        layers = ends_of_rounds(called)
    if by == "layers":
        return layers, [1.0] * len(layers)
    return layers, sizes_of(call.tree.root, layers, idle)


def called_layers(call: Call, layers: list[Node], once: bool = False) -> list[Node]:
    """The layers that a training step calls, in order: an image tower may not be called.

    Returns all if the model does not run on the meta device; impossible cuts are refused later.
    """
    from slapo_rewrite.model.costs import calls_of  # imports triton

    model = call.tree.root.live
    inner = {layer.path: layer for layer in layers}
    if not once:  # if a layer is a list, its elements are called
        watched = ((node, layer) for layer in layers for node in layer.walk())
        inner = {node.path: layer for node, layer in watched if not node.is_container}
    modules = {path: model.get_submodule(path) for path in inner}
    try:
        called = calls_of(model, training_inputs(call.schedule, model), modules)
    except Exception:  # the model's own code, and the schedule's
        return [] if once else layers
    counts = Counter(called)
    if once:
        return [inner[path] for path in called if counts[path] == 1]
    if len(layers) == 1 and (times := counts[layers[0].path]) > 1:
        raise errors.BadArgument(
            f"`{layers[0].path}` is the only layer, called {times} times: every stage would have "
            "to hold and tie its weights",
            hint="remove the cuts, or use layers with separate weights",
        )
    first = {inner[path].path: inner[path] for path in counts}
    return [*first.values()]


def ends_of_rounds(layers: list[Node]) -> list[Node]:
    """The layers after which a loop's iteration may end; it may be over several lists at once."""
    turns = Counter(listed for listed, _ in groupby(map(list_of, layers)))
    return [
        layer
        for layer, following in zip_longest(layers, layers[1:])
        if turns[list_of(layer)] == 1 or following is None or following.name != layer.name
    ]


def list_of(layer: Node) -> str:
    """The path of the list that a layer is in."""
    return layer.path.rpartition(".")[0]


def sizes_of(root: Node, layers: list[Node], idle: list[Node]) -> list[float]:
    """The number of parameters of each layer, with those of the modules before or after it.

    Parameters of idle layers, which no stage needs, count with the last.
    """
    inside = {inner.path for layer in [*layers, *idle] for inner in layer.walk()}
    first = {layer.path: number for number, layer in enumerate(layers)}
    found = [{id(p): p.numel() for p in layer.live.parameters()} for layer in layers]
    following = 0
    for node in root.walk():
        if node.path in first:
            following = min(first[node.path] + 1, len(layers) - 1)
        elif node.path not in inside:  # a tied parameter counts once in a stage
            found[following] |= {id(p): p.numel() for p in node.parameters.values()}
    found[-1] |= {id(p): p.numel() for layer in idle for p in layer.live.parameters()}
    return [sum(sizes.values()) for sizes in found]


def timed(call: Call, layers: list[Node]) -> tuple[list[Node], list[float]]:
    """The layers that the model calls once, in order, and the time of each.

    The times are seconds, each including calls since the previous layer; then the seconds of calls
    after the last layer, if there are any.
    """
    from slapo_rewrite.model.costs import costs_of, elements_of  # imports triton

    model, found = call.tree.root.live, {layer.path: layer for layer in layers}
    try:
        inputs = training_inputs(call.schedule, model)
        paths = elements_of(model, inputs)
        seconds = step_seconds(costs_of(model, inputs, paths), hardware("h200").device)
    except Exception as error:  # the model's own code, and the schedule's
        raise errors.Unsupported(
            f"the cost of the layers cannot be counted: {errors.first_line(error)}",
            hint='by="parameters" needs no run of the model',
        ) from error
    ends = [number for number, path in enumerate(paths, 1) if path in found]
    bounds = pairwise(dict.fromkeys([0, *ends, len(paths)]))
    return [found[paths[end - 1]] for end in ends], [sum(seconds[a:b]) for a, b in bounds]
