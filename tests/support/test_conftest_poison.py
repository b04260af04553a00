"""The fixtures that tests rest on do what they say."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.usefixtures("poisoned_memory")
def test_fresh_memory_is_poisoned() -> None:
    like = torch.zeros(3)
    for fresh in (
        torch.empty(3),
        torch.empty_like(like),
        torch.empty_strided((3,), (1,)),
        like.new_empty(3),
        like.new_empty_strided((3,), (1,)),
    ):
        assert fresh.isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
    assert torch.zeros(3).eq(0).all()
