"""A real vLLM server of a tiny Qwen3-MoE with a tokenizer of words, in a process of its own, on loopback.

The chat template renders a history to the very tokens that were generated, so that a conversation goes on where it left
off. Sampling is kept to whole words for the same reason.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.capture.serving import FIFO
from tests.capture.vllm_engine import QWEN3_MOE, VOCABULARY

ROOT = Path(__file__).parents[2]
#: ids of whole words, which detokenise and tokenise to themselves
WORDS = list(range(20, VOCABULARY))

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"type": "object", "properties": {"words": {"type": "string"}}},
        },
    }
]

_TEMPLATE = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
w10 {% if message.get('tool_calls') %}
{%- for call in message['tool_calls'] -%}{{ call['function']['arguments']['words'] }}{%- endfor -%}
{%- else -%}{{ message['content'] }}{%- endif %} w11 {% else -%}
w{{ {'system': 12, 'user': 13, 'tool': 14}[message['role']] }} {{ message['content'] }} w11 {% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}w10{%- endif -%}"""


def write_model(folder: Path, *, seed: int = 0) -> Any:
    """Weights, tokenizer and chat template; the model, in Transformers."""
    torch.manual_seed(seed)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE))
    model.eval().save_pretrained(folder)
    special = {0: "<unk>", 1: "<bos>", 2: "<eos>", 3: "<pad>"}
    vocabulary = {special.get(index, f"w{index}"): index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    return model


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def running_server(folder: Path, *, log: Path, fifo: Path | None = None) -> Iterator[Server]:
    """The server of a model folder; it is stopped on the way out, and its output is in ``log``.

    ``fifo``: where the tests' middleware writes; None leaves the middleware out.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [
        *("--model", str(folder), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--block-size", "32", "--max-model-len", "256", "--max-num-batched-tokens", "256"),
        *("--enforce-eager", "--no-enable-chunked-prefill", "--enable-return-routed-experts", "--enable-scale-out"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "words"),
        *("--tool-parser-plugin", str(ROOT / "tests" / "capture" / "serving.py")),
        *(() if fifo is None else ("--middleware", "tests.capture.serving.Routes")),
        # on a CPU vLLM asks for that share of the memory to be free, whatever KV cache it is given
        *("--gpu-memory-utilization", "0.05"),
        "--disable-uvicorn-access-log",
    ]
    environment = {**os.environ, FIFO: str(fifo), "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "INFO"}
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ready = threading.Event()
    reader = threading.Thread(target=_copy_output, args=(process, log, ready), daemon=True)
    reader.start()
    try:
        ready.wait()
        # uvicorn says so before it listens
        while process.poll() is None and not _listens(port):
            time.sleep(0.05)
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{log.read_text()[-4000:]}")
        yield Server(url=f"http://127.0.0.1:{port}", process=process)
    finally:
        process.terminate()
        process.wait(timeout=60)
        reader.join()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


def _copy_output(process: subprocess.Popen[str], log: Path, ready: threading.Event) -> None:
    """Output into the log, without end; ``ready`` once the server answers or is gone."""
    output = process.stdout
    if output is None:
        raise TypeError("expected a pipe")
    with output, log.open("w", encoding="utf-8") as file:
        for line in output:
            file.write(line)
            file.flush()
            if "Application startup complete" in line:
                ready.set()
    process.wait()
    ready.set()


def tool_result(reply: Any, words: str) -> list[dict[str, Any]]:
    """The messages that go on from a tool call: the call as it came, and what the tool said."""
    [call] = reply.choices[0].message.tool_calls
    asked = {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments},
    }
    return [
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": call.id, "content": words},
    ]


def words_of(reply: Any) -> str:
    """The words of a tool call."""
    arguments: dict[str, str] = json.loads(reply.choices[0].message.tool_calls[0].function.arguments)
    return arguments["words"]
