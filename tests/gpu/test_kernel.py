"""Launch parameters, without a launch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flysurgery.errors import BackendError
from flysurgery.gpu import kernel as kernels
from flysurgery.gpu.kernel import Kernel, Parameters


def test_a_wrong_number_of_arguments_is_refused() -> None:
    with pytest.raises(BackendError, match="some takes 2 arguments, got 3"):
        Parameters([8, 8]).fill((1, 2, 3), "some")


class Config(SimpleNamespace):
    """Stands in for what ``launch_config`` gives."""

    def __init__(self, sizes: tuple[int, ...], early: bool = False) -> None:
        names = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")
        super().__init__(**dict(zip(names, sizes, strict=True)), early=early, hStream=None)


class Refused(Kernel):
    """Whose launches the driver refuses with these results, one after the other."""

    def __init__(self, *names: str) -> None:
        self.name, self.device_index, self.function = "some", 3, 0
        self.results = [SimpleNamespace(name=name) if name else 0 for name in names]
        self._launch_as = lambda *arguments: (self.results.pop(0),)


def test_a_refused_launch_is_told_and_a_missing_context_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(kernels, "_make_context_current", made.append)
    config = Config((1, 2, 3, 4, 5, 6, 7))
    Refused("CUDA_ERROR_INVALID_CONTEXT", "").queue(config, 0)
    assert made == [3]
    for names in (["CUDA_ERROR_INVALID_VALUE"], ["CUDA_ERROR_INVALID_CONTEXT", "CUDA_ERROR_INVALID_VALUE"]):
        with pytest.raises(BackendError, match=r"some was not launched: CUDA_ERROR_INVALID_VALUE with grid \(1, 2, 3\), .* 7 bytes"):
            Refused(*names).queue(config, 0)
