"""Nothing in the source runs what it reads (S1)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import preimage

SOURCE = Path(preimage.__file__).parent


def unsafe(source: str) -> list[str]:
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
            if last.startswith(("load", "unsafe_load", "full_load")) and root in ("torch", "yaml"):
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
        assert unsafe(path.read_text()) == [], path
    harmless = ["np.load(f, allow_pickle=False)", "re.compile('x')", "json.load(f)", "preimage.load('m')"]
    assert unsafe("\n".join([*harmless, "x = {'trust_remote_code': False}"])) == []
