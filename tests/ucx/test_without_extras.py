"""Without the extras: nothing imports what is not there, and who asks for it is told what to install."""

from __future__ import annotations

import subprocess
import sys

from tests.ucx.conftest import REPOSITORY

#: Importable distributions that only extras bring.
EXTRAS = ("libucx", "nixl_cu12", "nixl_cu13", "ucxx", "matplotlib", "liger_kernel", "trl", "accelerate", "triton")

_HIDE = f"""
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {EXTRAS!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""

_IMPORT_ALL = """
import importlib, pkgutil
for package in ("planner", "ring", "transport", "teacher", "student", "bench"):
    package = importlib.import_module(package)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        # The kernels are of triton, and are asked for only where it is.
        if not module.name.endswith(("__main__", "triton_kernels")):
            importlib.import_module(module.name)
"""

_ASK = """
from ring.core.errors import ConfigError
from transport import registry, ucx_library
ucx_library.find_library = lambda name: None  # nor is there a UCX of the system
print(registry.offered("auto"))
for name in set(registry.names()) - {"shm", "zmq"}:
    try:
        registry.load(name)
    except ConfigError as error:
        print(name, error)
"""


def test_without_extras_everything_imports_and_what_is_missing_is_named() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _HIDE + _IMPORT_ALL + _ASK], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    offered, *refused = run.stdout.splitlines()
    assert offered == "('shm', 'zmq')"
    assert refused
    for line in refused:
        name = line.split()[0]
        assert f"pip install -e '.[{name}]' in a clone of DisaggKD" in line
