"""A model in several files: an encoder of images, a decoder of words."""

from .model import Captioner

__all__ = ["Captioner"]
