"""How far a fit of times to sizes reaches: intervals that hold, what is too far, what rows can hold."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_pipe.errors import BadInput
from dflash_pipe.sizes import resized
from tests.test_sizes import limits, profile_of, samples


def anchored(num_anchors, supervised=1000.0):
    """A stage whose time is not linear in the anchors, with rows that have fewer, as that of a real one."""
    rows, limit = (1.0, 2.0, 3.0, 4.0) * 10, (6.0, num_anchors, num_anchors) * 13 + (num_anchors,)
    anchors = tuple(r * n for r, n in zip(rows, limit, strict=True))
    tokens = tuple(100.0 * r + i % 7 for i, r in enumerate(rows))
    seconds = [2e-4 * t + 1e-3 * n + 3e-6 * n * n / r for t, n, r in zip(tokens, anchors, rows, strict=True)]
    return samples(seconds, rows=rows, anchors=anchors, tokens=tokens, supervised=tuple(supervised * r for r in rows))


@pytest.mark.parametrize(("was", "now"), [(8.0, 16.0), (8.0, 12.0), (8.0, 6.0), (64.0, 128.0), (64.0, 32.0)])
def test_the_interval_holds_also_where_the_fit_was_never_measured(was, now):
    changed, _, off = resized(profile_of(x=anchored(was)), limits(anchors=(was, now)))
    told, true = changed.stages["x"]["process"].total, anchored(now).total
    assert abs(true / told - 1) <= off["x"] < 1.0


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (160.0, "measured were 6 to 8 anchors a row, and 160 is too far from that; measure at 80 or more"),
        (2.0, "measured were 6 to 8 anchors a row, and 2 is too far from that; measure at 4 or less"),
    ],
)
def test_what_is_far_from_what_was_measured_is_refused_with_what_to_measure(now, said):
    with pytest.raises(BadInput, match=said):
        resized(profile_of(x=anchored(8.0)), limits(anchors=(8.0, now)))


def test_a_row_holds_no_more_than_what_is_supervised_in_it():
    for now in (12.0, 160.0, 100_000.0):
        changed, *_ = resized(profile_of(x=anchored(8.0, supervised=10.0)), limits(anchors=(8.0, now)))
        held = changed.stages["x"]["process"].measures
        assert max(np.array(held["anchors"]) / np.array(held["rows"])) == 10.0
