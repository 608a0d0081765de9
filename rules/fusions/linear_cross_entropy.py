"""The output layer and its cross entropy in one function, without the logits."""

import ast
from collections.abc import Mapping

from slapo_rewrite.code.text import accessor
from slapo_rewrite.fusion import (
    BY_KERNEL,
    SHIFTS,
    Alternative,
    Declined,
    Example,
    Fork,
    MultiSiteRewrite,
    Numerics,
    Refusal,
    Renamed,
    Rule,
    RuleMatch,
    fork_of,
    head_of,
    labels_of,
    loss_of,
)
from slapo_rewrite.patterns.replacement import text_of
from slapo_rewrite.patterns.search import CallSite
from slapo_rewrite.patterns.value_graph import Value, described
from slapo_rewrite.runtime.kernels.linear_cross_entropy import (
    causal_lm_linear_cross_entropy,
    linear_cross_entropy,
    masked_lm_linear_cross_entropy,
)

OURS = "slapo_rewrite.runtime.kernels.cross_entropy"
# The losses of transformers' models, also as replaced by the rule `cross_entropy`.
LOSSES = {
    "transformers.loss.loss_utils.ForCausalLMLoss": causal_lm_linear_cross_entropy,
    "transformers.loss.loss_utils.ForMaskedLMLoss": masked_lm_linear_cross_entropy,
    f"{OURS}.causal_lm_cross_entropy": causal_lm_linear_cross_entropy,
    f"{OURS}.masked_lm_cross_entropy": masked_lm_linear_cross_entropy,
}
OF_MODEL = "self.loss_function"
PLAIN = ("cross_entropy", f"{OURS}.cross_entropy")
# The first arguments of transformers' losses.
LOGITS_FIRST = ("logits", "labels", "vocab_size")
# Further arguments of a cross entropy: those that the kernel takes, and those that it does not.
OPTIONS: dict[str, object] = {"ignore_index": -100, "label_smoothing": 0.0, "upcast": False}
NOT_TAKEN: dict[str, object] = {
    "weight": None,
    "size_average": None,
    "reduce": None,
    "reduction": "mean",
}


def is_loss(_: str, call: CallSite) -> bool:
    return named(call.operation) in (*PLAIN, OF_MODEL, *LOSSES)


def named(operation: str) -> str:
    """The function of a loss; helpers that only the output imports have no module yet."""
    return operation.removeprefix("call ").replace("builtins.", f"{OURS}.")


WRITER = """\
from torch import nn
from torch.nn import functional as F


class Writer(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x, labels=None):
        x = self.norm(x)
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        return loss, logits
"""
ALONE = """\
from torch import nn
from torch.nn import functional as F


class Writer(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x, labels):
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
"""
GPT = WRITER.replace(
    """\
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
""",
    """\
        if labels is not None:
            # if we are given some desired targets also calculate the loss
            logits = self.head(x)
            loss = F.cross_entropy(
                logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1
            )
        else:
            logits = self.head(x[:, [-1], :])
            loss = None
""",
)
SCHEDULE = """\
import torch


def model(m):
    return m.Writer(8, 11)


def inputs(model):
    labels = torch.arange(12).view(2, 6) % 11
    labels[0, :2] = -100
    return {"x": torch.randn(2, 6, 8), "labels": labels}


def loss(outputs):
    return outputs[0]


def schedule(s):
    s.apply("linear_cross_entropy")
"""
ALONE_SCHEDULE = SCHEDULE.replace("outputs[0]", "outputs")
GPT_SCHEDULE = SCHEDULE.replace("-100", "-1")
SHIFTED = WRITER.replace(", bias=False", "").replace(
    """\
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
""",
    """\
        logits = self.head(x).contiguous()
        logits = 30.0 * F.tanh(logits / 30.0)
        if labels is None:
            return logits
        shifted = logits[..., :-1, :].contiguous()
        labels = labels[..., 1:].contiguous().to(shifted.device)
        loss = F.cross_entropy(shifted.view(-1, 11), labels.view(-1), label_smoothing=0.1)
""",
)
MADE, LOSS = "= self.head(x)\n", "labels.view(-1))\n"
SCALED = WRITER.replace(MADE, f"{MADE}        logits = logits * 0.5\n")
READ = WRITER.replace(LOSS, f"{LOSS}            right = logits.argmax(-1) == labels\n")
SUMMED = WRITER.replace(LOSS, 'labels.view(-1), reduction="sum")\n')
DEEP = WRITER.replace("nn.Linear(", "nn.Bilinear(width, ").replace(MADE, "= self.head(x, x)\n")
SHARD = '    s["head"].shard("weight", axis=0)\n'
LATE_SHARD = SCHEDULE + SHARD
EARLY_SHARD = SCHEDULE.replace("def schedule(s):\n", f"def schedule(s):\n{SHARD}")


