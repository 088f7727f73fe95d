"""What a step of reconstruction is made of: views, gradients that enter between the blocks, and the optimizer."""

import contextlib
import copy
from collections import namedtuple
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from flysurgery.calibration import Pictures, Samples
from flysurgery.errors import SurgeryError
from flysurgery.fidelity import Muon, Pull, Settings, Stream, parameter_groups, relative_error, views
from flysurgery.fidelity.reconstruction import HalfCopy, precision
from flysurgery.fidelity.views import LEAST_AREA, OFTEN, Source, crops
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import monarch
from flysurgery.walker import Cut
from tests.support.composed import Composed


def ramp(height: int, width: int) -> torch.Tensor:
    """Channel 0 counts rows, channel 1 columns."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows, columns, torch.full_like(rows, 7)]).to(torch.uint8)


def test_views_of_pictures_of_different_sizes_stay_within_each_and_half_of_them_are_mirrored() -> None:
    images = [ramp(60, 90), ramp(100, 70), ramp(40, 40)]
    pictures = Pictures.of_images(images, (20, 20), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    torch.manual_seed(0)
    for number, image in enumerate(images):
        seen = crops(pictures, torch.full((400,), number), LEAST_AREA) * 255
        assert seen.shape == (400, 3, 20, 20) and torch.allclose(seen[:, 2], torch.tensor(7.0))
        for channel, side in enumerate(image.shape[1:]):
            low, high = (float(each) for each in seen[:, channel].aminmax())
            assert 0 <= low < 0.1 * side and 0.9 * side < high <= side - 1
        assert 0.4 < float((seen[:, 1, 0, 0] > seen[:, 1, 0, -1]).float().mean()) < 0.6
        assert torch.all(seen[:, 0, -1, 0] > seen[:, 0, 0, 0]), "none is upside down"


def test_bytes_are_normalized_and_inputs_are_not() -> None:
    flat = torch.full((3, 30, 30), 51, dtype=torch.uint8)
    pictures = Pictures.of_images([flat], (8, 8), (0.1, 0.2, 0.3), (0.5, 0.25, 0.1))
    seen = crops(pictures, torch.zeros(4, dtype=torch.long), LEAST_AREA)
    assert torch.allclose(seen[0, :, 0, 0], torch.tensor([0.2, 0.0, -1.0]), atol=1e-6)
    inputs = torch.randn(2, 1, 1, 1).expand(2, 3, 8, 8).contiguous()
    assert torch.allclose(crops(Pictures.of_inputs(inputs), torch.tensor([0, 1, 1]), LEAST_AREA), inputs[[0, 1, 1]])
    other = torch.randn(5, 3, 2, 8, 8)  # no images, which are given as they are
    assert torch.equal(views(Pictures.of_inputs(other), torch.tensor([4, 0]), 1.0), other[[4, 0]])


def test_views_differ_more_where_pictures_are_seen_often() -> None:
    gray = torch.full((3, 30, 30), 128, dtype=torch.uint8)
    source = Source(Pictures.of_images([gray, gray], (8, 8), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)), 500, torch.device("cpu"))
    assert float(source.draw().std()) < 1e-6, "one colour stays as it is"
    for views_of_each in (OFTEN, 9 * OFTEN):
        source.expect(2 * views_of_each)
        seen = source.draw()
        assert 0.1 < float(seen.std()) < 0.3 and float(seen.abs().max()) < 0.6


@pytest.mark.parametrize("fits", [True, False])
def test_views_are_drawn_from_all_pictures_and_from_those_that_do_not_fit_batch_by_batch(fits: bool) -> None:
    source = Source(Samples(torch.arange(9.0).view(9, 1, 1)).to_view(), 4, torch.device("cpu"))  # no images, which are given as they are
    source._fits = fits
    assert {x for _ in range(20) for x in source.draw().flatten().tolist()} == {float(number) for number in range(9) if number % 5 != 4}


class Chain(nn.Module):
    """Two blocks that add a linear of the stream, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.one(x)
        x = x + self.two(x)
        return self.head(x)


Pair = namedtuple("Pair", ("number", "tensor"))  # what some modules give

CUTS = (Cut("stem", "output", (2, 4), "start"), Cut("two", "input", (2, 4), "block"), Cut("head", "input", (2, 4), "block"))
PAIRED = (Composed(lambda self, x: Pair(3, self.inner(x)), inner=nn.Linear(4, 4)), Composed(lambda self, pair: pair.tensor))


@pytest.mark.parametrize("modules", [[nn.Linear(4, 4)], PAIRED], ids=["a tensor", "a tuple"])
def test_a_share_of_what_a_block_gives_is_the_teachers(modules: Sequence[nn.Module]) -> None:
    model, x = nn.Sequential(*modules, nn.Identity()), torch.randn(500, 4)
    cuts = (Cut("0", "output", (2, 4), "block"),)
    wanted = {0: torch.full((500, 4), 9.0)}
    with Pull(model, wanted, cuts, 0.5) as pull:
        plain = model(x)
        pull.taught = torch.tensor(0.3)
        mixed = model(x)
        with torch.no_grad():
            assert torch.equal(model(x), plain), "without gradients nothing changes"
    is_taught = mixed == 9.0
    assert 0.25 < float(is_taught.float().mean()) < 0.35 and torch.equal(mixed[~is_taught], plain[~is_taught])


