"""What leaves the tree arrives: sdist, wheel and a plain archive hold and import the same modules."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SUBPACKAGES = ("kernels", "model", "runtime", "weights")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*args: str | Path, cwd: Path) -> str:
    """Runs a Python command away from the checkout, without its folders on the path; returns what it printed."""
    done = subprocess.run([sys.executable, "-P", *map(str, args)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{args}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def package_files(tree: Path) -> set[str]:
    """Every file that an installation of the tree has, as the wheel names them."""
    face = tree / "src" / "ostinato"
    found = {f"ostinato/{path.name}" for path in (*face.glob("*.py"), face / "py.typed")}
    found |= {f"ostinato/bench/{path.name}" for path in face.glob("bench/*.py")}
    for name in SUBPACKAGES:
        found |= {f"ostinato/{path.relative_to(tree).as_posix()}" for path in (tree / name).rglob("*.py")}
    return found


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A copy of the tree, an archive of that, the sdist built from it, and the wheel built from the sdist."""
    base = tmp_path_factory.mktemp("packaging")
    tree = base / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*SUBPACKAGES, "src"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=junk)
    archive = base / "ostinato.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(tree, "ostinato")
    dist = base / "dist"
    run("-m", "build", "--no-isolation", "--outdir", dist, tree, cwd=base)
    return {"tree": tree, "archive": archive, "sdist": next(dist.glob("*.tar.gz")), "wheel": next(dist.glob("*.whl"))}


def test_wheel_through_sdist_holds_every_module(artefacts: dict[str, Path]) -> None:
    with zipfile.ZipFile(artefacts["wheel"]) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    assert set(names) == package_files(artefacts["tree"])


@pytest.mark.parametrize("kind", ["wheel", "sdist", "archive"])
def test_installs_and_imports(artefacts: dict[str, Path], kind: str, tmp_path: Path) -> None:
    target = tmp_path / "site"
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    run("-m", "pip", "install", *options, "--target", target, artefacts[kind], cwd=tmp_path)
    installed = {path.relative_to(target).as_posix() for path in (target / "ostinato").rglob("*") if path.is_file()}
    assert {name for name in installed if "__pycache__" not in name} == package_files(artefacts["tree"])

    code = f"import sys; sys.path.insert(0, {str(target)!r}); import ostinato; print(ostinato.__file__)\n"
    for name in SUBPACKAGES:
        code += f"import ostinato.{name}; print(ostinato.{name}.__file__)\n"
    printed = run("-c", code, cwd=tmp_path).splitlines()
    assert printed == [str(target / "ostinato" / part / "__init__.py") for part in ("", *SUBPACKAGES)]


def test_constraints_agree_with_every_declared_requirement() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = PROJECT["optional-dependencies"].values()
    declared = [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]
    unpinned = {"ostinato", "setuptools"}  # the package itself, and what builds it
    for requirement in declared:
        name = canonicalize_name(requirement.name)
        if name not in unpinned:
            assert name in pins, f"{name} has no pin in constraints.txt"
            assert pins[name] in requirement.specifier, f"{name}=={pins[name]} is outside {requirement}"
