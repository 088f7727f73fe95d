"""What recipes compute themselves: measures, joules, weights, photographs and crops, transforms, on data of known answers."""

import copy
import io
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image
from torch import nn

from flysurgery import surgery
from flysurgery.bench.ceilings import work_of
from flysurgery.bench.variants import by_definition
from flysurgery.calibration import Samples, inputs_of
from flysurgery.checkpoint import build_base
from flysurgery.errors import FlysurgeryError, OptionError
from flysurgery.factors import bit_reversal
from flysurgery.patterns import square_dyadic
from flysurgery.projection import metric_of, project
from tests.recipes.conftest import RECIPES, picture

BASE = "vit_tiny_patch16_224"


def test_output_errors_are_those_of_the_layers() -> None:
    import accuracy

    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    dense, model = (build_base(BASE, arguments).eval() for _ in range(2))
    model.load_state_dict(dense.state_dict())
    images = torch.randn(8, 3, 16, 16)
    plan, _ = accuracy.convert(model, surgery.plan(dense, "monarch", base=BASE, base_args=arguments), "svd", images)
    found = accuracy.output_errors(dense, model, plan, images)
    block, new = dense.get_submodule("blocks.0"), model.get_submodule("blocks.0")
    with torch.no_grad():
        x = block.norm1(dense.pos_drop(dense._pos_embed(dense.patch_embed(images))))  # pyright: ignore
        wanted = block.attn.qkv(x)  # pyright: ignore
        lost = new.attn.qkv(x) - wanted  # pyright: ignore
    assert found["qkv"] == pytest.approx(float(lost.norm() / (wanted - block.attn.qkv.bias.detach()).norm()), rel=1e-4)  # pyright: ignore
    assert found.keys() == {"qkv", "ffn_in", "ffn_out"}


@pytest.mark.parametrize("protocol", ["paper", "today"])
def test_parts_are_in_eval_mode_and_have_fewer_operations_than_dense(protocol: str) -> None:
    """In training mode ``optimize`` would leave them as they are. The model's blocks have 3 hidden units a feature."""
    from vit_units import parts
    from vits import dense_copy

    found = parts(protocol, "test_vit", "monarch")
    for unit in found.values():
        module = unit.make()
        assert not any(each.training for each in module.modules())
        assert protocol == "paper" or len(module(torch.randn(1, *unit.shape))) == 1
    model, x = found["model"].make(), torch.zeros(2, *found["model"].shape)
    assert work_of(by_definition(model), x).flops < work_of(dense_copy(model), x).flops
    with pytest.raises(OptionError, match="resnet18"):
        parts(protocol, "resnet18", "gonon")