@pytest.mark.parametrize("reach", [0.0, 1.0])
def test_a_block_has_the_gradient_of_its_own_error_and_by_reach_of_all_later_ones(reach: float) -> None:
    torch.manual_seed(0)
    student, teacher, x = Chain(), Chain(), torch.randn(6, 4)
    with Stream(teacher, CUTS) as theirs, torch.no_grad():
        teacher(x)
        wanted = dict(theirs.values)
    with Pull(student, wanted, CUTS, reach) as pull:
        with torch.no_grad():
            student(x)  # without gradients nothing is held against anything
        student(x).square().sum().backward()
        assert pull.error() > 0
    first = student.stem(x)
    middle = first + student.one(first)
    last = middle + student.two(middle)
    errors = [relative_error(each, wanted[number])[0] for number, each in ((1, middle), (2, last))]
    losses = [*errors, student.head(last).square().sum()]
    for name, own in (("one.weight", 0), ("two.weight", 1), ("two.bias", 1), ("head.weight", 2)):
        parameter, loss = student.get_parameter(name), sum(losses[own:], torch.zeros(())) if reach else losses[own]
        expected = torch.autograd.grad(loss, parameter, retain_graph=True)[0]
        assert parameter.grad is not None and torch.allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6), name
    assert student.stem.weight.grad is not None and not student.stem.weight.grad.any(), "what comes before the start does not learn"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(ButterflyLinear(monarch(24, 36, 3)), nn.LayerNorm(24), nn.Linear(24, 10))


def steps(network: nn.Module, optimizer: Muon, numbers: range) -> None:
    for number in numbers:
        torch.manual_seed(number)
        network(torch.randn(64, 36)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_moves_each_parameter_by_its_size_times_the_rate_and_each_block_on_its_own() -> None:
    network = model()
    with torch.no_grad():
        network[1].weight.mul_(8)
    before = copy.deepcopy(network)
    steps(network, Muon(parameter_groups(network), lr=1e-2), range(2))
    for (name, old), new in zip(before.named_parameters(), network.parameters(), strict=True):
        moved = float((new - old).detach().square().mean().sqrt())
        assert 0.2 < moved / (2e-2 * max(float(old.detach().square().mean().sqrt()), 1e-3)) < 3, name
    layer, factor = network[0], network[0].factors[0]
    old, factor.grad = factor.detach().clone(), torch.zeros_like(factor)
    factor.grad[:, :, :, 1] = torch.randn_like(factor[:, :, :, 1])
    Muon(parameter_groups(layer), lr=1.0).step()
    moved = (factor.detach() - old).abs().amax((0, 1, 2))
    assert moved[1] > 0 and moved[0] == moved[2] == 0


def test_a_vector_whose_gradient_is_rounding_error_stays_within_its_size_of_its_start() -> None:
    torch.manual_seed(0)
    bias = nn.Parameter(torch.full((8,), 4.0))
    optimizer, start = Muon([{"params": [bias], "size": 4.0}], lr=1e-2), bias.detach().clone()
    for _ in range(1000):
        bias.grad = torch.full_like(bias, 1e-9)
        optimizer.step()
    assert 2.0 < float((bias.detach() - start).abs().max()) < 4.5, "without a pull it moves by 40"


@pytest.mark.parametrize("rate", [1e-2, torch.tensor(1e-2)])
def test_a_state_that_is_loaded_goes_on_with_the_same_steps(rate: float | Tensor) -> None:
    whole, begun, resumed = networks = [model() for _ in range(3)]
    optimizers = [Muon(parameter_groups(each), lr=rate) for each in networks]
    steps(whole, optimizers[0], range(4))
    steps(begun, optimizers[1], range(2))
    resumed.load_state_dict(begun.state_dict())
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    steps(resumed, optimizers[2], range(2, 4))
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_gradients_come_back_in_float32_and_values_go_over() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    network.unused = nn.Linear(4, 4)
    network[0].bias.requires_grad_(False)
    half, x = HalfCopy(network), torch.randn(32, 8)
    half.model[:3](x.bfloat16()).float().square().sum().backward()
    half.give_gradients()
    found = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    assert list(found) == ["0.weight", "2.weight", "2.bias"] and all(parameter.grad is None for parameter in half.model.parameters())
    network.zero_grad()
    network[:3](x).square().sum().backward()
    for name, gradient in found.items():
        exact = network.get_parameter(name).grad
        assert gradient.dtype == torch.float32 and exact is not None and (gradient - exact).norm() < 0.02 * exact.norm()
    with torch.no_grad():
        network[2].weight.add_(1.0)
    half.take_values()
    assert torch.equal(half.model[2].weight, network[2].weight.bfloat16())


def test_models_that_mix_dtypes_run_under_autocast() -> None:
    """Some make their positions in the forward, in float32."""
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    mixing = Composed(lambda self, x: self.linear(x + torch.linspace(0, 1, 4)), linear=nn.Linear(4, 4))
    plain, mixes = HalfCopy(nn.Linear(4, 4)).model, HalfCopy(mixing).model
    assert isinstance(precision((plain,), x), contextlib.nullcontext)
    with precision((plain, mixes), x):
        assert mixes(x).dtype == torch.bfloat16


def test_hooks_are_gone_after_an_error() -> None:
    student, wide = Chain(), [Cut("one", "output", (2, 9), "block")]
    with pytest.raises(SurgeryError, match="one was traced with an output of"), Stream(student, wide):
        student(torch.randn(2, 4))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in student.modules())


def test_models_are_fused_early_in_a_run_that_is_long_enough() -> None:
    assert [Settings(minutes).fusing_seconds for minutes in (0.99, 1.0, 10.0)] == [0.0, 15.0, 150.0]
