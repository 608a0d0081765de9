"""The contents of helper files, by which of their definitions are used."""

import black
import pytest

from slapo_rewrite.emit.helpers import (
    FEATURES,
    RUNTIME,
    RUNTIME_ORDER,
    library_files,
    named_features,
)
from slapo_rewrite.emit.used_definitions import with_features

LAYER = {"tensor_parallel": {"ColumnParallelLinear"}}


@pytest.mark.parametrize(
    ("more", "has_maps"),
    [
        ({}, False),
        ({"weights": {"WeightMap"}}, True),
        ({"pretrained": {"MappedCheckpoints"}}, True),  # which needs `weights`
        ({"pretrained": {"LibraryModel"}}, False),
    ],
)
def test_weights_are_mapped_where_modules_have_others(more, has_maps):
    text = library_files({**LAYER, **more}, "# A header.")["loading.py"]
    assert text.count("in weight_maps(model).items():\n        named = ") == int(has_maps)
    assert text.count("    full = under_original_names(model, full)\n") == int(has_maps)
    assert ("weight_map" in text) is has_maps
    assert "# for" not in text


LAYERS = {"ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "all_gather"}
# What is there for each feature alone.
TOLD = {
    "gather_output": "output_shard",
    "parts": "parts: Parts",
    "reduce": "Reduction",
    "tensor_parallel_output_grad": "sum_and_cut",
}


def test_layers_take_the_arguments_that_an_output_passes():
    text = library_files({"tensor_parallel": LAYERS}, "# A header.")["tensor_parallel.py"]
    assert not any(words in text for words in TOLD.values())
    every = library_files({"tensor_parallel": LAYERS, FEATURES: set(TOLD)}, "# A header.")
    for feature, words in TOLD.items():
        more = library_files({"tensor_parallel": LAYERS, FEATURES: {feature}}, "# A header.")
        told = [words in more["tensor_parallel.py"] for words in TOLD.values()]
        assert told == [name == feature for name in TOLD]
        assert words in every["tensor_parallel.py"]
        for text in more.values():
            assert "# for" not in text
            assert black.format_str(text, mode=black.Mode()) == text


def test_features_are_those_that_helpers_use_as_well():
    adapters = library_files({"tensor_parallel": LAYERS, "lora": {"add_adapters"}}, "")
    assert "self.reduce is not sum_now" in adapters["tensor_parallel.py"]
    assert named_features(["layer(x, reduce=f).parts", "weights=1"]) == {"reduce", "parts"}


def test_what_is_marked_is_left_out_with_what_tells_of_it():
    text = """\
def f(
    x,
    *,
    one=1,  # for one
    two=2,
):
    \"\"\"Does it.

    Args:
        x: What.
        one: This,
            and more.
        two: That.
    \"\"\"
    if one:  # for one
        return x
    else:
        y = (
            two
        )
        return y
"""
    assert with_features(text, {"one"}) == text.replace("  # for one", "")
    left = with_features(text, ())
    assert (
        left
        == """\
def f(
    x,
    *,
    two=2,
):
    \"\"\"Does it.

    Args:
        x: What.
        two: That.
    \"\"\"
    y = (
        two
    )
    return y
"""
    )
    default = "def f(\n    kind=Shard,  # for kind\n):\n    return kind(0), 1\n"
    assert with_features(default, ()) == "def f(\n):\n    return Shard(0), 1\n"
    # Several on a line, behind other letters than ASCII's, and where an `else` moves out.
    used = "    if x:  # for x\n        pass\n    else:\n        return 'θ', kind(0), kind\n"
    default = f"def f(\n    kind=Shard,  # for kind\n):\n{used}"
    assert with_features(default, ()) == "def f(\n):\n    return 'θ', Shard(0), Shard\n"


def test_every_runtime_module_has_its_place():
    found = {path.stem for path in RUNTIME.glob("*.py")} - {"__init__"}
    assert {*RUNTIME_ORDER} == found