class Mark:
    """A point in time on a device that does all at once."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Mark") -> float:
        return 1e3 * (other.seconds - self.seconds)


def test_power_is_that_between_steps_of_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    import recipe

    meter = object.__new__(recipe.EnergyMeter)
    # 100 watts, of a counter that is updated every 20 ms, and two inputs a time in work of 2 ms
    monkeypatch.setattr(meter, "joules", lambda: 100 * (time.perf_counter() // 0.02 * 0.02))
    monkeypatch.setattr(recipe, "mark", Mark)
    monkeypatch.setattr(recipe, "between_events", lambda *_: lambda: 2.0)
    spent: list[float] = []

    def work() -> None:
        start = time.perf_counter()
        time.sleep(2e-3)
        spent.append(time.perf_counter() - start)

    monkeypatch.setattr(recipe, "all_calls", lambda *_: (work, "eager"))
    monkeypatch.setattr(recipe, "rotating", lambda x: [x, x])
    meter.seconds = 0.3
    assert meter.measure(lambda x: x, torch.zeros(1)) == pytest.approx(100 * sum(spent) / len(spent) / 2, rel=0.25)
    monkeypatch.setattr(recipe, "STUCK_SECONDS", 0.01)
    monkeypatch.setattr(meter, "joules", lambda: 1.0)
    with pytest.raises(OptionError, match="energy counter stood still"):
        meter.measure(lambda x: x, torch.zeros(1))


def test_a_wrong_mapping_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import focus_model

    monkeypatch.setattr(focus_model, "outputs_of", lambda *_: (torch.ones(1), torch.zeros(1)))
    monkeypatch.setattr(focus_model, "seen", lambda *_: (torch.full((1,), torch.nan), torch.zeros(1)))
    with pytest.raises(FlysurgeryError, match="the mapping is wrong"):
        focus_model.check(b"", SimpleNamespace(backbone=None), torch.zeros(1))  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(FlysurgeryError, match="onnx is needed to read the wheel"):
        focus_model.from_onnx(b"")


def test_measures_of_known_answers() -> None:
    from focus_model import compare, correlation, nearest, overlap

    tokens = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[0.9, 0.1], [1.0, 1.0]], [[0.0, 1.0], [3.0, 0.0]]])
    maps = torch.rand(3, 1, 4, 4)
    turned = compare((-tokens, 1 - maps), (tokens, maps))
    assert [turned[name] for name in ("cls", "relative_error", "correlation")] == pytest.approx([-1, 2, -1], abs=1e-4)
    assert nearest(tokens[:, 0]).tolist() == [1, 0, 1]
    half, full, none = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)
    half[..., 0] = 1
    assert overlap(torch.cat([half, none]), torch.cat([full, none])) == 0.5, "where neither has a pixel there is nothing to judge"
    assert overlap(none, none) is None and correlation(full, half) == 0


def test_pruning_keeps_the_two_largest_of_four() -> None:
    from weight_ways import RIVALS, ways_of

    assert [way.name for way in ways_of("2:4")] == ["dense", "2:4"], "the name of a way means no other of its family"
    model = nn.Sequential(nn.Linear(8, 2), nn.Linear(8, 2))
    weight = torch.tensor([[1.0, -4, 3, 2, 0.5, 0.1, -0.2, 0.3], [0, 0, 0, 7, -1, 1, -2, 2]])
    model.load_state_dict(model.state_dict() | {"0.weight": weight, "1.weight": weight})
    RIVALS["2:4"].convert(model, {"1": 8})
    assert torch.equal(model.get_parameter("0.weight"), weight)
    first, second = model.get_parameter("1.weight").tolist()
    assert first == pytest.approx([0, -4, 3, 0, 0.5, 0, 0, 0.3]) and second == [0, 0, 0, 7, 0, 0, -2, 2]
    assert RIVALS["2:4"].params(model, {"1": 3}) == 2 * 18 - 8 and RIVALS["int8"].params(model, {"1": 3}) == 36


def test_unstructured_pruning_keeps_as_many_weights_as_the_butterfly_and_a_fit_keeps_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    from weight_ways import FAMILIES, RIVALS, largest, linears_of, prune_to_inputs, two_of_four

    torch.manual_seed(0)
    dense = timm.create_model("test_vit", num_classes=0, img_size=32, patch_size=8, depth=2)
    linears, samples = linears_of(dense), Samples(torch.randn(10, 3, 32, 32))
    model, fitted, reconstructed = (copy.deepcopy(dense) for _ in range(3))
    RIVALS["unstructured"].convert(model, linears)
    monkeypatch.setattr("flysurgery.fidelity.reconstruction.affordable", lambda *_: 20)
    prune_to_inputs(fitted, linears, largest, samples)
    done = prune_to_inputs(reconstructed, linears, largest, samples, minutes=5)
    last = after = torch.empty(0)
    for name, kept in linears.items():
        old, new, after, last = (each.get_parameter(f"{name}.weight").detach() for each in (dense, model, fitted, reconstructed))
        assert new.count_nonzero() == after.count_nonzero() == kept
        assert torch.equal(new[new != 0], old[new != 0]) and float(old[new == 0].abs().max()) <= float(new[new != 0].abs().min())
        assert torch.equal(last != 0, after != 0), "masked weights stay zero"
    assert done is not None and done.kept and not torch.equal(last, after) and type(reconstructed.blocks[0].mlp.fc2) is nn.Linear  # pyright: ignore
    surgery.apply(surgery.plan(dense, **FAMILIES["monarch 4"]), dense)
    assert RIVALS["unstructured"].params(model, linears) == sum(each.numel() for each in dense.parameters())
    prune_to_inputs(model, linears, two_of_four, samples)
    assert all(int((model.get_parameter(f"{name}.weight").unflatten(1, (-1, 4)) != 0).sum(2).max()) == 2 for name in linears)


def test_a_fit_of_kept_weights_is_the_least_squares_solution() -> None:
    from weight_ways import largest, prune_to_inputs

    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 5))
    x = torch.randn(400, 6) @ torch.randn(6, 6) + torch.randn(6)
    model = copy.deepcopy(dense)
    prune_to_inputs(model, {"0": 12}, largest, Samples(x))
    moments = inputs_of(dense, {"0": 1}, Samples(x))["0"].fit
    wanted, found = (each.get_parameter("0.weight").detach() for each in (dense, model))
    error = (wanted - found).double() @ metric_of(moments, bias=True).gram
    assert float(error[found != 0].abs().max()) < 1e-4 < float(error.abs().max())
    assert torch.allclose(dense(moments.mean.float()), model(moments.mean.float()), atol=1e-5)


@pytest.mark.gpu
def test_sparse_weights_multiply_as_a_dense_matrix_with_zeros() -> None:
    from weight_ways import RIVALS

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64)).cuda().half().requires_grad_(False)
    RIVALS["2:4"].convert(model, {"0": 0, "2": 0})
    x = torch.randn(4, 64, 64, device="cuda", dtype=torch.half)
    with torch.inference_mode():
        wanted = copy.deepcopy(model).double()(x.double())
        RIVALS["2:4"].store(model, ["0", "2"])
        assert model[0](x).is_contiguous()
        assert float((model(x) - wanted).norm() / wanted.norm()) < 5e-3


SPARSE = """
import torch
from sparse_rows import multiply_by_rows
for dtype in (torch.float32, torch.float16):
    weight, bias, x = (torch.randn(size).to(dtype) for size in ((128, 40), (128,), (40, 70)))
    weight[weight.abs() < torch.linspace(0, 3, 128)[:, None]] = 0
    torch.testing.assert_close(multiply_by_rows(weight, bias)(x), (weight.double() @ x.double() + bias.double()[:, None]).to(dtype))
