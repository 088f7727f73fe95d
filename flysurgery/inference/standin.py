"""Modules and methods that replace others, with the same parameters, buffers, children and hooks; puts them in, and restores the own."""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from flysurgery.errors import InferenceError
from flysurgery.ops import forget_moved

STANDS_FOR = "_flysurgery_stands_for"
"""On a fused module: the module in whose place it stands; on one on which fused methods were set, itself, and the methods' names."""

_DICTIONARIES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
_training = attrgetter("training")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module) -> bool:
    """Whether the forward of a module is that of its class. A forward that is set on the module itself may compute anything."""
    return "forward" not in vars(module)


class Condition:
    """Whether fused modules may run: no covered module is in training mode or has hooks on its call.

    Those that train may run in training mode where all rates of dropouts and dropped paths are zero. Hooks on ``itself``, the module
    that is replaced, are called by what replaces it. After ``settle``, the covered modules and ``holders`` must also keep their
    children, and no covered module or child may get another forward. A compiler skips this check, which would cost it hundreds of guards.
    """

    def __init__(
        self, covered: Iterable[nn.Module], holders: Iterable[nn.Module] = (), *, itself: nn.Module | None = None, trains: bool = False
    ) -> None:
        self.covered, self._holders = tuple(covered), tuple(holders)
        self._hooked = [module for module in self.covered if module is not itself]
        self._hooks = tuple(getattr(module, name) for module in self._hooked for name in _HOOKS)  # the dictionaries, which stay the same
        self._rates = [(module, name) for module in self.covered for name in rates_of(module)] if trains else None
        self._looked_at = list[tuple[nn.Module, dict[str, Any] | None, str]]()  # a name among a module's children or, for None, its vars
        self._settled, self._places = list[Any](), list[dict[str, Any]]()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_places": []}  # the ``vars`` of modules, which a copy of a module has anew

    def settle(self) -> None:
        """Store the present children and forwards as those that must stay."""
        self._find_places()
        self._settled = self._current()

    def _find_places(self) -> None:
        parents = (*self.covered, *self._holders)
        modules = dict.fromkeys([*self.covered, *(child for parent in parents for child in parent._modules.values())])
        self._looked_at = [(parent, parent._modules, name) for parent in parents for name in parent._modules]
        self._looked_at += [(module, None, "forward") for module in modules if module is not None]

    def holds(self) -> bool:
        """Whether the fused modules may run. Every call asks this, so it takes a third of the time of ``obstacle``."""
        if torch.compiler.is_compiling():
            return not any(self._hooks) and not any(module.training for module in self.covered)
        return not any(self._hooks) and not self._differ() and self._settled == self._current()

    def _differ(self) -> bool:
        if self._rates is None:
            return any(map(_training, self.covered))
        return any(module.training and getattr(module, name) for module, name in self._rates)

    def _current(self) -> list[Any]:
        if not self._places:
            self._places = [vars(module) if place is None else place for module, place, _ in self._looked_at]
            self._names = [name for _, _, name in self._looked_at]
        return [*map(dict.get, self._places, self._names)]

    def obstacle(self) -> tuple[str, nn.Module] | None:
        """``"training"``, ``"dropout"`` or ``"hooked"``, and the first module that is or has it; None where the fused modules may run."""
        training = next((module for module in self.covered if module.training), None)
        if training is not None and self._rates is None:
            return "training", training
        for module in self._hooked:
            if any(getattr(module, name) for name in _HOOKS):
                return "hooked", module
        return next((("dropout", module) for module, name in self._rates or () if getattr(module, name)), None)


def rates_of(module: nn.Module) -> list[str]:
    """The names of attributes that are rates of dropout, or of paths that are dropped: ``p``, and numbers with "drop" in their names."""
    found = [name for name, value in vars(module).items() if "drop" in name and type(value) in (int, float)]
    return [*found, "p"] if isinstance(module, nn.modules.dropout._DropoutNd) else found


