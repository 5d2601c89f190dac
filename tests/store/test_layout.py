"""Layout of the tensors in an entry, and the share of each rank."""

from __future__ import annotations

import pytest
import torch

from blockattn_rag.store.layout import LayerShape, Layout, share_of

WIDE = LayerShape(4, 8, 8, torch.float32, torch.float32)
NARROW = LayerShape(2, 16, 4, torch.float32, torch.float32)


def test_layers_with_equal_shapes_form_a_group() -> None:
    layout = Layout(3, (WIDE, NARROW, WIDE, WIDE, NARROW))
    assert layout.groups == ((WIDE, (0, 2, 3)), (NARROW, (1, 4)))
    assert len(layout.tensors) == 1 + 2 * 4 + 2 * 2
    assert layout.tensors["head.0003.keys.00"] == (torch.float32, (3, 3, 8))
    assert layout.tensors["head.0001.values.01"] == (torch.float32, (2, 3, 4))
    assert "head.0002.values.01" not in layout.tensors
    assert len(Layout(3, (WIDE,) * 100).tensors) == len(Layout(3, (WIDE,)).tensors)


@pytest.mark.parametrize(("rank", "ranks", "count"), [(2, 2, 4), (-1, 2, 4), (0, 0, 4), (0, 1, 0)])
def test_share_of_refuses_invalid_ranks(rank: int, ranks: int, count: int) -> None:
    with pytest.raises(ValueError, match="Expected a rank from 0"):
        share_of(rank, ranks, count)
