"""Sound, and the unit at each sample."""

import torch


def model(m):
    return m.AudioModel()


def verify_model(m):
    return m.AudioModel(channels=32, inner=64, heads=4, n_layers=6, n_units=20)


def inputs(model):
    return {"wave": torch.randn(2, 1, 24), "units": torch.randint(20, (2, 24))}


def loss(outputs):
    return outputs[1]
