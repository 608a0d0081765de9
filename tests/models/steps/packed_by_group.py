"""Query, key and value of one group after the other."""

import torch


def model(m):
    return m.PackedLM(m.Grouped)


def verify_model(m):
    return m.PackedLM(
        m.Grouped, vocab_size=203, block_size=32, dim=64, heads=4, groups=2, n_layers=4
    )


def inputs(model):
    idx = torch.randint(203, (2, 17))
    return {"idx": idx[:, :-1], "targets": idx[:, 1:].contiguous()}


def loss(outputs):
    return outputs[1]