"""


def test_sparse_rows_are_summed_in_float32() -> None:
    """Interpreted, in a process of its own: some rows are full, some empty, and columns of the last program lie outside."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(RECIPES), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", SPARSE], check=True, env=environment)


def encoded(image: Image.Image, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def test_a_quick_run_writes_both_folders(run_program: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "scikit_image-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("skimage/data/coffee.png", encoded(picture(1)))
        wheel.writestr("skimage/data/camera.png", encoded(picture(2)))
        wheel.writestr("skimage/other/camera2.png", encoded(picture(3)))
    for _ in range(2):
        run_program("photographs.py", "photographs", "--quick", "--packages", tmp_path)
    files = {part: [file.name for file in (tmp_path / "photographs" / part).iterdir()] for part in ("fit", "judge")}
    assert files["fit"] == ["scikit-image__skimage__data__camera.jpg"]
    assert files["judge"] == ["scikit-image__skimage__data__coffee.jpg"]
    assert "scikit-image: 2 of 15 pictures" in capsys.readouterr().out
    fit, judge = ((RECIPES / f"photographs_{part}.txt").read_text().split() for part in ("fit", "judge"))
    assert (len(fit), len(judge), len({*fit, *judge})) == (616, 41, 657)


def test_held_out_samples_show_other_photographs() -> None:
    from photographs import order

    for count, files in ((40, 10), (7, 2), (4, 3)):
        shown = order(count, files, seed=1)
        samples = Samples(torch.arange(count)[:, None].float())
        held, fitted = ({shown[int(each)] for each in torch.cat(list(part())).flatten()} for part in (samples.held_out, samples.fit))
        assert held and fitted and not held & fitted
    assert len(set(order(40, 10, seed=1))) == 10, "all are shown"


def test_rounded_choices_are_permutations_and_others_mix_them() -> None:
    import transforms

    row = torch.arange(16.0).view(1, 1, 16)
    only_a, only_c = (torch.tensor(choice).expand(1, 3, 3) for choice in ([1.0, 0, 0], [0.0, 0, 1]))
    assert torch.equal(transforms.permute(row, only_a)[0, 0].long(), bit_reversal(16))
    assert transforms.permute(row[..., :8], only_c[:, :1])[0, 0].tolist() == [0, 1, 2, 3, 7, 6, 5, 4]
    half = transforms.permute(row, only_a[:, :1] * torch.tensor([0.25, 0, 0]))
    assert torch.equal(half, 0.75 * row + 0.25 * torch.cat((row[..., ::2], row[..., 1::2]), -1))


def test_bit_reversal_is_learned_with_the_fourier_transform() -> None:
    import transforms

    dft = torch.fft.fft(torch.eye(8, dtype=torch.complex128), norm="ortho")
    relaxed, errors, choices = transforms.learn(dft, 1, starts=8, steps=800, seed=0)
    best = int(errors.argmin())
    assert float(errors[best]) < 1e-4 < float(relaxed.min())
    assert choices[best, 0, :, 0].tolist() == [1, 1], "the even entries come first on both levels"
    order = transforms.permute(torch.arange(8.0).view(1, 1, 8), choices[best].float())[0, 0].long()
    assert project(dft[:, order], square_dyadic(8)).relative_error < 1e-10, "butterflies absorb the reversals of halves"
    assert project(dft, square_dyadic(8)).relative_error > 0.1
