"""The benchmark of generation on caches: what its table and its summary say."""

from __future__ import annotations

import decode


def test_the_summary_names_the_worst_row_and_the_ratio_of_several_queries() -> None:
    one, several = str(decode.ROWS[0]), next(str(row) for row in decode.ROWS if row.queries == 4)
    medians = {one: {decode.OWN: 100.0, "FlashInfer": 110.0}, several: {decode.OWN: 105.0, "FlashInfer": 105.0}}
    lines = list(decode.summary(medians))
    assert "1.049 times as long, at least 1.000" in lines[0]
    assert lines[1] == "4 queries take 1.050 times one query."
