"""The shape of the source tree: who imports whom, what an import may do, and that the documents tell the truth."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FACE = ROOT / "src" / "ostinato"
SUBPACKAGES = ("kernels", "model", "runtime", "weights")

# The arrows of docs/architecture.md. "" is the face, src/ostinato itself.
MAY_IMPORT = {
    "kernels": {"kernels"},
    "model": {"model", "kernels"},
    "weights": {"weights", "model"},
    "runtime": {"runtime", "model", "kernels"},
    "": {"", *SUBPACKAGES},
}
THIRD_PARTY = {
    "kernels": {"torch", "triton"},
    "model": {"torch"},
    "runtime": {"torch", "cuda"},
    "weights": {"torch", "safetensors", "huggingface_hub", "tokenizers", "jinja2", "gguf", "numpy", "rich"},
    "": {"torch", "huggingface_hub", "rich", "typer", "matplotlib", "transformers", "vllm"},  # the last two: its peers
}
ONLY_WHERE_USED = {
    "gguf",
    "numpy",
    "jinja2",
    "cuda",
    "matplotlib",
    "transformers",
    "vllm",
}  # imported in functions, never at the top of a module

PACKAGE_FILES = sorted(
    [
        *FACE.glob("*.py"),
        *FACE.glob("bench/*.py"),
        *(path for name in SUBPACKAGES for path in (ROOT / name).rglob("*.py")),
    ]
)
OTHER_FILES = sorted(path for name in ("tests", "bench") for path in (ROOT / name).rglob("*.py"))


def relative_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    """The dotted name under which a file of the package is imported."""
    inside = path.relative_to(FACE) if path.is_relative_to(FACE) else path.relative_to(ROOT)
    parts = ["ostinato", *inside.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, bool, bool]]:
    """Yields (absolute dotted module, written relatively, at module level) for every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    deferred = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    package = module_name(path).split(".") if path in PACKAGE_FILES else []
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        at_top = id(node) not in deferred
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, False, at_top
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            if module == ["ostinato"]:  # `from .. import kernels` names modules, not members
                for alias in node.names:
                    inner = [alias.name] if alias.name in SUBPACKAGES else []
                    yield ".".join([*module, *inner]), bool(node.level), at_top
            else:
                yield ".".join(module), bool(node.level), at_top


def folder(module: str) -> str:
    """The subpackage that a dotted name within `ostinato` belongs to, or "" for the face."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in SUBPACKAGES else ""


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=relative_id)
def test_package_imports(path: Path) -> None:
    own = folder(module_name(path))
    for module, relative, at_top in imports(path):
        top = module.split(".")[0]
        if top == "ostinato":
            assert relative, f"{module}: imports within the package are relative"
            assert folder(module) in MAY_IMPORT[own], f"{own or 'the face'} must not import {module}"
        elif top not in sys.stdlib_module_names:
            assert top in THIRD_PARTY[own], f"{own or 'the face'} must not import {module}"
            assert not (at_top and top in ONLY_WHERE_USED), f"{module} is imported in the function that uses it"


@pytest.mark.parametrize("path", OTHER_FILES, ids=relative_id)
def test_tests_and_bench_import_the_package_by_its_name(path: Path) -> None:
    for module, relative, _ in imports(path):
        assert not relative, f"{module}: tests and bench are no packages"
        assert module.split(".")[0] not in SUBPACKAGES, f"{module}: say ostinato.{module}"


@pytest.mark.parametrize("name", SUBPACKAGES)
def test_subpackage_is_a_relative_link_to_a_real_folder(name: str) -> None:
    link = FACE / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{name}"
    assert (ROOT / name).is_dir()
    assert not (ROOT / name).is_symlink()


def test_no_init_in_tests() -> None:
    """An __init__.py there would put the repository root on sys.path, and the root folders with it."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


IMPORT_ALL = """
    import importlib, os, sys

    for name in {blocked!r}:
        sys.modules[name] = None  # as if it were not installed

    import torch

    def asked(*args, **kwargs):
        raise AssertionError("an import asked CUDA for something")

    for name in ("_lazy_init", "is_available", "device_count", "current_device", "get_device_properties"):
        setattr(torch.cuda, name, asked)
    for name in {modules!r}.values():
        importlib.import_module(name)

    names = {{}}
    for name, module in list(sys.modules.items()):
        names.setdefault(os.path.realpath(getattr(module, "__file__", None) or name), []).append(name)
    for file, module in {modules!r}.items():
        assert names[file] == [module], (file, names[file])
    assert "transformers" not in sys.modules
"""


@pytest.mark.parametrize(
    "blocked", [(), ("triton",), ("gguf", "numpy", "jinja2")], ids=["all", "no-triton", "no-extras"]
)
def test_every_module_imports_without_a_gpu(blocked: tuple[str, ...]) -> None:
    """B51: no driver, no Triton, no optional package; nothing under two names, and no transformers."""
    modules = {str(path): module_name(path) for path in PACKAGE_FILES}
    code = textwrap.dedent(IMPORT_ALL).format(blocked=blocked, modules=modules)
    # -P: a bare `kernels` must not become importable through the working directory.
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PATH_IN_DOCS = re.compile(
    r"(?:kernels|model|runtime|weights|src|tests|bench|docs|\.ci)/[\w./-]*|Makefile|[\w.-]+\.(?:md|toml)"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative_id)
def test_documents_name_what_exists(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if PATH_IN_DOCS.fullmatch(quoted):
            assert (ROOT / quoted).exists(), f"{quoted} does not exist"
        elif target := re.fullmatch(r"make ([a-z-]+)", quoted):
            assert re.search(rf"^{target[1]}:", makefile, re.MULTILINE), f"{quoted}: no such target"


def test_no_trace_of_one_machine() -> None:
    """No path of the machine something was written on, and no package index by name."""
    foreign = re.compile(r"(?<![\w.])/(?:work|farm|home|root|opt)/\w|\b(?:pypi\.org|pythonhosted\.org)\b")
    settings = [ROOT / name for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run", "README.md")]
    for path in [*PACKAGE_FILES, *OTHER_FILES, *DOCUMENTS, *settings]:
        if path != Path(__file__).resolve():
            found = foreign.search(path.read_text(encoding="utf-8"))
            assert not found, f"{relative_id(path)}: {found}"
