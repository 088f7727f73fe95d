"""Registers the readers of converted models with timm and transformers when these are imported: importing them takes seconds."""

import sys
import warnings
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

READERS = {"timm": "flysurgery.timm_reader", "transformers.quantizers.auto": "flysurgery.transformers_reader"}
"""By module: what is imported after it, and registers itself there."""


def register() -> None:
    """Import the readers, at once where their module is imported already, else as soon as it is."""
    # Of a package that is imported twice, two finders would ask each other without an end.
    sys.meta_path[:] = [_Readers(), *(finder for finder in sys.meta_path if type(finder).__module__ != __name__)]
    for module in READERS:
        if module in sys.modules:
            _import_reader(module)


def _import_reader(module: str) -> None:
    try:
        import_module(READERS[module])
    except ImportError as error:
        library = module.partition(".")[0]
        warnings.warn(f"{library} will not open converted models ({error}); install 'flysurgery[huggingface]'", stacklevel=2)


class _Readers(MetaPathFinder):
    """Finds these modules as the other finders do, and has their reader imported after them."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in READERS:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((each for each in found if each is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _import_reader(fullname)

            loader.exec_module = exec_module
        return spec
