"""Tables by recipes, on sizes that take seconds on a CPU: what is timed is right, what is not says why, and a second run goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

from flysurgery.bench.rows import read_table
from flysurgery.patterns import Pattern
from tests.recipes.conftest import RECIPES, RunRecipe, picture

SMALL = ("--model", "test_vit", "--arch", "monarch", "--seconds", "0.01")
ONE_LINEAR = (*SMALL, "--protocol", "paper", "--unit", "linear N x N", "--candidates", "dense,bmm")


def test_table_3_has_every_part_right_in_both_protocols(run_recipe: RunRecipe) -> None:
    rows = run_recipe("vits.py table3", *SMALL, "--candidates", "dense,layer,bmm,einsum,two launches")
    for protocol, parts in (("paper", 5), ("today", 4)):
        own = [row for row in rows if row["protocol"] == protocol]
        assert len({row["unit"] for row in own}) == parts
        for unit in {row["unit"] for row in own}:
            timed = {row["candidate"]: row for row in own if row["unit"] == unit and row["median_ms"]}
            assert timed.keys() >= {"dense", "dense again", "layer", "bmm", "einsum"}
            assert all(float(row["error"]) < 1e-5 for row in timed.values())
    by_name = {(row["protocol"], row["unit"], row["candidate"]): row for row in rows}
    assert {row["paper_ratio"] for row in rows} == {""}, "the paper has no such model"
    assert "CUDA" in by_name["paper", "block", "two launches"]["status"]
    # 400 rows of 64 features through (1,16,16,4),(4,16,16,1), float32: in, out and the weights of both factors
    linear = by_name["paper", "linear N x N", "layer"]
    assert int(linear["bytes_moved"]) == 4 * (2 * 100 * 64 + 2 * 1024)
    assert int(linear["flops"]) == 2 * 100 * 2 * 1024


def test_axes_and_candidates_are_options_and_a_second_run_adds(run_recipe: RunRecipe) -> None:
    first = run_recipe("vits.py table6", *ONE_LINEAR)
    assert [row["candidate"] for row in first] == ["dense", "dense again", "bmm"]
    both = run_recipe("vits.py table6", *ONE_LINEAR, "--batch", "1,2")
    assert both[: len(first)] == first and [row["batch"] for row in both[len(first) :]] == ["2"] * 3
    shares = {row["candidate"]: row["paper_ratio"] for row in run_recipe("vits.py table5", "--fresh", "--seconds", "0.01")}
    assert shares == {"dense": "", "dense again": "", "linears of FFNs": "0.46"}


def test_whole_models_and_training_are_right_before_they_count(run_recipe: RunRecipe) -> None:
    rows = {row["candidate"]: row for row in run_recipe("vits.py optimized", *SMALL, "--batch", "2", "--joules")}
    timed = {name for name, row in rows.items() if row["median_ms"]}
    assert timed == {"dense", "dense again", "dense optimized", "converted", "optimized"}
    assert all(float(rows[name]["error"]) < 1e-5 and rows[name]["share_of_bound"] for name in timed)
    assert int(rows["optimized"]["flops"]) < int(rows["dense"]["flops"]) == int(rows["dense optimized"]["flops"])
    assert {row["joules"] for row in rows.values()} == {""}, "a CPU has no counter"
    steps = run_recipe("vits.py training", *SMALL, "--fresh", "--steps", "1,2")
    for count in ("1", "2"):
        found = {row["candidate"]: row for row in steps if row["steps"] == count and row["median_ms"]}
        assert found.keys() == {"dense", "dense again", "converted"}
        assert all(float(row["error"]) < 0.05 for row in found.values())
    (row,) = run_recipe("vits.py finetune", *SMALL[:2], "--fresh")
    assert float(row["images_per_second"]) > 0 and float(row["start_seconds"]) > 0 and float(row["loss"]) > 0


def test_patterns_are_measured_in_both_layouts_and_the_claims_counted(run_recipe: RunRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("factors.py patterns", "--seconds", "0.01", "--only")
    rows = run_recipe(*small, "^1, 48, 48, 1,")
    timed = {(row["candidate"], row["layout"]) for row in rows if row["median_ms"]}
    names = ("dense", "bmm", "einsum", "bsr", "sparse", "bmm product only")
    assert timed >= {(name, layout) for name in names for layout in ("first", "last")}
    assert all(float(row["error"]) < 1e-6 for row in rows if row["median_ms"])
    assert "99.67 %, x6.57" in capsys.readouterr().out
    run_recipe(*small, "^1, 48, 48,", "--cases", "1:2", "--minutes", "1e-9")
    assert "1 of 1 measurements are left for the next run" in capsys.readouterr().out


def test_large_rivals_are_those_that_patterns_leave_out_and_are_timed_by_few_calls(
    run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paper_patterns as patterns
    from recipe import Place

    names = [case["candidate"] for case in patterns.large_cases()]
    assert names == ["dense"] * 30 + ["sparse"] * 481
    small = {"a": 1, "b": 1024, "c": 1024, "d": 4, "rows": 2, "mode": "fp32", "layout": "first"}
    runs = patterns.factor_case(Place(torch.device("cpu")), **small, candidates=("dense", "sparse", "bmm")).runs
    assert runs["sparse"] == "left out: the table large has it" and callable(runs["dense"]) and callable(runs["bmm"])
    rows = run_recipe("factors.py large", "--only", "sparse", "--cases", ":1")
    assert [(row["mode"], row["layout"], bool(row["median_ms"])) for row in rows] == [
        (mode, layout, mode == "fp32") for mode in ("fp32", "fp16", "bf16") for layout in ("first", "last")
    ]
    assert all(float(row["error"]) < 1e-6 and float(row["noise"]) >= 0 and row["status"].startswith(("ok", "noisy")) for row in rows[:2])
    assert all("MKL multiplies sparse matrices in float32" in row["status"] for row in rows[2:])
    monkeypatch.setattr("paper_patterns.large_row", None)
    assert run_recipe("factors.py large", "--only", "sparse", "--cases", ":1") == rows, "nothing is measured again"


def test_large_rivals_of_one_size_and_without_tf32_share_a_time_and_wrong_ones_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import paper_patterns as patterns
    from recipe import Place

    place, sizes = Place(torch.device("cpu")), {"a": 1, "b": 8, "c": 4, "d": 2, "rows": 5}
    alike = [{"a": 1, "b": 8, "c": 4, "d": 2}, {"a": 2, "b": 8, "c": 4, "d": 1}, {"a": 1, "b": 4, "c": 4, "d": 2}]
    monkeypatch.setattr(patterns, "time_patterns", lambda: alike)
    monkeypatch.setattr(patterns, "modes_of", lambda *_: ("fp32", "tf32"))
    monkeypatch.setattr(patterns, "MOST_ENTRIES", {"dense": {"fp32": 100}})
    own, other, *last = patterns.large_rows(place, **sizes, candidate="dense")
    assert len(last) == 2 and "a" not in own and [other[name] for name in "abcd"] == [2, 8, 4, 1]
    assert other["median_ms"] == own["median_ms"] > 0 and other["error"] is None and 0 < own["error"] < 1e-6
    assert other["status"] == f"{own['status']}: the time of (1,8,4,2), a matrix of the same size"
    fp32, _, tf32, _ = patterns.large_rows(place, **sizes, candidate="sparse")
    assert tf32["median_ms"] == fp32["median_ms"] and (tf32["mode"], tf32["layout"]) == ("tf32", "first")
    assert tf32["status"] == f"{fp32['status']}: the time of fp32, as CSR has no TF32"

    right = patterns.factor_run

    def wrong(name: str, *arguments: object) -> Callable[[torch.Tensor], torch.Tensor]:
        run = right(name, *arguments)  # pyright: ignore
        return run if name == "bmm" else lambda x: 1.01 * run(x)  # pyright: ignore

    def fails(*arguments: object) -> None:
        raise RuntimeError("no such kernel\nat line 3")

    for run, status in ((wrong, "wrong: relative error 0.01"), (fails, "failed: no such kernel")):
        monkeypatch.setattr(patterns, "factor_run", run)
        row = patterns.large_row(place, Pattern(2, 4, 4, 2), "sparse", 5, "fp32", "last")
        assert row["status"] == status and row["median_ms"] is None


def test_claims_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    from paper_patterns import energy_patterns, print_claims, time_patterns

    assert len(time_patterns()) == 627 and len(energy_patterns()) == 651
    print_claims(read_table(RECIPES / "results" / "patterns_h200.csv")[1])
    said = " ".join(capsys.readouterr().out.split())
    assert "fp32 cuda < best of bmm, einsum, bsr, dense, sparse 93.1% x1.80 627 88.10 %, x1.39" in said


def test_rivals_are_right_and_those_that_are_absent_say_why(run_recipe: RunRecipe) -> None:
    rows = run_recipe("factors.py rivals", "--rows", "40", "--width", "48", "--layer", "square")
    square = {row["candidate"]: row for row in rows}
    timed = {name for name, row in square.items() if row["median_ms"]}
    assert timed >= {"dense", "dense again", "butterfly", "low rank, two linears", "magnitude pruning, CSR, 0.25 of the weights"}
    assert timed >= {f"magnitude pruning, CSR, {how}, 0.1 of the weights, uneven rows" for how in ("batch-size-last", "transposes counted")}
    assert square["low rank, two linears"]["note"] == "rank 6"  # as many weights as (1,24,6,2),(2,6,24,1): 576
    assert "CUDA" in square["2:4 semi-structured"]["status"] and all(row["status"] for row in rows)
    assert all(float(row["error"]) < 1e-6 for row in square.values() if row["error"])


def test_calibration_keeps_the_digits(run_recipe: RunRecipe) -> None:
    dense, svd, calibrated = run_recipe("accuracy.py digits")
    assert dense["top1"] == "0.985" and float(svd["top1"]) < 0.97 < float(calibrated["top1"])
    for role in ("qkv", "ffn_in", "ffn_out"):
        assert float(calibrated[f"error_{role}"]) <= 0.7 * float(svd[f"error_{role}"])


def test_every_way_from_scratch_makes_the_same_updates(run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_recipe("from_scratch.py fractals", "--seconds", "0.01")
    dense, projected, monarch, low_rank, half, most = first
    assert [row["way"] for row in first[:4]] == ["dense", "dense, projected", "monarch", "low rank"]
    assert {row["updates"] for row in first} == {"4"} and {row["samples"] for row in first} == {"500"}
    sizes = [int(row["model_params"]) for row in (low_rank, monarch, projected, dense, half, most)]
    assert sizes[0] <= sizes[1] == sizes[2] < sizes[3] == sizes[4] == sizes[5]
    assert half["top1"] == most["top1"], "of two epochs both have one before their factors are multiplied out"
    assert [bool(row["forward_ms"]) for row in first] == [bool(row["top1_finetuned"]) for row in first] == [True] * 2 + [False] * 4
    monkeypatch.setattr("flysurgery.finetune.train", None)
    assert run_recipe("from_scratch.py fractals") == first, "nothing is trained again"


KERNELS = ("attention", "attention_gradients", "hidden_gradients", "norm_linear", "factor_gradients", "fused_ffn", "few_rows")


@pytest.mark.parametrize("name", KERNELS)
def test_every_case_of_a_kernel_can_be_made(name: str) -> None:
    """On a CPU and few rows: each candidate that runs there gives what the truth says, and each has its work."""
    from kernel_tables import TABLES
    from recipe import Place

    assert tuple(TABLES) == KERNELS
    table, place = TABLES[name], Place(torch.device("cpu"), quick=False)
    for head in table.heads(place, mode=("fp32",)):
        head |= {"rows": 2 * head["tokens"] if name.startswith("attention") else 197 if name == "few_rows" else 16}
        case = table.measure(place, **head, **({"candidates": table.candidates} if table.candidates else {}))
        assert case.baseline in case.runs
        for candidate, run in case.runs.items():
            assert case.work(candidate).bytes_moved > 0
            if not isinstance(run, str) and candidate != "cudnn":
                torch.testing.assert_close(run(case.input(candidate))[: len(case.truths)].double(), case.truths, rtol=1e-3, atol=1e-3)


def test_a_quick_table_of_a_kernel_is_timed_once(run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.bench.ceilings.PRODUCT_SIZE", {"cpu": 256})
    rows = run_recipe("kernel_tables.py norm_linear", "--seconds", "0.01")
    assert {row["candidate"].removesuffix(" again") for row in rows if row["median_ms"]} == {"dense"}
    for row in rows:
        assert row["median_ms"] or row["status"] in ("needs CUDA", "left out on a CPU")
    monkeypatch.setattr("flysurgery.bench.measuring.measure", None)
    assert run_recipe("kernel_tables.py norm_linear") == rows, "nothing is measured again"


@pytest.fixture
def given(tmp_path: Path) -> tuple[object, ...]:
    """Eight photographs, and as ``--save`` keeps them a backbone of two blocks and a decoder of random weights."""
    from focus_model import BASE, BASE_ARGS, Decoder, FocusModel, save_focus

    (tmp_path / "p").mkdir()
    for number in range(8):
        picture(number).save(tmp_path / "p" / f"{number}.png")
    torch.manual_seed(0)
    backbone = timm.create_model(BASE, pretrained=False, **BASE_ARGS, depth=2, embed_dim=48, num_heads=2)
    for block in backbone.blocks:  # pyright: ignore
        for scale in (block.ls1, block.ls2):
            torch.nn.init.ones_(scale.gamma)
    save_focus(FocusModel(backbone, Decoder(48)).eval(), tmp_path / "w")
    return "--photographs", tmp_path / "p", "--weights", tmp_path / "w", "--judging", "3", "--minutes", "0.02"


def test_rows_of_real_weights(run_recipe: RunRecipe, given: tuple[object, ...], tmp_path: Path) -> None:
    ways = ("monarch 4 plain", "monarch 4 calibrated", "monarch 4 reconstructed", "unstructured calibrated")
    dense, plain, calibrated, reconstructed, pruned = first = run_recipe("real_weights.py", *given, "--ways", ",".join(ways))
    assert [row["way"] for row in first] == ["dense", *ways] and reconstructed["minutes"] == "0.02"
    assert float(dense["cls"]) == float(dense["patch"]) == float(dense["nearest"]) == 1 and float(dense["relative_error"]) == 0
    assert float(plain["cls"]) < float(calibrated["cls"]) < 1
    assert float(plain["params"]) == float(calibrated["params"]) == float(pruned["params"]) < float(dense["params"])
    plot = tmp_path / "curve.png"
    second = run_recipe("real_weights.py", *given, "--ways", ",".join(ways), "--seeds", "2", "--plot", plot)
    assert second[:5] == first and plot.stat().st_size > 5000, "rows that are there stay"
    assert [(row["way"], row["seed"]) for row in second[5:]] == [(way, "1") for way in ways[1:]], "what is random"


def test_butterflies_recover_every_transform_and_rivals_of_equal_size_do_not(run_recipe: RunRecipe) -> None:
    rows = run_recipe("transforms.py recovered", "--n", "64")
    errors = {(row["transform"], row["candidate"]): float(row["rmse"]) for row in rows}
    ours = {key for key in errors if key[1].startswith("butterfly")}
    assert {name for name, _ in ours} == {"dft", "dct", "dst", "hadamard", "hartley", "convolution"} and len(ours) == 9
    assert all(errors[key] < 1e-6 for key in ours) and all(errors[key] > 5e-3 for key in errors.keys() - ours)
    rows = run_recipe("transforms.py times", "--n", "2,64", "--rows", "3", "--fresh")
    assert [row["candidate"] for row in rows if row["n"] == "64"] == ["fft", "fft again", "dense", "radix 2", "radix 8"]
    assert all(row["status"].startswith(("ok", "noisy")) and float(row["median_ms"]) > 0 for row in rows)


def test_rows_fill_the_places_that_were_left_out(run_program: Callable[..., None], tmp_path: Path) -> None:
    results, rows = tmp_path / "results.csv", tmp_path / "rows.csv"
    head = "a,mode,candidate,launch,status,median_ms,ratio_to_dense,date,device,commit\n"
    results.write_text(
        f'{head}1,fp32,dense,graph,"left out: 9 entries, zero",,,d,H200,x\n1,fp32,bmm,graph,ok,2.0,,d,H200,x\n'
        "2,fp32,dense,graph,ok,3.0,1,d,H200,x\n3,fp32,dense,graph,left out: many,,,d,H200,x\n4,fp32,dense,graph,left out,,,d,H200,x\n"
    )
    rows.write_text(
        "a,candidate,mode,launch,status,median_ms,date,device,driver,commit\n1,dense,fp32,eager,ok,5.0,e,H200,9,y\n"
        "2,dense,fp32,eager,ok,7.0,e,H200,9,y\n3,dense,fp32,eager,ok,7.0,e,A100,9,y\n5,dense,fp32,eager,ok,7.0,e,H200,9,y\n"
    )
    before = results.read_text()
    run_program("publish.py", rows, "--fill", "--into", results)
    assert results.read_text() == before.replace('graph,"left out: 9 entries, zero",,,d,H200,x', "eager,ok,5.0,,e,H200,y")


def test_rows_are_published_beside_those_of_other_tables(run_program: Callable[..., None], tmp_path: Path) -> None:
    results, rows = tmp_path / "results.csv", tmp_path / "rows.csv"
    results.write_text("table,unit,kept,device,commit\ntable3,FFN,7,an H200,a\ntable6,gone,,a CPU,a\n")
    rows.write_text("model,unit,flops,device,driver,commit\nm,N x N,9,a CPU,8,b\n")
    run_program("publish.py", rows, "--table", "table6", "--into", results)
    columns, found = read_table(results)
    assert columns == ["table", "unit", "kept", "model", "device", "commit"]
    assert [(row["table"], row["unit"], row["kept"]) for row in found] == [("table3", "FFN", "7"), ("table6", "N x N", "")]
