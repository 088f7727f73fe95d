"""The places where one tensor carries everything on, found by dataflow in models of different build."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn
from vit_pytorch import SimpleViT, ViT

from flysurgery.walker import find_cuts, survey


def places(model: nn.Module, *kinds: str) -> list[tuple[str, str]]:
    return [(cut.fqn, cut.side) for cut in find_cuts(survey(model.eval())) if cut.kind in kinds]


def test_blocks_of_timm_end_where_their_modules_do() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=3, img_size=32)
    assert places(model, "start") == [("pos_drop", "output")]
    assert places(model, "block") == [(f"blocks.{number}", "output") for number in range(3)]
    assert places(model, "tokens") == [("norm", "output")]


def test_residuals_summed_outside_of_the_blocks_are_seen_at_the_next_module() -> None:
    options = {"image_size": 32, "patch_size": 16, "num_classes": 7, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48}
    for model in (ViT(**options), SimpleViT(**options)):
        assert places(model, "block") == [("transformer.layers.1.0", "input"), ("transformer.norm", "input")]
        assert places(model, "tokens") == [("transformer.norm", "output")]


def test_stages_of_swin_have_blocks_of_their_own_shapes() -> None:
    model = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 2, 1)).eval()
    cuts = [cut for cut in find_cuts(survey(model)) if cut.kind in ("block", "tokens")]
    assert [cut.shape[1:] for cut in cuts] == [(28, 28, 192), (14, 14, 384), (14, 14, 384), (7, 7, 768), (7, 7, 768), (7, 7, 768)]


def test_mixers_without_attention_are_cut_after_each_feed_forward_part() -> None:
    model = MlpMixer(img_size=32, patch_size=16, num_blocks=2, embed_dim=24)
    ends = [("blocks.0.norm2", "input"), ("blocks.0", "output"), ("blocks.1.norm2", "input"), ("blocks.1", "output")]
    assert places(model, "block") == ends


class Skipping(nn.Module):
    """The input of the first block is needed until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.block = timm.create_model("vit_tiny_patch16_224", depth=1).blocks[0]
        self.norm = nn.LayerNorm(192)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x) * x)


def test_a_value_that_is_read_again_later_leaves_no_cut_between() -> None:
    cuts = find_cuts(survey(Skipping().eval(), torch.randn(2, 5, 192)))
    assert [(cut.fqn, cut.side) for cut in cuts] == [("block", "input"), ("norm", "input"), ("norm", "output")]


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "beit_base_patch16_224"])
def test_further_families_have_a_cut_for_each_block(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, depth=4)
    ends = [fqn for fqn, _ in places(model, "block", "tokens")]
    assert sum(fqn.startswith("blocks.") for fqn in ends) >= 3
