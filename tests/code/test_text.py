"""Small pieces of text."""

import pytest

from slapo_rewrite.code.text import with_article


@pytest.mark.parametrize("name", ["Block", "UNet", "T5Block", "GPT2Block", "UsedLayer", "_Layer"])
def test_a_consonant_is_heard_first(name):
    assert with_article(name) == f"A `{name}`"


@pytest.mark.parametrize("name", ["Expert", "MLP", "OPTDecoderLayer", "RMSNorm", "AlbertLayer"])
def test_a_vowel_is_heard_first(name):
    assert with_article(name) == f"An `{name}`"
