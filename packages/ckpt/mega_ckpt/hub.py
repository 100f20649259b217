"""Upload of a HuggingFace folder to the HuggingFace hub and download from it, with the hub's own client.

Only safetensors, JSON, text and tokenizer files travel, never a pickle. Who one is comes from the client:
`hf auth login`, or HF_TOKEN.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mega_ckpt.checkpoint_folders import make_durable_folder
from mega_ckpt.formats.hf_source import CONFIG, HfSource
from mega_ckpt.source import MegaSource, open_weight_source
from mega_common.atomic_files import convert_full_disk_error, fsync_directory
from mega_common.errors import CheckpointError, MegaError, MissingPackageError

# Weights and what describes them, the model card, tokenizer files. Not every "*.model": some programs pickle under it.
_TOKENIZER = ("tokenizer*.model", "spiece.model", "sentencepiece*.model", "*.tiktoken", "*.txt", "*.jinja")
PATTERNS = ("*.safetensors", "*.json", "*.md", *_TOKENIZER)
_LOG_IN = "log in: hf auth login"


def push_to_hub(
    folder: Path, repo_id: str, *, private: bool = False, revision: str | None = None, message: str | None = None
) -> str:
    """Upload a HuggingFace folder to the repository `repo_id` as one commit; returns the commit URL.

    Args:
        folder: config.json and safetensors, which are checked first. Nothing is converted.
        repo_id: "user/name", or a name of one's own; made when it is not there yet.
        private: nobody else may see it. A repository that is public already is then refused.
        revision: branch to commit to, made when it is not there yet; default: main.
        message: of the commit.

    Raises:
        CheckpointError: when the folder is no complete HuggingFace folder, or the hub refuses or cannot be reached.
        MissingPackageError: when the hub's client is not installed.
    """
    hub = _client()
    _check_folder(folder)
    with _translate_errors(repo_id, revision):
        # Where it is not asked for, the organization's own default decides.
        visibility = {"private": True} if private else {}
        repo_id = hub.create_repo(repo_id, exist_ok=True, **visibility).repo_id
        if private and not hub.model_info(repo_id).private:
            raise CheckpointError(
                f"{repo_id}: is public already, so that what is pushed there is not private",
                hint="make it private in its settings, or choose another name",
            )
        if revision:
            hub.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=message or "Upload the model",
            allow_patterns=list(PATTERNS),
        )
    return str(commit.commit_url)


def pull_from_hub(repo_id: str, folder: Path, *, revision: str | None = None) -> None:
    """Download the repository `repo_id` to `folder`, which appears once everything is there.

    What an interrupted download fetched stays beside it, under a hidden name, and the same call goes on from there.

    Args:
        repo_id: "user/name".
        folder: the folder to make.
        revision: branch, tag or commit; default: the newest commit of main.

    Raises:
        CheckpointError: when `folder` exists, the repository has no safetensors, or the hub refuses or is out of reach.
        MissingPackageError: when the hub's client is not installed.
    """
    hub = _client()
    final = Path(os.path.abspath(folder))
    if final.exists():
        raise CheckpointError(f"{folder}: exists already", hint="choose another folder")
    with _translate_errors(repo_id, revision):
        info = hub.model_info(repo_id, revision=revision)
        if not any(file.rfilename.endswith(".safetensors") for file in info.siblings or ()):
            raise CheckpointError(f"{repo_id}: has no safetensors files", hint="pickled weights are never fetched")
        # The commit is in the name: files of two commits never mix, and a branch that moves on begins anew.
        key = hashlib.sha256(f"{repo_id}@{info.sha}".encode()).hexdigest()[:12]
        partial = final.with_name(f".{final.name}.{key}.partial")
        make_durable_folder(final.parent)
        hub.snapshot_download(repo_id, revision=info.sha, local_dir=partial, allow_patterns=list(PATTERNS))
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    _make_durable(partial)
    os.rename(partial, final)
    fsync_directory(final.parent)


def _client() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise MissingPackageError(
            "the HuggingFace hub needs the package huggingface-hub, which is not installed",
            hint="in the root of the repository: pip install 'packages/ckpt[hub]'",
        ) from None
    return huggingface_hub


def _check_folder(folder: Path) -> None:
    """Reject anything but a complete HuggingFace folder: headers, names and shapes are checked before anything is sent."""
    if not (folder / CONFIG).is_file() and isinstance(open_weight_source(folder), MegaSource):
        raise CheckpointError(
            f"{folder}: a checkpoint of mega; the hub's users load HuggingFace folders",
            hint=f"convert it first: mega ckpt convert {folder} out/hf --to hf, then push out/hf",
        )
    HfSource(folder)


@contextlib.contextmanager
def _translate_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Convert the client's exceptions into one-sentence errors. They, and those of its transports, share no base class."""
    try:
        yield
    except MegaError:
        raise
    except Exception as error:
        if full := convert_full_disk_error(error, repo_id):
            raise full from error
        message, hint = _explain_error(error, repo_id, revision)
        raise CheckpointError(message, hint=hint) from error


def _explain_error(error: Exception, repo_id: str, revision: str | None) -> tuple[str, str]:
    """Return the message and the hint for an exception of the client."""
    from huggingface_hub import errors as kinds

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, kinds.GatedRepoError):
        return f"{repo_id}: access is granted by its owner", f"ask for it on its page on the hub, then {_LOG_IN}"
    if isinstance(error, kinds.RepositoryNotFoundError):
        return f"{repo_id}: no such repository on the hub, or not for you to see", f"if it is private, {_LOG_IN}"
    if isinstance(error, kinds.RevisionNotFoundError):
        return f"{repo_id}: has no revision {revision}", "give a branch, a tag or a commit"
    if isinstance(error, kinds.HFValidationError):
        return f"{repo_id!r} is not the name of a repository", "expected user/name"
    first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if status in (401, 403):
        return f"{repo_id}: the hub does not permit it (status {status}): {first}", f"{_LOG_IN}, with a token that may"
    if status is not None:
        return f"{repo_id}: the hub answered with status {status}: {first}", "try again later"
    return (
        f"{repo_id}: the hub was not reached, or broke off: {first}",
        "is the network there? The same command goes on",
    )


def _make_durable(folder: Path) -> None:
    """Flush all files to disk; the hub client does not."""
    for above, _, names in os.walk(folder):
        for name in names:
            fsync_directory(Path(above) / name)
        fsync_directory(Path(above))
