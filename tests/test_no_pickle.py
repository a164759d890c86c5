"""No pickle, in the source and in a run."""

import ast
from pathlib import Path

import pytest

from tests.plugin_methods import FAULTS, ROOT, Child, small

pytestmark = pytest.mark.usefixtures("methods")


OBJECTS = ("_object", "_object_list", "_objects")


def unsafe_uses(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", None)
            for name in [*names, *([module] if module else [])]:
                if name.split(".")[0] in ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"):
                    found.append(name)
            if module and module.startswith("torch"):
                found += [name for name in names if name in ("load", "save") or name.endswith(OBJECTS)]
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr.endswith(OBJECTS) or (owner == "torch" and node.attr in ("load", "save", "package")):
                found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append("allow_pickle")
    return found


def test_the_source_uses_no_pickle() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    assert len(files) > 20
    assert {str(file): uses for file in files if (uses := unsafe_uses(ast.parse(file.read_text())))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_the_search_for_pickle_finds_it(code: str) -> None:
    assert unsafe_uses(ast.parse(code))


def test_a_run_unpickles_nothing(tmp_path: Path) -> None:
    assert Child(tmp_path / "one", small()).end() == 0
    assert Child(tmp_path / "other", small(), environment={FAULTS: "begin-unpickle:1:*"}).end() == 1
