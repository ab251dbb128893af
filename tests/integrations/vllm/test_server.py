"""vLLM's OpenAI server over HTTP: streams, stop strings, log-probabilities, bad requests, clients that go away.

`make vllm-test` runs these in a virtual environment with vLLM. The server listens on 127.0.0.1 only.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from served_models import expected, prompts_of, save, state_gib
from tiny_tokenizer import tiny_tokenizer

pytest.importorskip("vllm", reason="vLLM is not installed; `make vllm-test` runs this in an environment with it")

from sdm.models import SDMForCausalLM

LIMIT, SEQUENCES, NEW = 192, 6, 40
CLIENTS, SECONDS = 64, float(os.environ.get("SDM_SOAK_SECONDS", "120"))


@dataclass
class Server:
    """A running server and the model that it serves."""

    model: SDMForCausalLM
    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    def ask(self, body: bytes | dict[str, Any], path: str = "/v1/completions") -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        connection = self.send(body, path)
        try:
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        return answer.status, json.loads(text) if text else None

    def send(self, body: bytes | dict[str, Any], path: str = "/v1/completions") -> http.client.HTTPConnection:
        """Send a request and return the connection, whose answer is not read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        data = body if isinstance(body, bytes) else json.dumps({"model": str(self.folder)} | body).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        return connection

    def metric(self, name: str) -> float:
        """Return one of the server's counters."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def greedy(prompt: list[int], new: int = NEW, **options: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    } | options


def events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer, as they come."""
    for line in answer:
        data = line.decode().removeprefix("data: ").strip()
        if data and data != "[DONE]":
            yield json.loads(data)


