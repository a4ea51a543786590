"""What the code of the project must not contain: ways in which data could become code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ring", "transport", "teacher", "student", "planner", "bench", "examples")
#: These turn bytes into objects by running what the bytes say.
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
#: Calls by the last part of their name.
FORBIDDEN_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "recv_pyobj": "unpickles what a peer sent",
    "send_pyobj": "makes the peer unpickle",
    "all_gather_object": "unpickles what other ranks sent",
    "gather_object": "unpickles what other ranks sent",
    "scatter_object_list": "unpickles what other ranks sent",
    "broadcast_object_list": "unpickles what other ranks sent",
    "send_object_list": "makes the other rank unpickle",
    "recv_object_list": "unpickles what another rank sent",
    "unsafe_load": "YAML that makes objects",
    "full_load": "YAML that makes objects",
}
#: (last part of the call's name, keyword): the values that are refused.
FORBIDDEN_KEYWORDS = {"trust_remote_code": True, "allow_pickle": True}
#: Sockets and pipes of these unpickle; a program may use them towards processes that it started itself.
PROCESS_POOLS = {"multiprocessing", "concurrent.futures.process"}
MAY_START_PROCESSES = {"bench", "examples"}


def faults(source: str, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        for name in imported(node):
            top = name.split(".")[0]
            if top in FORBIDDEN_MODULES:
                yield f"{node.lineno}: imports {name}"  # type: ignore[attr-defined]
            if (name in PROCESS_POOLS or top == "multiprocessing") and package not in MAY_START_PROCESSES:
                yield f"{node.lineno}: imports {name}, whose connections unpickle"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            yield from (f"{node.lineno}: {fault}" for fault in call_faults(node))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    return []


def call_faults(call: ast.Call) -> Iterator[str]:
    function = ast.unparse(call.func)
    last = function.rsplit(".", 1)[-1]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    # `model.eval()` is torch's switch, and has no argument.
    if last in FORBIDDEN_CALLS and not (last == "eval" and "." in function and not call.args):
        yield f"{function}() {FORBIDDEN_CALLS[last]}"
    if function in ("torch.load", "torch.jit.load", "torch.package.PackageImporter"):
        safe = keywords.get("weights_only")
        if not (isinstance(safe, ast.Constant) and safe.value is True):
            yield f"{function}() without weights_only=True unpickles"
    if function == "yaml.load":
        yield "yaml.load() may make objects"
    forbidden = FORBIDDEN_KEYWORDS | ({"shell": True} if function.startswith("subprocess.") else {})
    for keyword, refused in forbidden.items():
        value = keywords.get(keyword)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is not refused):
            yield f"{function}({keyword}=...) may be {refused}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_data_can_become_code(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    found = [f"{path.relative_to(ROOT)}:{fault}" for path in paths for fault in faults(path.read_text(), package)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "torch.load('x', weights_only=False)",
        "torch.load('x', weights_only=flag)",
        "socket.recv_pyobj()",
        "dist.all_gather_object(found, mine)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=config.trust)",
        "np.load(x, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "eval(text)",
        "builtins.eval(text)",
        "exec(text)",
        "yaml.load(text)",
        "from multiprocessing.connection import Listener",
    ],
)
def test_each_of_these_would_be_found(source: str) -> None:
    assert list(faults(source, "ring"))


@pytest.mark.parametrize(
    "source", ["model.eval()", "torch.load('x', weights_only=True)", "f(trust_remote_code=False)", "import msgpack"]
)
def test_none_of_these_is_a_fault(source: str) -> None:
    assert not list(faults(source, "ring"))
