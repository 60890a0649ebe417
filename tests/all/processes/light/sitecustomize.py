"""Read by every Python that the tests of processes start: two parts of torch are loaded on demand.

- `torch._dynamo`: the first optimizer that is made imports it, 800 modules in more than a second,
  only to mark functions that must not be compiled. The scripts of these tests compile nothing.
- `torch._meta_registrations`: operators without data, for compilers and for DTensor. It is a
  quarter of `import torch`. An operator that lacks it raises NotImplementedError.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Later(ModuleType):
    """Does for a module until something of it is wanted."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(self.__name__), name)


class _Compiler(_Later):
    @staticmethod
    def disable(fn, recursive=True, *, wrapping=True):
        return fn

    @staticmethod
    def graph_break(msg=""):
        pass


_META = "torch._meta_registrations"
_STAND_INS = {_META: _Later, "torch._dynamo": _Compiler}
# Packages that need a module without asking for it by name.
_NEED = {
    _META: (_META,),
    "torch._decomp": (_META,),
    "torch._prims": (_META,),
    "torch._refs": (_META,),
    "torch.distributed.tensor": (_META,),
    "torch._dynamo": (_META, "torch._dynamo"),
}


def _needed(name):
    """Stand-ins that do not do for a module, nor for the package that it belongs to."""
    needs = [need for package, need in _NEED.items() if f"{name}.".startswith(f"{package}.")]
    return [each for need in needs for each in need if each in _STAND_INS and each in sys.modules]


def _load(name):
    """The module itself, after what it needs."""
    for each in _needed(name):
        if _STAND_INS.pop(each, None):
            del sys.modules[each]
            vars(sys.modules["torch"]).pop(each.removeprefix("torch."), None)
            importlib.import_module(each)
    return importlib.import_module(name)


def _make_generators_possible():
    """What `torch.Generator` needs of what `torch._meta_registrations` imports, from torch 2.13."""
    torch = sys.modules["torch"]
    if not hasattr(torch._C, "_set_generator_metaclass"):
        return
    try:  # torch 2.14
        kind = importlib.import_module("torch._custom_class_base").CustomClassBaseMeta
    except ImportError:
        kind = importlib.import_module("torch._opaque_base").OpaqueBaseMeta
    torch._C._set_generator_metaclass(kind)


class _OnDemand:
    """Finds the stand-ins, and loads the modules themselves before what needs them."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, _OnDemand) if name in _STAND_INS or _needed(name) else None

    @staticmethod
    def create_module(spec):
        if spec.name in _STAND_INS:
            return _STAND_INS[spec.name](spec.name)
        module = _load(spec.name)
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def exec_module(module):
        """Next to nothing: a stand-in has all, and another module was executed when loaded."""
        if module.__name__ == _META:
            _make_generators_possible()
        if module.__spec__.loader_state:
            module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _OnDemand)
