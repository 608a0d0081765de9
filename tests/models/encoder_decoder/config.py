"""Sizes."""

from dataclasses import dataclass, field


@dataclass
class VisionConfig:
    """Of the encoder."""

    image_size: int = 224
    patch_size: int = 16
    depth: int = 6


@dataclass
class CaptionerConfig:
    """Of all of it."""

    vocab_size: int = 32000
    max_len: int = 256
    dim: int = 2048
    heads: int = 16
    kv_heads: int = 2
    depth: int = 6
    vision: VisionConfig = field(default_factory=VisionConfig)