class StandIn(nn.Module):
    """Replaces ``original`` while ``condition`` holds, and shares its dictionaries of parameters, buffers, children and hooks.

    State dicts, moves, hooks and the training mode are therefore those of the original, whose other attributes can be read through it.
    Hooks run once: of the original only ``forward`` is called.
    """

    def __init__(self, original: nn.Module, condition: Condition) -> None:
        super().__init__()
        self.training, self.condition = original.training, condition
        for name in _DICTIONARIES:
            self.__dict__[name] = original.__dict__[name]
        self.__dict__[STANDS_FOR] = (original,)  # in a tuple, so that it is no child

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the original's own forward; that of its class where the fused one was set on the original itself."""
        original = self.original
        return type(original).forward(original, *args, **kwargs) if STANDS_FOR in vars(original) else original.forward(*args, **kwargs)

    @property
    def original(self) -> nn.Module:
        """The module that was here before."""
        return self.__dict__[STANDS_FOR][0]

    def train(self, mode: bool = True) -> "StandIn":
        self.original.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "StandIn":
        """Move and retype parameters and buffers, as ``to`` does, and free what fused modules packed from them."""
        super()._apply(fn, recurse)
        forget_moved()
        return self

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise InferenceError(
            "nn.DataParallel cannot replicate an optimized model, whose fused modules keep to their device; call flysurgery.restore(model) "
            "before, or optimize a copy for each device"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__[STANDS_FOR][0], name)


class Stepped(StandIn):
    """A module that ``step`` computes, for calls with one argument."""

    def __init__(self, original: nn.Module, step: nn.Module, condition: Condition) -> None:
        super().__init__(original, condition)
        self._step = (step,)  # in a tuple, so that it is no child: it refers to modules that the model has already

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        fits = len(args) == 1 and not kwargs
        return self._step[0](*args) if fits and self.condition.holds() else self.plain(*args, **kwargs)


class Passed(StandIn):
    """A module whose work a later fused module does: returns its only argument as long as that module runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.condition.holds():
            return self.plain(*args, **kwargs)
        (x,) = (*args, *kwargs.values())
        return x


class Undropped(nn.Dropout):
    """A dropout in evaluation mode with all its attributes. It does not call PyTorch's function, which modes would see."""

    def __init__(self, original: nn.Dropout) -> None:
        self.__dict__ = original.__dict__

    def forward(self, input: Tensor) -> Tensor:
        return input


def view(module: nn.Module, replacements: Mapping[str, nn.Module], attributes: Mapping[tuple[str, str], Any] | None = None) -> nn.Module:
    """``module`` with other children below it, by their names, and attributes of other values, by names of modules and their own.

    "" stands for ``module`` itself, which stays as it is. Only the modules on the way to the replaced ones are copied, and they share
    parameters, buffers and hooks with their originals.
    """
    if "" in replacements:
        return replacements[""]
    copies: dict[str, nn.Module] = {}
    for path, new in replacements.items():
        parent, _, name = path.rpartition(".")
        _copy(module, parent, copies)._modules[name] = new
    for (path, name), value in (attributes or {}).items():
        holder = _copy(module, path, copies)  # in whose attributes a module is no child, and hides a method of the class
        vars(holder)[name] = value.on(holder) if isinstance(value, StandInMethod) else value
    return _copy(module, "", copies)


def _copy(module: nn.Module, path: str, copies: dict[str, nn.Module]) -> nn.Module:
    """The copy of a module below ``module``, made with those on the way to it where ``copies`` has none."""
    if path not in copies:
        old = module.get_submodule(path)
        new = copies[path] = type(old).__new__(type(old))
        new.__dict__.update(old.__dict__)
        new.__dict__["_modules"] = dict(old._modules)
        parent, _, name = path.rpartition(".")
        if path:
            _copy(module, parent, copies)._modules[name] = new
    return copies[path]


