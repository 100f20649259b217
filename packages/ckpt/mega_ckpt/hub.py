"""Upload of a HuggingFace folder to the HuggingFace hub and download from it, with the hub's own client.

Only safetensors, JSON, text and tokenizer files are transferred, never pickles. The client's credentials are used:
`hf auth login`, or HF_TOKEN.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mega_ckpt.checkpoint_folders import make_durable_folder
from mega_ckpt.formats.hf_source import CONFIG, HfSource
from mega_ckpt.source import MegaWeightSource, open_weight_source
from mega_common.atomic_files import convert_full_disk_error, fsync_directory
from mega_common.errors import CheckpointError, MegaError, MissingPackageError

# Weights, configurations, the model card, tokenizer files. Not every "*.model", since some programs pickle to it.
_TOKENIZER = ("tokenizer*.model", "spiece.model", "sentencepiece*.model", "*.tiktoken", "*.txt", "*.jinja")
PATTERNS = ("*.safetensors", "*.json", "*.md", *_TOKENIZER)
_LOG_IN = "log in: hf auth login"


def push_to_hub(
    folder: Path, repo_id: str, *, private: bool = False, revision: str | None = None, message: str | None = None
) -> str:
    """Upload a HuggingFace folder to the HuggingFace Hub as one commit; return the commit URL.
    The target is the repository `repo_id`.

    Args:
        folder: config.json and safetensors, which are checked first and uploaded unchanged.
        repo_id: "user/name", or a name in your own namespace; created if missing.
        private: create a private repository; an existing public one is an error.
        revision: branch to commit to, created if missing; default: main.
        message: commit message.

    Raises:
        CheckpointError: when the folder is not a complete HuggingFace folder, or the hub refuses or cannot be reached.
        MissingPackageError: when the hub's client is not installed.
    """
    hub = _client()
    _check_folder(folder)
    with _translate_errors(repo_id, revision):
        # Without `private`, the organization's default applies.
        visibility = {"private": True} if private else {}
        repo_id = hub.create_repo(repo_id, exist_ok=True, **visibility).repo_id
        if private and not hub.model_info(repo_id).private:
            raise CheckpointError(
                f"{repo_id}: --private conflicts with an existing public repository",
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
    """Download the repository `repo_id` from the HuggingFace Hub to `folder`, which appears once everything is there.

    An interrupted download is kept next to it, under a hidden name, and the same call resumes it.

    Args:
        repo_id: "user/name".
        folder: the folder to create.
        revision: branch, tag or commit; default: the latest commit of main.

    Raises:
        CheckpointError: when `folder` exists, the repository has no safetensors, or the hub refuses or is unreachable.
        MissingPackageError: when the hub's client is not installed.
    """
    hub = _client()
    final = Path(os.path.abspath(folder))
    if final.exists():
        raise CheckpointError(f"{folder}: exists already", hint="choose another folder")
    with _translate_errors(repo_id, revision):
        info = hub.model_info(repo_id, revision=revision)
        if not any(file.rfilename.endswith(".safetensors") for file in info.siblings or ()):
            raise CheckpointError(
                f"{repo_id}: safetensors files are missing (pickled weights are not supported)",
                hint="choose a repository or revision with safetensors",
            )
        # The name contains the commit, so that files of two commits never mix.
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
            "the HuggingFace hub requires the package huggingface-hub, which is not installed",
            hint="in the root of the repository: pip install 'packages/ckpt[hub]'",
        ) from None
    return huggingface_hub


def _check_folder(folder: Path) -> None:
    """Reject anything but a complete HuggingFace folder: headers, names and shapes are checked before the upload."""
    if not (folder / CONFIG).is_file() and isinstance(open_weight_source(folder), MegaWeightSource):
        raise CheckpointError(
            f"{folder}: must be a HuggingFace folder, not a mega checkpoint",
            hint=f"convert it first: mega ckpt convert {folder} out/hf --to hf, then push out/hf",
        )
    HfSource(folder)


@contextlib.contextmanager
def _translate_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Convert the client's exceptions, which share no base class, into one-sentence errors."""
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
        return f"{repo_id}: access requires its owner's approval", f"request it on its page on the hub, then {_LOG_IN}"
    if isinstance(error, kinds.RepositoryNotFoundError):
        return f"{repo_id}: no such repository on the hub, or it is private", f"if it is private, {_LOG_IN}"
    if isinstance(error, kinds.RevisionNotFoundError):
        return f"{repo_id}: has no revision {revision}", "give a branch, a tag or a commit"
    if isinstance(error, kinds.HFValidationError):
        return f"{repo_id!r} must be the name of a repository", "use user/name"
    first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    first = re.sub(r"\[Errno -?\d+\] ", "", first)
    if status in (401, 403):
        return (
            f"{repo_id}: the hub denied access (status {status}): {first}",
            f"{_LOG_IN}, with a token that has access",
        )
    if status is not None:
        return f"{repo_id}: the hub answered with status {status}: {first}", "try again later"
    return (
        f"{repo_id}: the connection to the hub failed: {first}",
        "check the network, and run the same command to resume",
    )


def _make_durable(folder: Path) -> None:
    """Flush all files to disk; the hub client does not."""
    for parent, _, names in os.walk(folder):
        for name in names:
            fsync_directory(Path(parent) / name)
        fsync_directory(Path(parent))
