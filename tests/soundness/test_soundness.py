"""What the tool accepts gives the original's numbers, and it accepts ordinary models.

`make fuzz SECONDS=600` goes on where the random pairs here end.
"""

import random
from collections import Counter

import pytest
import torch

from tests.marks import long
from tests.soundness.cases import WHOLE_MODELS, cases
from tests.soundness.followed import FOLLOWED
from tests.soundness.fuzz import GENERATORS
from tests.soundness.ordinary import ORDINARY
from tests.soundness.pairs import DEFECTS, REFUSED, RIGHT, WARNED, Judge
from tests.soundness.ranks import Ranks

pytestmark = pytest.mark.processes
CASES = cases()


@pytest.fixture(scope="module")
def ranks():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Ranks() as ranks:
        yield ranks
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_what_was_wrong_is_refused_or_right(ranks, name):
    worlds = (2, 3, 4) if name in WHOLE_MODELS else (2, 4)
    verdict = Judge(ranks, worlds)(CASES[name])
    assert verdict.kind in (RIGHT, REFUSED, WARNED), f"{verdict.kind}\n{verdict.text}"


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_is_right_without_a_run(ranks, name):
    pair, kinds = FOLLOWED[name]
    verdict = Judge(ranks, (2, 4), is_run=False)(pair)
    assert verdict.kind == kinds, f"{verdict.kind}\n{verdict.text}"


@pytest.mark.parametrize("name", ORDINARY)
def test_what_is_ordinary_is_right(ranks, name):
    worlds = (2,) if name.startswith("few") else ((2, 3, 4)[len(name) % 3],)
    verdict = Judge(ranks, worlds)(ORDINARY[name])
    assert verdict.kind == RIGHT, f"{verdict.kind}\n{verdict.text}"
    assert verdict.worlds == worlds


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "count", "accepted"),
    [
        ("ops", 8, 1),
        ("blocks", 4, 1),
        ("mutate", 4, 0),
        ("spelled", 6, 1),
        long("ops", 40, 8),
        long("blocks", 12, 6),
        long("mutate", 12, 0),
        long("spelled", 24, 4),
    ],
)
def test_random_pairs(ranks, kind, count, accepted):
    """A fall of what is accepted is a failure as well."""
    kinds, shown = Counter(), []
    for seed in range(count):
        pair = GENERATORS[kind](random.Random(seed))
        verdict = Judge(ranks, worlds=(2 if seed % 2 else 4,))(pair)
        kinds[verdict.kind] += 1
        if verdict.kind in DEFECTS:
            shown.append(
                f"{kind} {seed}: {verdict.kind} {verdict.code} {pair.name}\n{verdict.text}"
            )
    assert not shown, "\n\n".join(shown)
    assert kinds[RIGHT] >= accepted, kinds
