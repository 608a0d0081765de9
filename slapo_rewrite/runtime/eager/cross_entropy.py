"""Cross entropy over a vocabulary in PyTorch's operations.

Shapes: V classes.
"""

from typing import Any

from torch import Tensor

from slapo_rewrite.runtime.kernels.cross_entropy import cross_entropy_reference, shifted


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    num_items: Tensor | float | None = None,
    in_place: bool = False,
    upcast: bool = False,
) -> Tensor:
    """Cross entropy, computed in float32, of logits of any dtype.

    Shapes: logits (..., V), labels (...) of as many rows -> ().

    Args:
        logits: Before any softmax.
        labels: Class indices.
        ignore_index: A label that does not count.
        label_smoothing: The share of a target that is spread over all classes.
        softcap: If given, logits become softcap * tanh(logits / softcap).
        num_items: The divisor of the sum of losses; by default the number of labels
            that count.
        in_place: A kernel may write over the logits; here it changes nothing.
        upcast: Return a loss in float32, as for logits that are cast first; else it has
            the logits' dtype, or float32 under autocast.
    """
    options = (ignore_index, label_smoothing, softcap)
    return cross_entropy_reference(logits, labels, options, num_items, upcast)


def masked_lm_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """The loss of transformers' `ForMaskedLMLoss`.

    Args:
        logits: (B, T, V).
        labels: (B, T).
        vocab_size: V.
        num_items_in_batch: The divisor of the sum, if gradients are accumulated over
            several batches; by default the number of labels that count here.
        ignore_index: The label of predictions that do not count.
    """
    return cross_entropy(
        logits.reshape(-1, vocab_size),
        labels,
        ignore_index=ignore_index,
        num_items=num_items_in_batch,
        upcast=True,
    )


def causal_lm_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The loss of transformers' `ForCausalLMLoss`.

    Args:
        logits: (B, T, V).
        labels: (B, T), not shifted: each token predicts the next one.
        vocab_size: V.
        num_items_in_batch: As in `masked_lm_cross_entropy`.
        ignore_index: The label of predictions that do not count.
        shift_labels: The labels, already shifted to their predictions, if given.
    """
    if shift_labels is None:
        shift_labels = shifted(labels, ignore_index)
    return masked_lm_cross_entropy(
        logits, shift_labels, vocab_size, num_items_in_batch, ignore_index
    )
