"""The cache of compiled kernels: content addressed, shared by processes, never in the way."""

from __future__ import annotations

import io
import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from flysurgery.errors import BackendError
from flysurgery.gpu import compile as compilation
from flysurgery.gpu import cubins, folder
from flysurgery.gpu.compile import compile_cubin, cubin_key, kernel_path
from flysurgery.gpu.cubins import cubin_folder, find_cubin

SOURCE = 'extern "C" __global__ void add(float* y) { y[threadIdx.x] += STEP * scale(threadIdx.x); }\n'
HEADER = "__device__ float scale(int n) { return n * 2.0f; }\n"


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources of our own in place of the package's."""
    sources = tmp_path / "kernels"
    sources.mkdir()
    (sources / "add.cu").write_text('#include "scale.cuh"\n' + SOURCE)
    (sources / "scale.cuh").write_text(HEADER)
    monkeypatch.setattr(compilation, "kernel_path", lambda: sources)
    return sources


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that are really compiled, in order."""
    seen: list[str] = []

    def counted(source: str, *arguments: object, **options: object) -> object:
        seen.append(source)
        return compile_cubin(source, *arguments, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(cubins, "compile_cubin", counted)
    return seen


def find(step: int = 3, arch: str = "sm_80") -> bytes:
    return find_cubin("add.cu", {"STEP": step}, arch=arch, name="add")


def test_the_sources_are_found() -> None:
    assert (kernel_path() / "fused_linear.cu").is_file()


def test_compiles_once(kernels: Path, cache: Path, compilations: list[str]) -> None:
    first = find()
    assert first.startswith(b"\x7fELF")
    assert find() == first
    assert compilations == ["add.cu"]


def test_all_that_matters_is_in_the_key(kernels: Path) -> None:
    keys = [
        cubin_key("add.cu", {"STEP": 3}, "sm_80"),
        cubin_key("add.cu", {"STEP": 4}, "sm_80"),
        cubin_key("add.cu", {"STEP": 3}, "sm_90a"),
    ]
    (kernels / "scale.cuh").write_text(HEADER.replace("2.0f", "3.0f"))
    keys.append(cubin_key("add.cu", {"STEP": 3}, "sm_80"))
    (kernels / "add.cu").write_text((kernels / "add.cu").read_text() + "\n")
    keys.append(cubin_key("add.cu", {"STEP": 3}, "sm_80"))
    assert len(set(keys)) == len(keys)


def test_only_what_is_included_is_in_the_key(kernels: Path) -> None:
    (kernels / "scale.cuh").write_text('#include "deep.cuh"\n' + HEADER)
    (kernels / "deep.cuh").write_text("")
    before = cubin_key("add.cu", {"STEP": 3}, "sm_80")
    (kernels / "other.cuh").write_text("\n")
    assert cubin_key("add.cu", {"STEP": 3}, "sm_80") == before
    (kernels / "deep.cuh").write_text("\n")
    assert cubin_key("add.cu", {"STEP": 3}, "sm_80") != before


def test_the_folder_of_the_sources_does_not_matter(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cubin_key("add.cu", {"STEP": 3}, "sm_80")
    moved = kernels.rename(kernels.with_name("elsewhere"))
    monkeypatch.setattr(compilation, "kernel_path", lambda: moved)
    assert cubin_key("add.cu", {"STEP": 3}, "sm_80") == before


def test_refresh_replaces_a_damaged_file(kernels: Path, cache: Path, compilations: list[str]) -> None:
    good = find()
    (entry,) = (path for path in cubin_folder().rglob("*") if path.is_file())
    entry.write_bytes(b"not a cubin")
    assert find() == b"not a cubin"
    assert find_cubin("add.cu", {"STEP": 3}, arch="sm_80", name="add", refresh=True) == good
    assert find() == good


def test_an_unwritable_folder_costs_one_warning(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLYSURGERY_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(folder, "_warned", set())
    with pytest.warns(RuntimeWarning, match="FLYSURGERY_CACHE") as warned:
        assert find().startswith(b"\x7fELF")
        assert find(4).startswith(b"\x7fELF")
    assert len(warned) == 1
    assert len(compilations) == 2


def _find_into(results: multiprocessing.Queue[bytes], barrier: Barrier) -> None:
    barrier.wait(60)
    results.put(find())


def test_processes_that_compile_at_once_agree(kernels: Path, cache: Path) -> None:
    forks = multiprocessing.get_context("fork")
    results, barrier = forks.Queue(), forks.Barrier(3)
    running = [forks.Process(target=_find_into, args=(results, barrier)) for _ in range(3)]
    for process in running:
        process.start()
    assert len({results.get(timeout=60) for _ in running}) == 1
    for process in running:
        process.join(60)
        assert process.exitcode == 0
    assert len([path for path in cubin_folder().rglob("*") if path.is_file()]) == 1


def test_a_slow_compilation_says_so(
    kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find(1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(cubins, "_SLOW_SECONDS", 0.0)
    find(2)
    said = capsys.readouterr().err
    assert "add.cu" in said and "sm_80" in said and " s;" in said
    find(2)
    assert capsys.readouterr().err == ""


def test_errors_name_the_source_and_the_cause(kernels: Path) -> None:
    with pytest.raises(BackendError, match=r"add\.cu.*identifier \"nonsense\""):
        compile_cubin("add.cu", {"STEP": "nonsense"}, arch="sm_80", name="add")
    with pytest.raises(BackendError, match=r"no extern .* 'subtract'"):
        compile_cubin("add.cu", {"STEP": 1}, arch="sm_80", name="subtract")
    with pytest.raises(BackendError, match=r"missing\.cu"):
        compile_cubin("missing.cu", {}, arch="sm_80", name="add")


def test_the_report_counts_spills(kernels: Path) -> None:
    (kernels / "spill.cu").write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* y) {\n'
        "  float v[64];\n"
        "  for (int n = 0; n < 64; ++n) v[n] = y[n * 37 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "  for (int n = 0; n < 64; ++n) y[n * 53 + threadIdx.x] = v[(63 - n)] * v[n];\n"
        "}\n"
    )
    spilled = compile_cubin("spill.cu", {}, arch="sm_80", name="spill")
    assert spilled.registers <= 32 and spilled.spill_bytes > 0
    lean = compile_cubin("add.cu", {"STEP": 1}, arch="sm_80", name="add")
    assert lean.spill_bytes == 0 and lean.serialized == () and 0 < lean.registers < 32


def test_a_missing_report_is_no_error(kernels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when NVRTC has the code from a cache of its own."""
    monkeypatch.setattr(compilation.io, "StringIO", lambda: _Silent())
    assert compile_cubin("add.cu", {"STEP": 1}, arch="sm_80", name="add").registers == 0
    assert find().startswith(b"\x7fELF")


class _Silent(io.StringIO):
    def getvalue(self) -> str:
        return "add.cu(1): warning: something else"


def test_serialized_wgmma_is_noticed(kernels: Path) -> None:
    instruction = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %4, 1, 1, 1, 0, 0;"
    (kernels / "serial.cu").write_text(
        'extern "C" __global__ void serial(float* y, unsigned long long d) {\n'
        "  float s[4] = {y[0], y[1], y[2], y[3]};\n"
        '  asm volatile("wgmma.fence.sync.aligned;");\n'
        f'  asm volatile("{instruction}" : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]) : "l"(d));\n'
        "  s[0] += 1.0f;\n"
        '  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");\n'
        "  for (int n = 0; n < 4; ++n) y[n] = s[n];\n"
        "}\n"
    )
    assert compile_cubin("serial.cu", {}, arch="sm_90a", name="serial").serialized
