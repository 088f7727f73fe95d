"""Registers the reader of converted models with transformers, when transformers is imported: importing it takes a second."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

REGISTRY = "transformers.quantizers.auto"
"""The module that holds transformers' registry of readers; ``from_pretrained`` needs it."""

READER = "flysurgery.transformers_reader"


def register() -> None:
    """Import the reader, at once where transformers is imported already, else as soon as its registry is."""
    if REGISTRY in sys.modules:
        _import_reader()
    else:
        sys.meta_path.insert(0, _AfterRegistry())


def _import_reader() -> None:
    try:
        import_module(READER)
    except ImportError as error:
        warnings.warn(f"transformers will not open converted models ({error}); install 'flysurgery[huggingface]'", stacklevel=2)


class _AfterRegistry(MetaPathFinder):
    """Finds the registry as everybody does, and has the reader imported after it."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _import_reader()

            loader.exec_module = exec_module
        return spec
