"""`transformers serve` answers with an exported folder: completions and chat, streamed and not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sdm.models import SDMForCausalLM
from sdm.models.saved_folder import CHAT_TEMPLATE, write_chat_template
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

NEW = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("sdm", pad_token_id=95, eos_token_id=96).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_simple_chat_template(folder: Path) -> None:
    assert write_chat_template(folder)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "user: hi\nassistant: ho<eos>\nuser: ?\nassistant:"
    before = (folder / CHAT_TEMPLATE).read_bytes()
    assert not write_chat_template(folder), "one is there"
    assert (folder / CHAT_TEMPLATE).read_bytes() == before
    (folder / "tokenizer_config.json").unlink()
    (folder / CHAT_TEMPLATE).unlink()
    assert not write_chat_template(folder), "there is no tokenizer"


def ask(port: int, path: str, **request: Any) -> str:
    data = json.dumps(request).encode()
    url = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(url, timeout=240) as answer:
        return answer.read().decode()


def streamed(answer: str) -> list[dict[str, Any]]:
    """The choices of the events of a stream."""
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in json.loads(event)["choices"]]


@pytest.mark.slow
def test_serve(folder: Path, tmp_path: Path) -> None:
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason=f"transformers serve needs {package}")
    write_chat_template(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(folder), "--trust-remote-code"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(800):
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        model = SDMForCausalLM.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)

        def generated(prompt: str) -> str:
            ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
            output = model.generate(ids, max_new_tokens=NEW, do_sample=False)
            return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

        chat = {"model": str(folder), "messages": [{"role": "user", "content": "hi"}], "max_tokens": NEW}
        text = {"model": str(folder), "prompt": "memory", "max_tokens": NEW}
        said, completed = generated("user: hi\nassistant:"), generated("memory")
        answer = json.loads(ask(port, "/v1/chat/completions", stream=False, **chat))
        assert answer["choices"][0]["message"]["content"].strip() == said.strip()
        answer = json.loads(ask(port, "/v1/completions", stream=False, **text))
        assert answer["choices"][0]["text"] == completed
        pieces = streamed(ask(port, "/v1/chat/completions", stream=True, **chat))
        assert len(pieces) > NEW // 2
        assert "".join(piece["delta"].get("content") or "" for piece in pieces).strip() == said.strip()
        pieces = streamed(ask(port, "/v1/completions", stream=True, **text))
        assert len(pieces) > NEW // 2
        assert "".join(piece["text"] for piece in pieces) == completed
    finally:
        server.terminate()
        server.wait(30)
