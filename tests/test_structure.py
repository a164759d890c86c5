"""The house itself: which package may import which, and how long a file may be."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import upfl
from tests.mutants import FURTHER, MUTANTS

SOURCE = Path(upfl.__file__).parent
ROOT = SOURCE.parents[1]

# From the ground up: each may import what stands above it in this list, and itself.
ORDER = (
    *("errors", "suggest", "plugins", "randomness", "statistics", "state", "safe", "last_layer", "models"),
    *("contract", "training", "personalize", "rows", "methods"),
    *("data", "model_config", "config", "environment", "engine", "api"),
    *("bundle", "onnx_export", "flower", "testing", "experiments", "report", "track", "cli"),
)
LONGEST = 400  # lines


def modules() -> dict[str, Path]:
    """Every module below the package, by its name; not the package's own facade, which offers what all others have."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and parts != ("__main__",):
            found[".".join(("upfl", *parts))] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The package's own modules that a file imports: wherever the statement stands, for types alone, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name in known} or {str(node.module)}
    return {name for name in found if name in known}


def test_every_package_imports_only_packages_below_it() -> None:
    known = modules()
    broken = set()
    for name, path in known.items():
        own = name.split(".")[1]
        for target in imports(path, known):
            other = target.split(".")[1]
            if ORDER.index(other) > ORDER.index(own):
                broken.add((own, other))
    assert broken == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = modules()
    TopologicalSorter({name: imports(path, known) - {name} for name, path in known.items()}).prepare()


def test_no_file_is_longer_than_can_be_read_at_once() -> None:
    files = [path for folder in ("src", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    long = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST
    }
    assert long == set()


def test_no_test_module_imports_another() -> None:
    """What several of them need stands in a module without tests."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    tests = {name for name in known if name.split(".")[-1].startswith("test_")}
    assert {name: found for name in known if (found := imports(known[name], known) & tests)} == {}


def test_only_processes_of_upfls_own_tune_the_allocator() -> None:
    """A library call must not retune the program that it is called from."""
    known = modules()
    users = {name for name, path in known.items() if "upfl.engine.allocator" in imports(path, known)}
    assert users == {"upfl.cli", "upfl.engine.worker", "upfl.experiments.trial"}
    assert [name for name, path in known.items() if "mallopt" in path.read_text()] == ["upfl.engine.allocator"]


def test_the_faults_of_the_mutants_fit_the_source_as_it_is() -> None:
    """`python -m tests.mutants` puts each in and looks whether the suite finds it."""
    gone = [
        (file, old)
        for file, old, new in MUTANTS
        if old not in (text := (SOURCE / file).read_text(encoding="utf-8")) or text == text.replace(old, new, 1)
    ]
    assert gone == []
    assert [name for names in FURTHER.values() for name in names if not (ROOT / "tests" / name).exists()] == []
