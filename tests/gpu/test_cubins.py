"""The cache of compiled kernels: content addressed, shared by processes, never in the way."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from flysurgery.errors import BackendError
from flysurgery.gpu import cache_folder
from flysurgery.gpu import compile as compilation
from flysurgery.gpu.compile import compile_cubin, cubin_folder, cubin_key, find_cubin

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
    seen = list[str]()

    def counted(source: str, *arguments: Any, **options: Any) -> object:
        seen.append(source)
        return compile_cubin(source, *arguments, **options)

    monkeypatch.setattr(compilation, "compile_cubin", counted)
    return seen


def find(step: int = 3, refresh: bool = False) -> bytes:
    return find_cubin("add.cu", {"STEP": step}, arch="sm_80", name="add", refresh=refresh)


def test_compiles_once_and_a_refresh_replaces_a_damaged_file(kernels: Path, cache: Path, compilations: list[str]) -> None:
    good = find()
    assert good.startswith(b"\x7fELF")
    assert find() == good
    assert compilations == ["add.cu"]
    (entry,) = (path for path in cubin_folder().rglob("*") if path.is_file())
    entry.write_bytes(b"not a cubin")
    assert find() == b"not a cubin"
    assert find(refresh=True) == good
    assert find() == good


def test_all_that_matters_is_in_the_key_and_nothing_else(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(step: int = 3, arch: str = "sm_80") -> str | bytes:
        return cubin_key("add.cu", {"STEP": step}, arch)

    keys = [key(), key(4), key(arch="sm_90a")]
    (kernels / "scale.cuh").write_text('#include "deep.cuh"\n' + HEADER)
    for name in ("deep.cuh", "scale.cuh", "add.cu"):
        (kernels / name).write_text((kernels / name).read_text() + "\n" if (kernels / name).exists() else "")
        keys.append(key())
    assert len(set(keys)) == len(keys)
    (kernels / "other.cuh").write_text("\n")
    moved = kernels.rename(kernels.with_name("elsewhere"))
    monkeypatch.setattr(compilation, "kernel_path", lambda: moved)
    assert key() == keys[-1]


def test_an_unwritable_folder_costs_one_warning(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLYSURGERY_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cache_folder, "_warned", set())
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
    for slow, steps in ((2.0, (1,)), (0.0, (2, 2))):
        monkeypatch.setattr(compilation, "_SLOW_SECONDS", slow)
        for step in steps:
            find(step)
    (said,) = capsys.readouterr().err.splitlines()
    assert "add.cu" in said and "sm_80" in said and " s;" in said


def test_errors_name_the_source_and_the_cause(kernels: Path) -> None:
    for source, step, name, said in (
        ("add.cu", "nonsense", "add", r"add\.cu.*identifier \"nonsense\""),
        ("add.cu", 1, "subtract", r"no extern .* 'subtract'"),
        ("missing.cu", 1, "add", r"missing\.cu"),
    ):
        with pytest.raises(BackendError, match=said):
            compile_cubin(source, {"STEP": step}, arch="sm_80", name=name)


SPILL = """extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* y) {
  float v[64];
  for (int n = 0; n < 64; ++n) v[n] = y[n * 37 + threadIdx.x];
  __syncthreads();
  for (int n = 0; n < 64; ++n) y[n * 53 + threadIdx.x] = v[(63 - n)] * v[n];
}
"""
SERIAL = """extern "C" __global__ void serial(float* y, unsigned long long d) {
  float s[4] = {y[0], y[1], y[2], y[3]};
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %4, 1, 1, 1, 0, 0;"
               : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]) : "l"(d));
  s[0] += 1.0f;
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  for (int n = 0; n < 4; ++n) y[n] = s[n];
}
"""


def test_the_report_counts_spills_and_notices_serialized_wgmma(kernels: Path) -> None:
    (kernels / "spill.cu").write_text(SPILL)
    (kernels / "serial.cu").write_text(SERIAL)
    spilled = compile_cubin("spill.cu", {}, arch="sm_80", name="spill")
    assert spilled.spill_bytes > 0
    lean = compile_cubin("add.cu", {"STEP": 1}, arch="sm_80", name="add")
    assert lean.spill_bytes == 0 and lean.serialized == ()
    assert compile_cubin("serial.cu", {}, arch="sm_90a", name="serial").serialized
