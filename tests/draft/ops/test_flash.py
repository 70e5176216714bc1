"""Which attention kernels a GPU gets; what they compute is tested in test_gpu."""

from __future__ import annotations

import pytest

from eagle3.draft.ops.flash import takes


@pytest.mark.parametrize(
    ("major", "d", "dv", "expected"),
    [
        (9, 64, 64, True),
        (9, 96, 96, True),
        (9, 192, 128, True),
        (9, 256, 256, True),
        (9, 512, 512, False),
        (9, 100, 100, False),
        (10, 128, 128, True),
        (10, 192, 128, True),
        (10, 192, 192, False),
        (10, 256, 256, False),
        (8, 128, 128, False),
        (12, 128, 128, False),
    ],
)
def test_flash_attention_4_is_asked_only_for_what_it_has(major: int, d: int, dv: int, expected: bool) -> None:
    assert takes(major, d, dv) == expected
