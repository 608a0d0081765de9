"""How gpt.py is divided: its layers over tensor-parallel ranks, its blocks over stages."""

import torch


def model(m):
    """What is divided."""
    return m.GPT(m.GPTConfig())


def inputs(model):
    """What one training step gives the model."""
    windows = torch.randint(256, (2, 17))
    return {"ids": windows[:, :-1], "targets": windows[:, 1:]}


def loss(outputs):
    """The model gives logits and loss."""
    return outputs[1]


def schedule(s, stages: int = 2):
    """Each rank has some of the heads, of the features in between and of the rows of the table."""
    s["blocks.*.attention.{query,key,value}"].shard(["weight", "bias"], axis=0)
    s["blocks.*.attention.out"].shard("weight", axis=1)
    s["blocks.*.mlp.up"].shard(["weight", "bias"], axis=0)
    s["blocks.*.mlp.down"].shard("weight", axis=1)
    s["{bytes,head}"].shard("weight", axis=0)
    s.infer_sync()
    s.cut_evenly(stages)
