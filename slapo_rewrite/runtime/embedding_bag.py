"""Bags of embeddings from a table of which each rank holds some rows.

Shapes: N ids in all, B bags, L ids in each, V rows, D features. A prime (V') marks the
part that this rank holds.
"""

import torch
from torch import Tensor, nn

from .guards import check_parts
from .shards import Shard, world_size
from .tensor_parallel import Reduction, record_shard, sum_now


class VocabParallelEmbeddingBag(nn.EmbeddingBag):
    """An embedding bag split over its rows: ids (B, L), or (N,) and offsets -> (B, D).

    The constructor takes V; `num_embeddings` is V'. `reduce` sums the ranks' results.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduce: Reduction = sum_now,
        sparse: bool = False,  # for sparse
    ) -> None:
        if sparse:  # for sparse
            raise ValueError("a split table's gradients are dense: use sparse=False")
        if mode == "max":
            raise ValueError(
                "a split table cannot give maxima: use mode `sum` or `mean`"
            )
        shard = Shard(0, num_embeddings)
        super().__init__(
            shard.local_size(),
            embedding_dim,
            mode=mode,
            include_last_offset=include_last_offset,
            device=device,
            dtype=dtype,
        )
        self.shard, self.full_num_embeddings = shard, num_embeddings
        self.reduce = reduce
        record_shard(self, "weight", shard)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Looks up ids; the ranks' results are summed by `reduce`."""
        check_parts(self, input)
        if world_size() == 1:
            return super().forward(input, offsets, per_sample_weights)
        rows, elsewhere = self.shard.looked_up(input)
        if per_sample_weights is None:
            per_sample_weights = torch.ones_like(input, dtype=self.weight.dtype)
        elif self.mode != "sum":
            raise ValueError("`per_sample_weights` are for the mode `sum`, as in torch")
        x = nn.functional.embedding_bag(
            rows,
            self.weight,
            offsets,
            mode="sum",
            per_sample_weights=per_sample_weights.masked_fill(elsewhere, 0),
            include_last_offset=self.include_last_offset,
        )
        if self.mode == "mean":
            x = x / self.counts(input, offsets).clamp_min(1).unsqueeze(-1)
        return self.reduce(x, None)[0]

    def counts(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        """How many ids each bag has, on all ranks together: (B,)."""
        if offsets is None:
            return input.new_full(input.shape[:1], input.shape[1])
        if not self.include_last_offset:
            offsets = torch.cat((offsets, offsets.new_tensor([input.shape[0]])))
        return offsets.diff()
