"""Steps of a whole model in one captured graph: each operation waits for what it reads and for those that read what it overwrites."""

from __future__ import annotations

import pytest
import timm
import torch

import flysurgery
from tests.support.captured import checkpoint_each, races_of_steps, take_hidden_units

pytestmark = pytest.mark.usefixtures("faster")


@pytest.mark.parametrize(("convert", "use_reentrant"), [(False, None), (True, None), (True, False), (True, True)])
def test_steps_wait_for_what_they_read(convert: bool, use_reentrant: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "embed_dim": 64, "num_heads": 1, "depth": 2, "num_classes": 10, "init_values": 0.5}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).train()
    if convert:
        flysurgery.convert(model, "monarch")
    x = torch.randn(4, 3, 32, 32)
    report = flysurgery.optimize(model, x, training=True)
    assert {row.group for row in report.fused} == {"qkv", "attention", "attn_out", "ffn", "norm", "patches"}
    if use_reentrant is not None:
        checkpoint_each(model.get_submodule("blocks"), use_reentrant)
    take_hidden_units(monkeypatch)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert races_of_steps(step, monkeypatch) == []
