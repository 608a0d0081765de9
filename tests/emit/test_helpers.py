"""What helper files hold, by what is used of them."""

import pytest

from slapo_rewrite.emit.helpers import library_files

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
