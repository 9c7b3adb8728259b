"""`use: "module:Name"` -> the object. What can go wrong is told in one line: module, import, attribute."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dflash_pipe.errors import BadInput, nearest

__all__ = ["load_object", "one_line"]


def load_object(use: str) -> Any:
    """Import `module:Name`; modules in the current folder count too. Raises `BadInput` without a place."""
    module_name, colon, name = use.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise BadInput(f'expected "module:Name", got {use!r}')
    module = _import(module_name)
    if not hasattr(module, name):
        raise BadInput(f"module {module_name} has no {name!r}{nearest(name, _own_names(module))}")
    return getattr(module, name)


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not have it; last, so that it hides nothing that is installed
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise BadInput(f"there is no module {name!r}{_near_modules(error.name)}") from error
        raise BadInput(f"importing {name} failed: {one_line(error)}") from error
    except (Exception, SystemExit) as error:  # whatever a module does while it is imported
        raise BadInput(f"importing {name} failed: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What an exception of foreign code is and says."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _own_names(module: ModuleType) -> list[str]:
    """Public classes and functions that the module itself defines."""
    found = vars(module).items()
    return [n for n, value in found if getattr(value, "__module__", None) == module.__name__ and not n.startswith("_")]


def _near_modules(missing: str) -> str:
    """The closest module beside the missing one; at the top level only what lies in the current folder counts."""
    parent = missing.rpartition(".")[0]
    paths = list(sys.modules[parent].__path__) if parent else [str(Path.cwd())]
    beside = [f"{parent}.{module.name}".lstrip(".") for module in pkgutil.iter_modules(paths)]
    hint = nearest(missing, beside)
    return hint if parent or hint.startswith(" (did") else ""
