"""The faults: a file for each folder of the package, and for what goes `THROUGH` several of them.

`budget` is also of `budgeted.py`.
"""

from importlib import import_module
from pkgutil import iter_modules

from tests.mutants.fault import Fault

THROUGH = {"streamed": "data sets", "distributed": "several processes", "graphs": "torch.compile"}


def by_file() -> dict[str, list[Fault]]:
    """Those of each file."""
    return {file.name: import_module(f"{__name__}.{file.name}").FAULTS for file in iter_modules(__path__)}


FAULTS = [fault for faults in by_file().values() for fault in faults]
