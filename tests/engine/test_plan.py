"""Guarantees of the step plan."""

from __future__ import annotations

import numpy as np

from services.engine.plan import PlannedSequence, build_plan


def _ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_plan_flattens_sequences_in_order() -> None:
    """Positions, slots, starts and logit rows follow from each sequence's start, length and blocks."""
    plan = build_plan(
        [
            PlannedSequence(_ids(9), start=4, block_table=_ids(3, 5), logit_count=1),
            PlannedSequence(_ids(1, 2, 3), start=2, block_table=_ids(7, 2, 8), logit_count=0),
            PlannedSequence(_ids(6, 6), start=0, block_table=_ids(1), logit_count=1),
        ],
        block_size=4,
    )
    assert plan.token_ids.tolist() == [9, 1, 2, 3, 6, 6]
    assert plan.positions.tolist() == [4, 2, 3, 4, 0, 1]
    assert plan.slots.tolist() == [20, 30, 31, 8, 4, 5]
    assert plan.query_starts.tolist() == [0, 1, 4, 6]
    assert plan.context_lens.tolist() == [5, 5, 2]
    assert plan.block_tables.tolist() == [[3, 5], [7, 2], [1, 0]]
    assert plan.logit_rows.tolist() == [0, 5]
    assert plan.decode_count == 1
    arrays = (plan.token_ids, plan.positions, plan.slots, plan.query_starts, plan.context_lens, plan.logit_rows)
    assert all(array.dtype == np.int32 for array in arrays)