def above(module: nn.Module, paths: Iterable[str]) -> list[nn.Module]:
    """``module`` and the modules on the way to these names below it. A ``view`` that replaces these names has copies of them."""
    parts = [path.split(".")[:-1] for path in paths]
    return [module.get_submodule(path) for path in {".".join(names[:count]): None for names in parts for count in range(len(names) + 1)}]


class StandInMethod:
    """Replaces a method of ``module``. It calls the method on the view ``inner`` as long as the condition holds.

    At each call the view gets the attributes that the module has now, such as a switch for checkpoints.
    """

    def __init__(self, module: nn.Module, method: str, inner: nn.Module, condition: Condition) -> None:
        self.module, self.method, self.inner, self.condition = module, method, inner, condition
        self._own = {name: value for name, value in vars(inner).items() if vars(module).get(name) is not value}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        holder = self.module
        if self.condition.holds():
            holder = self.inner
            if not torch.compiler.is_compiling():
                vars(holder).update(vars(self.module) | self._own)
        return getattr(type(holder), self.method)(holder, *args, **kwargs)

    def on(self, holder: nn.Module) -> "StandInMethod":
        """What replaces the method on ``holder``, a view of the module."""
        return self


class Together(nn.Module):
    """``method`` of a module behind its child ``before``."""

    def __init__(self, module: nn.Module, method: str, before: str) -> None:
        super().__init__()
        self.module, self.method, self.before = module, method, before

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.module, self.method)(self.module.get_submodule(self.before)(x))

    def replaced(self, step: nn.Module, others: Mapping[str, nn.Module]) -> nn.Module:
        """A view of the module, with ``others`` below it. Its ``before`` gives its input to ``step``, which replaces ``method``."""
        before = Passed(self.module.get_submodule(self.before), Condition(()))
        return view(self.module, {**others, self.before: before}, {("", self.method): step})


class Fused(NamedTuple):
    """What is put into a model: modules by the names of those that they replace, and methods by the names of modules and their own."""

    modules: dict[str, StandIn]
    methods: dict[tuple[str, str], StandInMethod]


def put(model: nn.Module, fused: Fused) -> None:
    """Put modules in place under all names of the old ones, and methods on modules. For ``model`` itself, set its forward."""
    old = {id(model.get_submodule(fqn)): module for fqn, module in fused.modules.items()}
    methods: list[tuple[nn.Module, str, Callable[..., Any]]]
    methods = [(model.get_submodule(fqn), name, method) for (fqn, name), method in fused.methods.items()]
    if "" in fused.modules:
        methods.append((model, "forward", fused.modules[""].forward))
    for parent, name, child in _children(model):
        if id(child) in old:
            parent._modules[name] = old[id(child)]
    for module, name, method in methods:
        vars(module).update({name: method, STANDS_FOR: (*vars(module).get(STANDS_FOR, (module,)), name)})
    for each in (*fused.modules.values(), *fused.methods.values()):
        each.condition.settle()


def is_optimized(model: nn.Module) -> bool:
    """Whether fused modules stand in ``model``, or a fused method was set on one of its own."""
    return any(STANDS_FOR in vars(module) for module in model.modules())


def restore(model: nn.Module) -> int:
    """Put back the modules that ``optimize`` replaced, in ``model`` and in modules of it that were optimized separately.

    Returns the number of these modules and of those on which a method was set; 0 for a model that is not optimized.
    """
    if not isinstance(model, nn.Module):
        raise InferenceError(f"expected a torch.nn.Module to restore, got {type(model).__name__}")
    replaced = [(parent, name, child) for parent, name, child in _children(model) if isinstance(child, StandIn)]
    for parent, name, child in replaced:
        parent._modules[name] = child.original
    themselves = [module for module in model.modules() if STANDS_FOR in vars(module)]
    for module in themselves:
        _, *names = vars(module).pop(STANDS_FOR)
        for name in names:
            vars(module).pop(name, None)
    return len(replaced) + len(themselves)


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Each module in ``model`` with its parent and its name there, as they are now."""
    return [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items() if child is not None]