def tokens_of(event: dict[str, Any]) -> list[int]:
    return [token for choice in event["choices"] for token in choice.get("token_ids") or ()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose pool holds six sequences."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("served")
    model = save(folder / "model", "mixed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    budget = json.dumps({"sdm_state_gib": state_gib(model, SEQUENCES)})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", str(LIMIT), "--max-num-batched-tokens", "96", "--additional-config", budget]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the engine in a process of its own, as users run it
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    running = Server(model, folder / "model", port, process)
    try:
        deadline = time.monotonic() + 400
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            with contextlib.suppress(OSError, http.client.HTTPException):
                running.metric("num_requests_running")
                break
            time.sleep(1)
        assert f"states: {SEQUENCES} sequences fit" in log.read_text()
        yield running
        assert process.poll() is None, log.read_text()[-4000:]
    finally:
        process.terminate()
        process.wait(60)


def test_streams_and_plain_answers(server: Server) -> None:
    prompts = prompts_of([1, 30, 100])
    for prompt, want in zip(prompts, expected(server.model, prompts, NEW), strict=True):
        status, answer = server.ask(greedy(prompt))
        assert status == 200
        assert tokens_of(answer) == want
        assert answer["choices"][0]["finish_reason"] == "length"
        connection = server.send(greedy(prompt, stream=True))
        pieces = list(events(connection.getresponse()))
        connection.close()
        assert [token for piece in pieces for token in tokens_of(piece)] == want
        assert len(pieces) > NEW // 2, "the tokens come one by one"
        text = tiny_tokenizer().decode(want, skip_special_tokens=True)
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == text


def test_stop_strings_logprobs_and_samples(server: Server) -> None:
    prompt = prompts_of([20])[0]
    want = expected(server.model, [prompt], NEW)[0]
    text = tiny_tokenizer().decode(want, skip_special_tokens=True)
    stop = text[5:7]
    choice = server.ask(greedy(prompt, stop=[stop]))[1]["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"

    status, answer = server.ask(greedy(prompt, 12, temperature=1.0, n=3, seed=1, logprobs=1))
    assert status == 200
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    for choice in answer["choices"]:
        ids = choice["token_ids"]
        with torch.no_grad():
            logits = server.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        got = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(got, logprobs, rtol=1e-3, atol=1e-3)


def test_bad_requests_are_refused_and_disturb_nobody(server: Server) -> None:
    prompt = prompts_of([150])[0]
    want = expected(server.model, [prompt], NEW)[0]
    name = {"model": str(server.folder)}
    for bad in (
        greedy(prompts_of([LIMIT + 1])[0]),
        greedy([97]),
        greedy([-1]),
        greedy([10**30]),
        greedy([]),
        greedy(prompt, -1),
        greedy(prompt, n=0),
        greedy(prompt, temperature=-1),
        greedy(prompt, logprobs=10**9),
        greedy(prompt, stop=""),
        {"prompt": {"a": 1}},
        {"model": "another", "prompt": prompt},
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": ' + b"[" * 100_000,
        b"\xff\xfe\x00",
        json.dumps(name | {"prompt": prompt, "temperature": float("nan")}).encode(),
        json.dumps(name | {"prompt": prompt, "max_tokens": 10**30}).encode(),
    ):
        running = server.send(greedy(prompt))
        status, answer = server.ask(bad)
        assert 400 <= status < 500, f"{bad!r:.200}: {status} {answer}"
        assert answer.get("error") or answer.get("detail"), answer
        assert tokens_of(json.loads(running.getresponse().read())) == want
        running.close()
    message = str(server.ask(greedy(prompts_of([LIMIT + 1])[0]))[1])
    assert str(LIMIT) in message
    assert "context length" in message


def run_client(
    server: Server,
    prompts: list[list[int]],
    answers: list[list[int]],
    number: int,
    until: float,
    counts: collections.Counter[str],
    wrong: list[str],
) -> None:
    """Ask until the time is over. Every third request is dropped at a random token."""
    chance = random.Random(number)
    try:
        while time.monotonic() < until:
            place = chance.randrange(len(prompts))
            new = chance.randint(1, NEW)
            want = answers[place][:new]
            if chance.random() < 0.3:
                status, answer = server.ask(greedy(prompts[place], new))
                if status != 200 or tokens_of(answer) != want:
                    wrong.append(f"client {number}, prompt {place}: {status}, {answer}")
                counts["whole"] += 1
                continue
            connection = server.send(greedy(prompts[place], new, stream=True))
            drop = chance.randrange(new + 1) if chance.random() < 0.5 else None
            got: list[int] = []
            if drop != 0:  # otherwise the client is gone before the first token
                for event in events(connection.getresponse()):
                    got += tokens_of(event)
                    if drop is not None and len(got) >= drop:
                        break
            connection.close()
            if got != want[: len(got)] or (drop is None and got != want):
                wrong.append(f"client {number}, prompt {place}: got {got}, expected {want}")
            counts["streamed" if drop is None else "dropped"] += 1
    except Exception as error:  # a thread's own would be lost
        wrong.append(f"client {number}: {error!r}")


@pytest.mark.slow
@pytest.mark.soak
def test_64_clients_that_disconnect_at_random(server: Server) -> None:
    """No wrong token, no crash, and afterwards every state of the pool is free again."""
    prompts = prompts_of([1 + 41 * place % 150 for place in range(24)])
    answers = expected(server.model, prompts, NEW)
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    until = time.monotonic() + SECONDS
    clients = [
        threading.Thread(target=run_client, args=(server, prompts, answers, number, until, counts, wrong))
        for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    waiting = 0.0
    while time.monotonic() < until:
        waiting = max(waiting, server.metric("num_requests_waiting"))
        time.sleep(1)
    for client in clients:
        client.join(300)
    print(f"{dict(counts)} requests in {SECONDS:.0f} s, at most {waiting:.0f} waiting")
    assert not wrong, wrong[:3]
    assert min(counts["whole"], counts["streamed"], counts["dropped"]) > 0
    assert waiting > 0, "the pool was never full"
    assert server.process.poll() is None
    deadline = time.monotonic() + 120
    while server.metric("num_requests_running") + server.metric("num_requests_waiting"):
        assert time.monotonic() < deadline, "requests of clients that are gone still run"
        time.sleep(0.5)

    # Every state is free: as many sequences run at once as the pool holds.
    most = 0.0
    connections = [server.send(greedy(prompts[0], LIMIT - len(prompts[0]))) for _ in range(SEQUENCES + 4)]
    deadline = time.monotonic() + 60
    while most < SEQUENCES and time.monotonic() < deadline:
        most = max(most, server.metric("num_requests_running"))
    for connection in connections:
        assert tokens_of(json.loads(connection.getresponse().read()))[:NEW] == answers[0]
        connection.close()
    assert most == SEQUENCES
