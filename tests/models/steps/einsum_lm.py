"""A language model."""

import torch


def model(m):
    return m.EinsumLM(m.Config())


def verify_model(m):
    return m.EinsumLM(m.Config(vocab_size=203, context=32, depth=6, heads=4, dim=64, dropout=0.0))


def inputs(model):
    idx = torch.randint(model.config.vocab_size, (2, 17))
    return {"idx": idx[:, :-1], "targets": idx[:, 1:].contiguous()}


def loss(outputs):
    return outputs[1]
