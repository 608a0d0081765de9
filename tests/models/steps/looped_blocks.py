"""A language model."""

import torch


def model(m):
    return m.LoopedLM()


def verify_model(m):
    return m.LoopedLM(vocab_size=203, dim=64, n_heads=4)


def inputs(model):
    idx = torch.randint(203, (2, 17))
    return {"tokens": idx[:, :-1], "labels": idx[:, 1:].contiguous()}


def loss(outputs):
    return outputs["loss"]
