"""Methods know no labels of newcomers, and reach neither data nor files nor network."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import upfl
from upfl.contract import Unlabelled

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_personalizers_client_has_no_place_for_labels() -> None:
    assert {field.name for field in dataclasses.fields(Unlabelled)} == {"id", "x", "seed", "architecture"}
    public = {name for name in dir(Unlabelled) if not name.startswith("_")}
    assert public <= {"id", "x", "seed", "architecture", "generator"}
    with pytest.raises(TypeError):
        Unlabelled(0, torch.zeros(1), 0, y=torch.zeros(1))  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Unlabelled(0, torch.zeros(1)).y = torch.zeros(1)  # type: ignore[attr-defined]


ALLOWED = {
    *("abc", "collections", "dataclasses", "enum", "fnmatch", "functools", "itertools", "math", "operator", "typing"),
    *("__future__", "pydantic", "scipy", "torch"),
}
ALLOWED_OWN = (
    *("upfl.errors", "upfl.last_layer", "upfl.models", "upfl.randomness", "upfl.state", "upfl.suggest"),
    *("upfl.contract", "upfl.training", "upfl.personalize"),
)
FORBIDDEN_TORCH = ("torch.utils", "torch.distributed", "torch.hub", "torch.multiprocessing", "torch.serialization")
FORBIDDEN_CALLS = {"open", "exec", "eval", "compile", "__import__", "input"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("torch", "from_file"), ("torch", "hub")}


def source_files(*packages: str) -> list[Path]:
    root = Path(upfl.__file__).parent
    files = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
    assert len(files) >= 2 * len(packages)
    return files


def imported(tree: ast.Module, package: str) -> set[str]:
    """Every module that a file may import, wherever the statement stands."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from upfl import data` imports a module, too.
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "upfl" else {module}
    return names


@pytest.mark.parametrize("package", ["contract", "personalize", "training"])
def test_methods_import_neither_data_nor_engine_nor_files_nor_network(package: str) -> None:
    for path in source_files(package):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for module in imported(tree, f"upfl.{package}"):
            where = f"{path.name} imports {module}"
            if module.split(".")[0] == "upfl":
                assert any(module == own or module.startswith(f"{own}.") for own in ALLOWED_OWN), where
            else:
                assert module.split(".")[0] in ALLOWED, where
                assert not module.startswith(FORBIDDEN_TORCH), where


@pytest.mark.parametrize("package", ["contract", "personalize", "training"])
def test_methods_open_nothing(package: str) -> None:
    for path in source_files(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name):
                assert node.id not in FORBIDDEN_CALLS, f"{path.name} uses {node.id}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in FORBIDDEN_ATTRIBUTES, f"{path.name} uses torch.{node.attr}"
