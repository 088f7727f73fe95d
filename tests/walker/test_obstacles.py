"""Each reason against a replacement, on a module that has just that."""

from __future__ import annotations

import timm
import torch
from torch import Tensor, nn

from flysurgery.walker import Target, walk
from tests.walker.toys import TOKENS, WIDTH, FusedAttention, MisnamedMlp, Stack, tokens


def found(model: nn.Module, example: Tensor | None = None) -> dict[str, Target]:
    return {target.fqn: target for target in walk(model, tokens() if example is None else example)}


def codes(target: Target) -> tuple[str, ...]:
    return tuple(obstacle.code for obstacle in target.obstacles)


def test_nothing_against_plain_linears() -> None:
    assert [codes(target) for target in found(FusedAttention()).values()] == [(), ()]


def test_hooks() -> None:
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        seen: list[int] = []
        model = MisnamedMlp()
        getattr(model.qkv, register)(lambda *args, seen=seen: seen.append(1))
        targets = found(model)
        assert codes(targets["qkv"]) == ("hooked",)
        assert targets["qkv"].blocked
        assert codes(targets["proj"]) == ()
        assert seen == []  # no hook runs while the model is walked


def test_parametrized() -> None:
    model = MisnamedMlp().train()
    nn.utils.parametrizations.spectral_norm(model.qkv)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    targets = found(model)
    assert codes(targets["qkv"]) == ("parametrized",)
    assert (targets["qkv"].role, targets["proj"].role) == ("ffn_in", "ffn_out")
    # reading the weight in training mode would advance the power iteration
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_custom_forward() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * super().forward(x)

    class Renamed(nn.Linear):
        pass

    model = MisnamedMlp()
    model.qkv = Doubled(WIDTH, 3 * WIDTH)
    model.proj = Renamed(3 * WIDTH, WIDTH)
    targets = found(model)
    assert codes(targets["qkv"]) == ("custom-forward",)
    assert codes(targets["proj"]) == ()

    patched = MisnamedMlp()
    patched.qkv.forward = lambda input: nn.functional.linear(input, patched.qkv.weight)
    assert codes(found(patched)["qkv"]) == ("custom-forward",)


def test_weight_read_by_the_parent() -> None:
    class Reader(FusedAttention):
        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.linear(x, self.apple.weight, None)
            q, k, v = y.chunk(3, -1)
            return self.pear(nn.functional.scaled_dot_product_attention(q, k, v))

    targets = found(Reader())
    assert (targets["apple"].role, codes(targets["apple"]), targets["apple"].blocked) == ("qkv", ("weight-read",), True)
    assert codes(targets["pear"]) == ()


def test_weight_read_beside_a_call() -> None:
    class Regularized(MisnamedMlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.proj.weight.sum()

    targets = found(Regularized())
    assert codes(targets["proj"]) == ("weight-read",)
    assert codes(targets["qkv"]) == ()


def test_weights_of_torch_attention_and_encoder_layers() -> None:
    targets = found(nn.TransformerEncoderLayer(WIDTH, 3, 48, batch_first=True))
    assert {fqn: (target.role, codes(target)) for fqn, target in targets.items()} == {
        "self_attn.in_proj_weight": ("qkv", ("raw-weight",)),
        "self_attn.out_proj": ("attn_out", ("weight-read",)),
        "linear1": ("ffn_in", ("weight-read",)),
        "linear2": ("ffn_out", ("weight-read",)),
    }


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).relu())

    targets = found(Tied())
    assert {fqn: (target.role, target.calls, codes(target)) for fqn, target in targets.items()} == {
        "one": ("ffn_in", 1, ("tied",)),
        "two": ("ffn_out", 1, ("tied",)),
    }


def test_shared_modules_are_one_target() -> None:
    shared = MisnamedMlp()
    model = Stack(shared, FusedAttention(), shared)
    targets = found(model, tokens(7))
    assert targets["blocks.0.qkv"].aliases == ("blocks.2.qkv",)
    assert targets["blocks.0.qkv"].calls == 2
    assert targets["blocks.0.qkv"].rows == 2 * 2 * TOKENS
    assert targets["blocks.0.qkv"].role == "ffn_in"
    assert "blocks.2.qkv" not in targets
    assert targets["blocks.1.apple"].aliases == ()


