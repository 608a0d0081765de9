"""Output layer and cross entropy in PyTorch's operations.

Shapes: D features, V classes.
"""

from typing import Any

from torch import Tensor, nn

from slapo_rewrite.runtime.kernels.cross_entropy import cross_entropy_reference, shifted


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    layer: nn.Module | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    num_items: Tensor | float | None = None,
    upcast: bool = False,
) -> Tensor:
    """Cross entropy of `linear(hidden, weight, bias)`, which is kept for the backward pass.

    Shapes: hidden (..., D), weight (V, D), bias (V,) or None, labels (...) -> ().

    Args:
        hidden: The output layer's input.
        weight: The output layer's weight.
        labels: Class indices, already shifted.
        bias: The output layer's bias.
        layer: The output layer, if it is to be called.
        ignore_index: A label that does not count.
        label_smoothing: The share of a target that is spread over all classes.
        softcap: If given, logits become softcap * tanh(logits / softcap).
        num_items: The divisor of the sum of losses; by default the number of labels
            that count.
        upcast: Return a loss in float32, as for logits that are cast first.
    """
    logits = layer(hidden) if layer else nn.functional.linear(hidden, weight, bias)
    options = (ignore_index, label_smoothing, softcap)
    return cross_entropy_reference(logits, labels, options, num_items, upcast)


def masked_lm_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    *,
    bias: Tensor | None = None,
    layer: nn.Module | None = None,
    softcap: float | None = None,
    **_: Any,
) -> Tensor:
    """The loss of transformers' `ForMaskedLMLoss`, from the output layer's logits.

    Args:
        hidden: The output layer's input, (B, T, D).
        weight: The output layer's weight, (V, D).
        labels: (B, T).
        num_items_in_batch: The divisor of the sum, if gradients are accumulated over
            several batches; by default the number of labels that count here.
        ignore_index: The label of predictions that do not count.
        bias: The output layer's bias, (V,).
        layer: As in `linear_cross_entropy`.
        softcap: As in `linear_cross_entropy`.
    """
    return linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        layer=layer,
        ignore_index=ignore_index,
        softcap=softcap,
        num_items=num_items_in_batch,
        upcast=True,
    )


def causal_lm_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    layer: nn.Module | None = None,
    softcap: float | None = None,
    **_: Any,
) -> Tensor:
    """The loss of transformers' `ForCausalLMLoss`, from the output layer's logits.

    Args:
        hidden: The output layer's input, (B, T, D).
        weight: The output layer's weight, (V, D).
        labels: (B, T), not shifted: each token predicts the next one.
        num_items_in_batch: As in `masked_lm_linear_cross_entropy`.
        ignore_index: The label of predictions that do not count.
        shift_labels: The labels, already shifted to their predictions, if given.
        bias: The output layer's bias, (V,).
        layer: As in `linear_cross_entropy`.
        softcap: As in `linear_cross_entropy`.
    """
    if shift_labels is None:
        shift_labels = shifted(labels, ignore_index)
    return masked_lm_linear_cross_entropy(
        hidden,
        weight,
        shift_labels,
        num_items_in_batch,
        ignore_index,
        bias=bias,
        layer=layer,
        softcap=softcap,
    )
