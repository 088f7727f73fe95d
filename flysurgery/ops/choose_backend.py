"""The backends, which of them runs a problem, and why."""

from dataclasses import dataclass

from flysurgery.errors import BackendError
from flysurgery.ops.backend import Backend, Problem
from flysurgery.ops.backends.chunked import ChunkedBackend
from flysurgery.ops.backends.cuda import CudaBackend
from flysurgery.ops.backends.pytorch import BmmBackend, BsrBackend, ConvolutionBackend, DenseBackend, EinsumBackend, SparseBackend

_FASTEST_FIRST = CudaBackend, ConvolutionBackend, ChunkedBackend, EinsumBackend, BmmBackend, DenseBackend, BsrBackend, SparseBackend
BACKENDS: dict[str, Backend] = {kind.name: kind() for kind in _FASTEST_FIRST}


@dataclass(frozen=True)
class Verdict:
    """What one backend says about a problem: ``obstacle`` if it cannot run it, ``advice`` if another one is faster, ``remark`` on how."""

    backend: str
    obstacle: str | None
    advice: str | None = None
    remark: str | None = None

    def __str__(self) -> str:
        if self.obstacle is not None:
            return f"{self.backend}: no, {self.obstacle}"
        how = "" if self.remark is None else f", {self.remark}"
        return f"{self.backend}: yes{how}" if self.advice is None else f"{self.backend}: yes{how}, but {self.advice}"


@dataclass(frozen=True)
class Explanation:
    """Every backend's verdict in order of preference, the one chosen, and why."""

    verdicts: tuple[Verdict, ...]
    choice: str
    why: str

    def __str__(self) -> str:
        return "\n".join([*map(str, self.verdicts), f"-> {self.choice}: {self.why}"])


def choose(problem: Problem, backend: str | None = None) -> Backend:
    """Give the named backend, or the first of ``BACKENDS`` that can run the problem and knows of none faster.

    Raises:
        BackendError: there is no backend of that name, or it cannot run the problem, or none can; with each reason.
    """
    if backend is not None:
        if backend not in BACKENDS:
            raise BackendError(f"there is no backend '{backend}'; choose one of {', '.join(BACKENDS)}")
        obstacle = BACKENDS[backend].can_run(problem)
        if obstacle is not None:
            raise BackendError(f"backend '{backend}' cannot run this: {obstacle}; leave the backend open to have one chosen")
        return BACKENDS[backend]
    slower: Backend | None = None
    for candidate in BACKENDS.values():
        if candidate.can_run(problem) is None:
            if candidate.advise_against(problem) is None:
                return candidate
            slower = slower or candidate
    if slower is None:
        reasons = "; ".join(f"{each.name}: no, {each.can_run(problem)}" for each in BACKENDS.values())
        raise BackendError(f"no backend can multiply {problem.dtype} on {problem.device_type} with {problem.architecture}: {reasons}")
    return slower


def explain(problem: Problem) -> Explanation:
    """Say whether each backend can run a problem, and which one runs when none is named.

    Raises:
        BackendError: no backend can run it.
    """
    verdicts = []
    choice = choose(problem).name
    for backend in BACKENDS.values():
        obstacle = backend.can_run(problem)
        answers = () if obstacle is not None else (backend.advise_against(problem), backend.remark(problem))
        verdicts.append(Verdict(backend.name, obstacle, *answers))
    advice = BACKENDS[choice].advise_against(problem)
    why = "the fastest known here that can run it" if advice is None else f"the first that can run it, although {advice}"
    return Explanation(tuple(verdicts), choice, why)
