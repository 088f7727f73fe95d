"""The backends in order of speed, the fastest first."""

from __future__ import annotations

from flysurgery.ops.backend import Backend
from flysurgery.ops.backends.bmm import BmmBackend
from flysurgery.ops.backends.bsr import BsrBackend
from flysurgery.ops.backends.chunked import ChunkedBackend
from flysurgery.ops.backends.convolution import ConvolutionBackend
from flysurgery.ops.backends.cuda import CudaBackend
from flysurgery.ops.backends.dense import DenseBackend
from flysurgery.ops.backends.einsum import EinsumBackend
from flysurgery.ops.backends.sparse import SparseBackend

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        CudaBackend(),
        ConvolutionBackend(),
        ChunkedBackend(),
        EinsumBackend(),
        BmmBackend(),
        DenseBackend(),
        BsrBackend(),
        SparseBackend(),
    )
}
