"""Cross entropy over a vocabulary in one kernel."""

import ast
import itertools
from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional as F

from slapo_rewrite.code.build import parenthesised
from slapo_rewrite.fusion import (
    BY_KERNEL,
    Alternative,
    Calling,
    Example,
    Numerics,
    Refusal,
    Renamed,
    Rule,
    RuleMatch,
    last_axis,
    loss_of,
)
from slapo_rewrite.patterns.search import CallSite
from slapo_rewrite.runtime.kernels.cross_entropy import (
    causal_lm_cross_entropy,
    cross_entropy,
    masked_lm_cross_entropy,
)


def viewed(logits: Tensor, size: int) -> Tensor:
    return logits.view(-1, size)


def reshaped(logits: Tensor, size: int) -> Tensor:
    return logits.reshape(-1, size)


def viewed_labels(labels: Tensor) -> Tensor:
    return labels.view(-1)


def reshaped_labels(labels: Tensor) -> Tensor:
    return labels.reshape(-1)


Rows, Labels = Callable[[Tensor, int], Tensor], Callable[[Tensor], Tensor]


def losses(rows: Rows, flat: Labels) -> list[Callable[..., Tensor]]:
    def plain(
        logits: Tensor, size: int, labels: Tensor, ignore_index: int, label_smoothing: float
    ) -> Tensor:
        return F.cross_entropy(
            rows(logits, size),
            flat(labels),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )

    def of_float32(
        logits: Tensor, size: int, labels: Tensor, ignore_index: int, label_smoothing: float
    ) -> Tensor:
        return F.cross_entropy(
            rows(logits.float(), size),
            flat(labels),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )

    def of_rows_in_float32(
        logits: Tensor, size: int, labels: Tensor, ignore_index: int, label_smoothing: float
    ) -> Tensor:
        return F.cross_entropy(
            rows(logits, size).float(),
            flat(labels),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )

    return [of_float32, of_rows_in_float32, plain]


# The source text that turns logits and labels into rows.
ROWS: dict[Rows, str] = {viewed: "{}.view(-1, {})", reshaped: "{}.reshape(-1, {})"}
FLAT: dict[Labels, str] = {viewed_labels: "{}.view(-1)", reshaped_labels: "{}.reshape(-1)"}
PATTERNS = {
    pattern: (ROWS[rows], FLAT[flat])
    for rows, flat in itertools.product(ROWS, FLAT)
    for pattern in losses(rows, flat)
}
# The patterns that cast logits to float32, so that the loss has this dtype.
UPCAST = {pattern for pattern in PATTERNS if pattern.__name__ != "plain"}
# Arguments that are left out if they are the kernel's defaults.
DEFAULTS = {"ignore_index": "-100", "label_smoothing": "0.0"}
# Losses of transformers that models get by their configuration.
OF_TRANSFORMERS = {
    "transformers.loss.loss_utils.ForCausalLMLoss": causal_lm_cross_entropy,
    "transformers.loss.loss_utils.ForMaskedLMLoss": masked_lm_cross_entropy,
}


def is_loss_function(_: str, call: CallSite) -> bool:
    return call.operation == "self.loss_function"


MODEL = """\
from torch import nn
from torch.nn import CrossEntropyLoss


class Tagger(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.head = nn.Linear(width, classes)

    def forward(self, x, labels=None):
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss_fct = CrossEntropyLoss()
            loss = loss_fct(logits.view(-1, logits.size(-1)), labels.view(-1))
        return loss, logits
"""
OF_A_FAMILY = """\
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss


class Writer(nn.Module):
    def __init__(self, width, vocab_size):
        super().__init__()
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.vocab_size = vocab_size

    @property
    def loss_function(self):
        return ForCausalLMLoss

    def forward(self, x, labels=None, **kwargs):
        logits = self.lm_head(x)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return loss, logits
"""
SCHEDULE = """\
import torch


def model(m):
    return m.Tagger(8, 11)


def inputs(model):
    labels = torch.arange(12).view(2, 6) % 11
    labels[0, :2] = -100
    return {"x": torch.randn(2, 6, 8), "labels": labels}


def loss(outputs):
    return outputs[0]


def schedule(s):
    s.apply("cross_entropy")
"""


