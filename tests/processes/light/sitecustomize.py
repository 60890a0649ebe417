"""Read by every Python that the tests of processes start: torch's compiler is loaded on demand.

The first optimizer that is made imports `torch._dynamo`, 800 modules in more than a second, only to
mark functions that must not be compiled. The scripts of these tests compile nothing.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Compiler(ModuleType):
    """Does for `torch._dynamo` until something else of it is wanted."""

    __path__: list[str] = []

    @staticmethod
    def disable(fn, recursive=True, *, wrapping=True):
        return fn

    @staticmethod
    def graph_break(msg=""):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(), name)


def _load():
    if _OnDemand in sys.meta_path:
        sys.meta_path.remove(_OnDemand)
        del sys.modules["torch._dynamo"]
        vars(sys.modules["torch"]).pop("_dynamo", None)
    return importlib.import_module("torch._dynamo")


class _OnDemand:
    """Finds the stand-in. A submodule that is wanted loads the compiler, which has it then."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("torch._dynamo."):
            _load()
            importlib.import_module(name)
        elif name != "torch._dynamo":
            return None
        return ModuleSpec(name, _OnDemand)

    @staticmethod
    def create_module(spec):
        return sys.modules.get(spec.name) or _Compiler(spec.name)

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.insert(0, _OnDemand)
