"""What a map of boxes says of a tensor, which needs no device."""

from __future__ import annotations

import torch

from flysurgery.ops.cuda.tensor_map import head_boxes, plain_boxes, swizzled_boxes


def test_rows_of_a_wider_matrix() -> None:
    x = torch.empty(100, 96, dtype=torch.float16)[:, :64]
    assert swizzled_boxes(x, 128)[1:] == ((64, 100), (192,), torch.float16, (64, 128), True)
    assert plain_boxes(x, 16, 32)[1:] == ((64, 100), (192,), torch.float16, (32, 16), False)


def test_heads_of_one_projection() -> None:
    q, _, _ = torch.empty(2, 197, 3, 12, 64, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4).unbind(0)
    token = 3 * 12 * 64 * 2
    assert head_boxes(q, 208)[1:] == ((64, 197, 12, 2), (token, 128, 197 * token), torch.bfloat16, (64, 208, 1, 1), True)


def test_where_there_is_one_of_a_dimension_its_stride_does_not_matter() -> None:
    one = torch.empty(197, 64, dtype=torch.float16).as_strided((1, 1, 197, 64), (0, 7, 64, 1))
    assert head_boxes(one, 208).strides == (128, 128, 128)