class CrossEntropy(Rule):
    """Compute the cross entropy of a vocabulary in one kernel, forward and backward.

    If the loss is transformers' `loss_function` of a family of models, its call is replaced, and
    still takes `num_items_in_batch`, `ignore_index` and `shift_labels`. A loss that is set on the
    model later, `model.loss_function = ...`, is then not called. If the head is sharded later and
    its logits stay sharded, the vocabulary-parallel loss replaces the kernel.

    Rewrite:
        loss_fct = CrossEntropyLoss()
        loss = loss_fct(logits.view(-1, logits.size(-1)), labels.view(-1))
        -->
        loss = cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))

    Shapes: logits (M, V), labels (M,) -> ()

    Numerics:
        Reassociated: float32 inside, and no float32 copy of the logits. The loss has the dtype that
        it had.

    State: Unchanged.

    Raises:
        SR309 class weights, another reduction, logits whose classes are not on the last axis, or a
        `loss_function` that is another loss.

    Source: Milakov & Gimelshein 2018, arXiv:1805.02867.
    """

    name = "cross_entropy"
    numerics = Numerics.REASSOCIATED
    conditions = BY_KERNEL
    pays = "reads the logits twice, and makes no copy of them in float32"
    rank = 40
    alternatives = tuple(map(Alternative, PATTERNS))
    calls = (Alternative(is_loss_function),)
    functions = (cross_entropy, *OF_TRANSFORMERS.values())
    examples = (
        Example(
            MODEL,
            SCHEDULE,
            """\
-from torch.nn import CrossEntropyLoss
+from .kernels import cross_entropy
-            loss_fct = CrossEntropyLoss()
-            loss = loss_fct(logits.view(-1, logits.size(-1)), labels.view(-1))
+            loss = cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
""",
        ),
        Example(
            MODEL.replace(
                "CrossEntropyLoss()", "CrossEntropyLoss(ignore_index=-1, label_smoothing=0.1)"
            ),
            SCHEDULE.replace("-100", "-1"),
            """\
-from torch.nn import CrossEntropyLoss
+from .kernels import cross_entropy
-            loss_fct = CrossEntropyLoss(ignore_index=-1, label_smoothing=0.1)
-            loss = loss_fct(logits.view(-1, logits.size(-1)), labels.view(-1))
+            loss = cross_entropy(
+                logits.view(-1, logits.size(-1)),
+                labels.view(-1),
+                ignore_index=-1,
+                label_smoothing=0.1,
+            )
""",
        ),
    )
    refusals = (
        Refusal(MODEL.replace("Loss()", 'Loss(reduction="sum")'), SCHEDULE, "SR309"),
        Refusal(
            MODEL.replace("Loss()", "Loss(torch.ones(11))").replace(
                "from torch", "import torch\nfrom torch", 1
            ),
            SCHEDULE,
            "SR309",
        ),
        # The classes are on the second axis; labels may be probabilities.
        Refusal(
            MODEL.replace("logits.view(-1, logits.size(-1))", "logits.transpose(1, 2)").replace(
                "labels.view(-1)", "labels"
            ),
            SCHEDULE,
            "SR309",
        ),
        Refusal(MODEL.replace("labels.view(-1)", "labels"), SCHEDULE, "SR309"),
        Refusal(
            OF_A_FAMILY.replace("ForCausalLMLoss", "ForTokenClassification"),
            SCHEDULE.replace("Tagger", "Writer"),
            "SR309",
        ),
    )

    def refuses(self, found: RuleMatch) -> str | None:
        """Refuses a model whose own loss is another one."""
        if found.alternative not in self.calls or loss_of(found) in OF_TRANSFORMERS:
            return None
        name = loss_of(found).rpartition(".")[2]
        return f"`self.loss_function` is `{name}`, which is no cross entropy over a vocabulary"

    def expression(self, found: RuleMatch) -> Calling | Renamed | None:
        """The call of the kernel; for transformers' losses with the call's own arguments."""
        if found.alternative in self.calls:
            call = found.match.root.node
            assert isinstance(call, ast.Call)
            file = found.match.file
            arguments = file.text[file.span(call.func)[1] : file.span(call)[1]]
            return Renamed.of(OF_TRANSFORMERS[loss_of(found)], arguments)
        given = found.operands
        more = tuple(n for n, default in DEFAULTS.items() if given[n] != default)
        more += ("upcast",) if found.alternative.pattern in UPCAST else ()
        return Calling.of(cross_entropy, ("logits", "labels"), more, self.operands(found))

    def width(self, found: RuleMatch) -> int | None:
        """The vocabulary's size for a model's own loss, whose pattern has no operands."""
        if found.alternative not in self.calls:
            return None
        given = dict(found.match.root.arguments)
        logits = given.get("logits", given.get("0"))
        return last_axis(logits, found) if logits is not None else None

    def operands(self, found: RuleMatch) -> Mapping[str, str]:
        """The source texts of logits and labels as rows."""
        if found.alternative in self.calls:
            return {}
        given, (rows, flat) = dict(found.operands), PATTERNS[found.alternative.pattern]
        given["logits"] = rows.format(parenthesised(given["logits"]), given["size"])
        given["labels"] = flat.format(parenthesised(given["labels"]))
        return given | {"upcast": "True"}
