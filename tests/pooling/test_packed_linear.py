from __future__ import annotations

import pytest
import torch
from torch import nn

from batchline.pooling.packed_linear import PackedLinear, can_pack, pack_linears, restore

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="this torch has no oneDNN")


class Tower(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 40), nn.GELU(), nn.Sequential(nn.Linear(40, 8, bias=False)))


@needs_onednn
@pytest.mark.parametrize("rows", [1, 7, 512, 3000])
@torch.inference_mode()
def test_packed_layers_compute_the_same(rows: int) -> None:
    tower, x = Tower(), torch.randn(rows, 24)
    expected = tower(x)
    replaced = pack_linears(tower)
    assert len(replaced) == 2
    assert isinstance(tower[2][0], PackedLinear)
    torch.testing.assert_close(tower(x), expected, atol=1e-5, rtol=1e-5)


@needs_onednn
@torch.inference_mode()
def test_restored_layers_are_the_ones_before() -> None:
    tower = Tower()
    before = tower[0], tower[2][0]
    restore(pack_linears(tower))
    assert (tower[0], tower[2][0]) == before


def test_subclasses_keep_their_own_forward() -> None:
    class Scaled(nn.Linear):
        pass

    tower = nn.Sequential(Scaled(4, 4))
    assert pack_linears(tower) == []


def test_types_that_onednn_has_no_packed_layers_for_are_left_alone() -> None:
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, torch.device("cuda"))