class LinearCrossEntropy(Rule):
    """Compute the training loss without logits: output layer and cross entropy in one function.

    In training with labels the output layer is not called, and the logits that `forward` returns
    are None (a tuple returned by a model of transformers is shorter by one). In eval mode, and
    without labels, everything is as before. Since it changes the results of `forward`, the rule is
    only applied when asked for.

    It saves the memory of the logits and of their gradient, but its memory traffic is not less than
    that of the kernel of `cross_entropy`.

    The logits may pass through a soft cap, `bound * tanh(logits / bound)`, `.float()` and the shift
    of causal models. A layer that gets hooks or an adapter at run time is called as before; if no
    other code reads the logits, the layer is passed to the kernel for that. Its weight must not be
    sharded, nor any parameter tied to it.

    Rewrite:
        logits = self.head(x)
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        -->
        logits = (
            None
            if self.training and labels is not None and is_plain(self.head)
            else self.head(x)
        )
        if logits is None:
            loss = linear_cross_entropy(x, self.head.weight, labels)
        elif labels is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))

    Shapes: x (..., D), weight (V, D), labels (...) -> ()

    Numerics:
        Reassociated: the loss is computed in float32, from logits in the layer's dtype; the sums of
        the weight's gradient are in float32 as well.

    State: Unchanged.

    Raises:
        SR309 the logits are scaled, or needed for more than the loss; the layer is not a plain
        linear layer; class weights, another reduction, another loss; SR306 the layer is scheduled
        afterwards.

    Source: Wijmans et al. 2024, arXiv:2411.09009; Hsu et al. 2024, arXiv:2410.10989.
    """

    name = "linear_cross_entropy"
    numerics = Numerics.REASSOCIATED
    conditions = BY_KERNEL
    rank = 50
    alternatives = ()
    calls = (Alternative(is_loss),)
    functions = (linear_cross_entropy, *dict.fromkeys(LOSSES.values()))
    examples = (
        Example(
            WRITER,
            SCHEDULE,
            """\
+from .kernels import is_plain, linear_cross_entropy
-        logits = self.head(x)
+        logits = (
+            None
+            if self.training and labels is not None and is_plain(self.head)
+            else self.head(x)
+        )
-        if labels is not None:
+        if logits is None:
+            loss = linear_cross_entropy(x, self.head.weight, labels)
+        elif labels is not None:
""",
        ),
        Example(
            ALONE,
            ALONE_SCHEDULE,
            """\
-from torch.nn import functional as F
+from .kernels import linear_cross_entropy
-        logits = self.head(self.norm(x))
-        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
+        hidden = self.norm(x)
+        return linear_cross_entropy(hidden, self.head.weight, labels, layer=self.head)
""",
        ),
        Example(
            GPT,
            GPT_SCHEDULE,
            """\
+from .kernels import is_plain, linear_cross_entropy
-            logits = self.head(x)
-            loss = F.cross_entropy(
-                logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1
-            )
+            if self.training and is_plain(self.head):
+                logits = None
+                loss = linear_cross_entropy(
+                    x, self.head.weight, labels, ignore_index=-1
+                )
+            else:
+                logits = self.head(x)
+                loss = F.cross_entropy(
+                    logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1
+                )
""",
        ),
        Example(
            SHIFTED,
            SCHEDULE,
            """\
+from .kernels import is_plain, linear_cross_entropy
-        logits = self.head(x).contiguous()
-        logits = 30.0 * F.tanh(logits / 30.0)
+        if self.training and labels is not None and is_plain(self.head):
+            logits = None
+        else:
+            logits = self.head(x).contiguous()
+            logits = 30.0 * F.tanh(logits / 30.0)
-        shifted = logits[..., :-1, :].contiguous()
-        labels = labels[..., 1:].contiguous().to(shifted.device)
-        loss = F.cross_entropy(shifted.view(-1, 11), labels.view(-1), label_smoothing=0.1)
+        if logits is None:
+            loss = linear_cross_entropy(
+                x[..., :-1, :],
+                self.head.weight,
+                labels[..., 1:],
+                bias=self.head.bias,
+                softcap=30.0,
+                label_smoothing=0.1,
+            )
+        else:
+            shifted = logits[..., :-1, :].contiguous()
+            labels = labels[..., 1:].contiguous().to(shifted.device)
+            loss = F.cross_entropy(shifted.view(-1, 11), labels.view(-1), label_smoothing=0.1)
""",
        ),
    )
    refusals = (
        *(Refusal(model, SCHEDULE, "SR309") for model in (SCALED, READ, SUMMED, DEEP)),
        Refusal(WRITER, EARLY_SHARD, "SR309"),
        Refusal(WRITER, LATE_SHARD, "SR306"),
    )

    def refuses(self, found: RuleMatch) -> str | None:
        """Why the loss cannot be computed without the logits; None if it can."""
        try:
            written(found)
        except Declined as declined:
            return str(declined)
        return None

    def expression(self, found: RuleMatch) -> Renamed:
        """The call of the kernel, with all its arguments."""
        return written(found)

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """No operands: they are part of the call."""
        return {}

    def width(self, found: RuleMatch) -> int:
        """The vocabulary's size."""
        classes: int = found.attribute(fork(found).head.path).out_features
        return classes

    def spread(self, found: RuleMatch) -> MultiSiteRewrite | None:
        """The change of the code around the loss, for training and otherwise."""
        return fork(found)


