"""How many programs share a multiprocessor, and why one may not run at all."""

import pytest
from modelled import A100, H200, PARAMS, RTX3090, plain, problem, report

from autoattn.cost_model.occupancy import occupancy, why_unlaunchable
from autoattn.cost_model.predictor import predict


@pytest.mark.parametrize(
    ("device", "registers", "shared_kib", "num_warps", "blocks"),
    [
        (A100, 255, 0, 4, 2),  # 255 x 32 is up to 8192 a warp: 2 warps of each scheduler's 16,384 registers
        (A100, 128, 0, 8, 2),  # 4096 a warp: 4 warps a scheduler, 16 of an SM
        (A100, 129, 0, 8, 1),  # 4352 a warp: 3 warps a scheduler, 12 of an SM, and 8 make a block
        (A100, 168, 0, 4, 3),  # 5376 a warp: 3 warps a scheduler
        (A100, 32, 40, 4, 4),  # 41 KiB with CUDA's own: 4 of 164
        (A100, 32, 81, 4, 2),  # 82 KiB: exactly 2
        (A100, 32, 82, 4, 1),  # 83 KiB: one too many for 2
        (A100, 32, 163, 4, 1),  # the opt-in maximum
        (A100, 16, 0, 32, 2),  # 2048 threads
        (A100, 16, 0, 1, 32),  # blocks, not threads
        (RTX3090, 16, 0, 8, 6),  # 1536 threads
        (RTX3090, 16, 0, 1, 16),
        (H200, 64, 113, 4, 2),  # 114 KiB: exactly 2 of 228
        (A100, 32, 164, 4, 0),
        (RTX3090, 32, 100, 4, 0),
    ],
)
def test_occupancy_is_what_arithmetic_by_hand_says(device, registers, shared_kib, num_warps, blocks):
    assert occupancy(device, registers, shared_kib * 1024, num_warps) == blocks


@pytest.mark.parametrize(
    ("device", "changes", "words"),
    [
        (RTX3090, {"shared_bytes": 101_377}, "101,377 bytes of shared memory per block"),
        (A100, {"registers": 255, "num_warps": 16}, "255 registers for each of 512 threads"),
        (RTX3090, {"num_warps": 64}, "2048 threads per block"),
    ],
)
def test_a_kernel_that_cannot_launch_is_explained(device, changes, words):
    kernel = report(**changes)
    assert words in why_unlaunchable(device, kernel)
    assert device.full_name in why_unlaunchable(device, kernel)
    with pytest.raises(ValueError, match="can run"):
        predict(problem(), device, plain(PARAMS), kernel)


def test_a_kernel_that_fits_is_not_complained_of():
    assert why_unlaunchable(A100, report()) is None
