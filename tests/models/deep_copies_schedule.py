"""The feed-forward layers split; the linear layers of the attention are copies of one, and stay."""

import torch
from torch.nn import functional as F


def model(m):
    return m.Translator()


def verify_model(m):
    return m.Translator(vocab_size=203, d_model=64, d_ff=128, heads=4, n_layers=2)


def inputs(model):
    return {"src": torch.randint(203, (2, 16)), "tgt": torch.randint(203, (2, 12))}


def loss(outputs, tgt):
    return F.nll_loss(outputs[:, :-1].flatten(0, 1), tgt[:, 1:].flatten())


def schedule(s, fuse: bool = False):
    if fuse:
        s.apply_all()
    s["**.feed_forward.w_1"].shard(["weight", "bias"], axis=0)
    s["**.feed_forward.w_2"].shard("weight", axis=1)
    s["generator"].shard(["weight", "bias"], axis=0)
    s.infer_sync()
