"""Images and what is said of them."""

import torch


def model(m):
    return m.Captioner(m.CaptionerConfig())


def verify_model(m):
    vision = type(m.CaptionerConfig().vision)(image_size=32, patch_size=8, depth=6)
    return m.Captioner(
        m.CaptionerConfig(
            vocab_size=203, max_len=32, dim=64, heads=4, kv_heads=2, depth=6, vision=vision
        )
    )


def inputs(model):
    idx = torch.randint(203, (2, 17))
    return {
        "images": torch.randn(2, 3, 32, 32),
        "tokens": idx[:, :-1],
        "labels": idx[:, 1:].contiguous(),
    }


def loss(outputs):
    return outputs[1]


def schedule(s):
    s["encoder.blocks.*.mlp.{gate,up}"].shard("weight", axis=0)
    s["encoder.blocks.*.mlp.down"].shard("weight", axis=1)
    s.infer_sync()
