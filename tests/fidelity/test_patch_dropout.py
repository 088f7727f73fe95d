"""Tokens that are left out: of which models they may be, which they are, and that a reconstruction gets better with fewer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import timm
import torch
from vit_pytorch import ViT

import flysurgery
from flysurgery.calibration import Samples
from flysurgery.fidelity import Settings, Stream, measure_fidelity, reconstruct, step
from flysurgery.fidelity.any_tokens import find_patch_dropout
from flysurgery.fidelity.patch_dropout import PatchDropout
from flysurgery.fidelity.processes import Processes
from flysurgery.walker import example_input, find_cuts, survey
from tests.fidelity.test_reconstruct import images

SMALL: dict[str, Any] = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 2, "num_classes": 5}
VIT = partial(timm.create_model, "vit_tiny_patch16_224", patch_size=4, **SMALL)


@pytest.mark.parametrize(
    ("make", "fixed", "others"),
    [
        (VIT, 1, 64),
        (partial(VIT, reg_tokens=3), 4, 64),
        (partial(VIT, class_token=False, global_pool="avg"), 0, 64),
        (partial(ViT, image_size=32, patch_size=4, num_classes=5, dim=48, depth=2, heads=2, dim_head=24, mlp_dim=96), 1, 64),
        (partial(VIT, img_size=16), 0, 0),  # few tokens
        (partial(timm.create_model, "beit_base_patch16_224", patch_size=4, **SMALL), 0, 0),  # relative positions
        (partial(timm.create_model, "eva02_tiny_patch14_224", patch_size=4, **SMALL), 0, 0),  # rotary positions
        (partial(timm.create_model, "mixer_s16_224", img_size=112, num_classes=5), 0, 0),
        (partial(timm.create_model, "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=24, num_classes=5), 0, 0),
    ],
)
def test_only_blocks_that_know_no_places_get_fewer_tokens(make: Any, fixed: int, others: int) -> None:
    torch.manual_seed(0)
    model = make().eval()
    example: Any = example_input(model)
    x = torch.randn(4, *example.shape[1:])
    cuts = [cut for cut in find_cuts(survey(model)) if cut.kind != "other"]
    found = find_patch_dropout(model, x, cuts)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    if not others:
        assert found is None
        return
    assert found is not None and found.tokens == fixed + others // 2
    found.draw(len(x))
    with Stream(model, cuts) as stream, torch.no_grad():
        stream.dropout = found
        model(x)
        blocks = [stream.values[number] for number, cut in enumerate(cuts) if cut.kind == "block"]
    assert len(blocks) == 2 and all(each.shape == (4, found.tokens, 48) for each in blocks)


def test_only_gpus_make_enough_updates_to_gain_by_it() -> None:
    assert [Settings.on(torch.device(kind)).thinned for kind in ("cuda", "cpu")] == [0.7, 0.0]


def test_fixed_tokens_stay_and_each_sample_keeps_others_of_its_own() -> None:
    fixed, others = torch.tensor([0, 5]), torch.tensor([number for number in range(40) if number not in (0, 5)])
    dropout, stream = PatchDropout(fixed, others, 10), torch.arange(40.0)[None, :, None].expand(6, 40, 3)
    dropout.draw(6)
    kept = dropout(stream)[..., 0]
    assert torch.equal(kept, dropout(stream)[..., 2]), "every stream loses the same"
    assert kept[:, :2].tolist() == [[0.0, 5.0]] * 6
    chosen = [set(row) for row in kept[:, 2:].tolist()]
    assert all(len(row) == 10 and not row & {0.0, 5.0} for row in chosen) and len(set(map(frozenset, chosen))) == 6
    dropout.draw(6)
    assert not torch.equal(dropout(stream)[..., 0], kept)


@pytest.mark.parametrize("is_agreed", [True, False])
def test_a_reconstruction_sees_fewer_tokens_at_first_and_all_of_them_where_it_is_judged(
    is_agreed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another process, whose word counts, sees all of them."""
    if not is_agreed:
        monkeypatch.setattr(Processes, "agreed", lambda _, value: (False,) if isinstance(value, tuple) else value)
    monkeypatch.setattr("flysurgery.fidelity.reconstruction._affordable", lambda *_: 40)
    torch.manual_seed(0)
    teacher = VIT().eval()
    torch.manual_seed(0)
    student = VIT().eval()
    flysurgery.convert(student)
    tokens, own = list[int](), step.relative_error
    monkeypatch.setattr("flysurgery.fidelity.stream.relative_error", lambda x, y: tokens.append(x.shape[1]) or own(x, y))
    samples, cuts = Samples(images(40)), find_cuts(survey(teacher))
    done = reconstruct(student, teacher, samples, cuts, Settings(minutes=60, batch=8))
    updates = tokens[:: len(tokens) // 40]
    assert updates == ([33] * 28 if is_agreed else [65] * 28) + [65] * 12
    assert done.after.relative_error < done.before.relative_error
    assert measure_fidelity(student, teacher, samples.held_out(), cuts).relative_error == pytest.approx(done.after.relative_error, rel=1e-4)