def fork(found: RuleMatch) -> Fork:
    """The code around the loss that has to differ in training.

    Raises:
        Declined: The logits are needed, or do not come from an output layer.
    """
    loss = found.match.root
    plain = named(loss.operation) in PLAIN
    given = dict(loss.arguments)
    first, second = ("input", "target") if plain else LOGITS_FIRST[:2]
    logits, labels = given.get(first, given.get("0")), given.get(second, given.get("1"))
    if logits is None or labels is None:
        raise Declined("the loss is not given logits and labels")
    head, targets = head_of(found, logits, rows=plain), labels_of(labels)
    if targets.shift not in SHIFTS.get(head.shift, ("",)) or (head.shift and not plain):
        raise Declined("logits and labels are not shifted alike")
    return fork_of(found, head, loss, targets)


def written(found: RuleMatch) -> Renamed:
    """The call that computes the loss.

    Raises:
        Declined: The loss is another one.
    """
    loss, kernel = found.match.root, linear_cross_entropy
    operation = named(loss.operation)
    if operation not in PLAIN:
        name = loss_of(found) if operation == OF_MODEL else operation
        if name not in LOSSES:
            short = name.rpartition(".")[2]
            raise Declined(f"`self.loss_function` is `{short}`, no cross entropy over a vocabulary")
        kernel = LOSSES[name]
    parted = fork(found)
    layer = accessor(parted.head.path)
    hidden = f"{parted.hidden}[{parted.head.shift}]" if parted.head.shift else parted.hidden
    given = [hidden, f"{layer}.weight", parted.labels]
    if found.attribute(f"{parted.head.path}.bias") is not None:
        given.append(f"bias={layer}.bias")
    if parted.alone:
        given.append(f"layer={layer}")
    if parted.head.softcap is not None:
        given.append(f"softcap={text_of(parted.head.softcap)}")
    more = options(loss) if operation in PLAIN else others(found, parted)
    if operation in PLAIN and parted.head.upcast and "upcast=True" not in more:
        more.append("upcast=True")
    arguments = ", ".join([*given, *more])
    return Renamed.of(kernel, f"({arguments})")


def options(loss: Value) -> list[str]:
    """The keywords of a cross entropy that differ from the kernel's defaults."""
    given = dict(loss.arguments)
    found = []
    for name, value in [*given.items()][2:]:
        known = OPTIONS if name in OPTIONS else NOT_TAKEN
        if value.operation == "constant" and name in known and value.literal == known[name]:
            continue
        if known is NOT_TAKEN:
            raise Declined(f"the loss is given `{name}`, which the kernel does not take")
        if not value.is_leaf:
            raise Declined(f"`{name}` of the loss is {described(value)}")
        found.append(f"{name}={text_of(value)}")
    return found


def others(found: RuleMatch, parted: Fork) -> list[str]:
    """The further arguments of a transformers loss: not logits, labels or vocabulary size."""
    call, file = parted.loss, found.match.file
    if len(call.args) > len(LOGITS_FIRST) or any(isinstance(a, ast.Starred) for a in call.args):
        raise Declined("the loss is given more than logits, labels and a size by position")
    size = dict(found.match.root.arguments)
    size_given = size.get("vocab_size", size.get("2"))
    if size_given is None or not parted.head.is_size(size_given, found):
        raise Declined(f"the loss takes rows of another size than `{parted.head.path}` gives")
    kept = [k for k in call.keywords if k.arg not in LOGITS_FIRST]
    for node in (n for k in kept for n in ast.walk(k.value) if isinstance(n, ast.Name)):
        if not parted.holds_as_well(node):
            raise Declined(f"`{node.id}` holds something else where the ways part")
    return [file.segment(k) for k in kept]
