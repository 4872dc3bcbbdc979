"""Nothing in the source runs what it reads (S1)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import preimage

SOURCE = Path(preimage.__file__).parent


TENSORS = Path("states/tensor_input.py")  # the one place that reads what torch.save wrote, tensors alone


def unsafe(source: str, *, plain_tensors: bool = False) -> list[str]:
    """Every call and import that could run what a file holds."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            found += [module for module in modules if module.split(".")[0] in _MODULES]
            if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy", "yaml", "builtins"):
                found += [f"{node.module}.{name}" for name in names if name in {"load", *_BUILTINS}]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            root, last = name.split(".")[0], name.split(".")[-1]
            if name.removeprefix("builtins.") in _BUILTINS or name in ("os.system", "os.popen"):
                found.append(name)
            only_tensors = name == "torch.load" and given.get("weights_only") == "True" and plain_tensors
            loads = last.startswith(("load", "unsafe_load", "full_load")) and root in ("torch", "yaml")
            if loads and not only_tensors:
                found.append(name)
            if name in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
                found.append(name)
            if given.get("shell", "False") != "False":
                found.append(name)
            if given.get("trust_remote_code", "False") != "False":
                found.append("trust_remote_code")
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                    found += ["trust_remote_code"] if ast.unparse(value) != "False" else []
    return found


_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "pickletools",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "cloudpickle",
}

_BUILTINS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "import os, marshal", "from shelve import open", "import dill.x", "import joblib",
        "eval('1')", "exec('1')", "compile('1', '', '')", "builtins.eval('1')", "from builtins import eval",
        "yaml.load(f)", "yaml.unsafe_load(f)", "torch.load(f)", "torch.load(f, weights_only=True)",
        "torch.jit.load(f)", "from torch import load", "np.load(f)", "np.load(f, allow_pickle=True)",
        "AutoModel.from_pretrained(f, trust_remote_code=True)", "local = {'trust_remote_code': True}",
        "AutoModel.from_pretrained(f, trust_remote_code=given)", "os.system('ls')", "run('ls', shell=True)",
    ],
)  # fmt: skip
def test_the_scan_finds_what_it_looks_for(line: str) -> None:
    assert len(unsafe(line)) == 1


def test_nothing_in_the_source_runs_what_it_reads() -> None:  # S1
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 40
    for path in files:
        allowed = path.relative_to(SOURCE) == TENSORS
        assert unsafe(path.read_text(), plain_tensors=allowed) == [], path
    harmless = ["np.load(f, allow_pickle=False)", "re.compile('x')", "json.load(f)", "preimage.load('m')"]
    assert unsafe("\n".join([*harmless, "x = {'trust_remote_code': False}"])) == []


def test_only_plain_tensors_are_read_in_one_place() -> None:
    assert unsafe("torch.load(f, map_location='cpu', weights_only=True)", plain_tensors=True) == []
    for line in ("torch.load(f)", "torch.load(f, weights_only=False)", "torch.load(f, weights_only=given)",
                 "torch.jit.load(f, weights_only=True)", "torch.load(f, **given)"):  # fmt: skip
        assert len(unsafe(line, plain_tensors=True)) == 1, line
    assert (SOURCE / TENSORS).read_text().count("torch.load(") == 1
