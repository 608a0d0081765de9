"""Images and their classes."""

import torch


def model(m):
    return m.PatchClassifier()


def verify_model(m):
    return m.PatchClassifier(image_size=32, patch=8, dim=64, num_heads=4, depth=6, num_classes=10)


def inputs(model):
    return {"images": torch.randn(2, 3, 32, 32), "labels": torch.randint(10, (2,))}


def loss(outputs):
    return outputs[0]
