"""Layers side by side: the threads end, BLAS has its threads back, and CUDA's linear algebra is there before they begin."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flysurgery.projection.workers import workers

FRESH = """
import timm, torch, flysurgery
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3).cuda()
torch.set_num_threads(4)
report = flysurgery.convert(model, "monarch", calibrate=torch.rand(40, 3, 32, 32))
print(len(report.replaced))
"""


def test_threads_are_given_back_after_a_failure() -> None:
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), workers() as pool:
            assert pool.submit(torch.get_num_threads).result() == 1
            pool.submit(lambda: 1 // 0).result()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.gpu
def test_the_first_linear_algebra_of_a_process_may_be_that_of_threads() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "12"