def test_a_module_called_twice_is_called_by_itself_both_times() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = MisnamedMlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x + self.block(x))

    targets = found(Twice())
    assert {fqn: (target.role, target.calls, codes(target)) for fqn, target in targets.items()} == {
        "block.qkv": ("ffn_in", 2, ()),
        "block.proj": ("ffn_out", 2, ()),
    }


def test_not_called() -> None:
    model = MisnamedMlp()
    model.spare = nn.Linear(3, 4, bias=False)
    target = walk(model, tokens())[-1]
    assert (target.fqn, target.role, target.in_features, target.out_features, target.bias) == ("spare", "other", 3, 4, False)
    assert (target.calls, target.rows, codes(target), target.blocked) == (0, 0, ("not-called",), True)


def test_pointwise_convolutions() -> None:
    class Convolutions(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Conv2d(3, 6, 1), nn.GELU(), nn.Conv2d(6, 3, 1), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 6, 1, stride=2))

    targets = found(Convolutions(), torch.zeros(2, 3, 8, 8))
    assert {fqn: (target.role, target.in_features, target.out_features, target.rows) for fqn, target in targets.items()} == {
        "0": ("ffn_in", 3, 6, 2 * 64),
        "2": ("ffn_out", 6, 3, 2 * 64),
    }
    assert codes(targets["0"]) == codes(targets["2"]) == ("conv1x1",)
    assert targets["0"].blocked


def test_blocking_and_not() -> None:
    model = Stack(FusedAttention())
    targets = found(model, tokens(7))
    assert (codes(targets["first"]), targets["first"].blocked) == (("patch-embedding",), False)
    assert (codes(targets["last"]), targets["last"].blocked) == (("head",), False)


class ReadsWhenTheSizeChanges(FusedAttention):
    """Keeps something for its number of tokens, and looks at a weight to make it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None or self.kept.shape[0] != x.shape[1]:
            self.kept = self.ramp(x.shape[1])
        return super().forward(x + self.kept[:, None])

    def ramp(self, count: int) -> Tensor:
        return torch.arange(count, device=self.apple.weight.device, dtype=torch.float32)

    def never_called(self) -> Tensor:
        return self.pear.weight


def test_a_read_that_this_forward_need_not_do() -> None:
    fresh, used = ReadsWhenTheSizeChanges(), ReadsWhenTheSizeChanges()
    used(tokens())
    for model in (fresh, used):
        assert {fqn: codes(target) for fqn, target in found(model).items()} == {"apple": ("weight-read",), "pear": ()}


def test_convit_reads_a_weight_for_another_number_of_tokens() -> None:
    with torch.device("meta"):
        model = timm.create_model("convit_tiny", depth=2, local_up_to_layer=1, embed_dim=12, num_heads=4, img_size=32)
    targets = {target.fqn: target for target in walk(model)}
    assert codes(targets["blocks.0.attn.qk"]) == ("weight-read",)
    assert [codes(targets[f"blocks.{name}"]) for name in ("0.attn.v", "0.attn.proj", "1.attn.qkv", "1.mlp.fc1")] == [()] * 4


def test_a_single_row_or_column() -> None:
    class Narrow(MisnamedMlp):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH)

    assert {fqn: (target.role, codes(target)) for fqn, target in found(Narrow()).items()} == {
        "qkv": ("other", ("rank-one",)),
        "proj": ("other", ("rank-one",)),
    }


def test_convolutions_as_linears() -> None:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)
            self.grouped, self.strided = nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 1, stride=2)
            self.hooked = nn.Conv2d(8, 8, 1)
            self.hooked.register_forward_hook(lambda *_: None)

        def forward(self, x: Tensor) -> Tensor:
            return self.strided(self.grouped(self.hooked(x + self.down(self.up(x).relu()))))

    targets = found(Convolutions(), torch.zeros(2, 8, 4, 4))
    assert {fqn: (target.role, codes(target)[-1]) for fqn, target in targets.items()} == {
        "up": ("ffn_in", "conv1x1"),
        "down": ("ffn_out", "conv1x1"),
        "hooked": ("other", "hooked"),
    }
    assert (targets["up"].out_features, targets["up"].in_features, targets["up"].rows) == (16, 8, 2 * 4 * 4)
    at_one_pixel = {target.fqn: target for target in walk(nn.Sequential(nn.Conv2d(8, 8, 1, stride=2)), torch.zeros(2, 8, 1, 1))}
    assert "conv-stride" in codes(at_one_pixel["0"])
