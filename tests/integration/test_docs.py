"""What the documents tell one to do, done."""

from __future__ import annotations

import ast
import asyncio
import re
import types

import pytest
import redis as redis_py

from batchq import AsyncLocalClient, commands, wire
from tests.conftest import ROOT, StartWorker


async def test_the_request_that_the_protocol_shows_is_answered(
    redis_url: str, start_worker: StartWorker
) -> None:
    start_worker("tests.models:echo")
    text = (ROOT / "docs" / "protocol.md").read_text()
    [block] = re.findall(r"```redis\n(.*?)```", text, re.DOTALL)
    block = block.replace("$ADMIT", commands.script("admit").sha.decode())
    answers = []
    with redis_py.Redis.from_url(redis_url, protocol=2) as raw:
        raw.script_load(commands.script("admit").source)
        connection = raw.connection_pool.get_connection()
        for line in block.strip().splitlines():
            tokens = re.findall(r'"(?:\\.|[^"\\])*"|\S+', line)
            words = [ast.literal_eval("b" + token) if token[0] == '"' else token.encode() for token in tokens]
            connection.send_command(*words)
            answers.append(await asyncio.to_thread(connection.read_response, disable_decoding=True))
        raw.connection_pool.release(connection)
    pushed, admitted = answers[3]
    assert (pushed, admitted[0], admitted[2]) == (1, b"ok", 1)
    [reply] = wire.decode_replies(answers[4])
    assert (reply.id, reply.code, reply.value) == (bytes(range(16)), "", "hello")
    assert answers[5] == 1


async def test_the_model_that_the_readme_shows_runs() -> None:
    pytest.importorskip("torch")
    text = (ROOT / "README.md").read_text()
    source = re.findall(r"```python\n(# mymodel\.py.*?)# api\.py", text, re.DOTALL)[0]
    module = types.ModuleType("mymodel")
    exec(compile(source, "README.md", "exec"), module.__dict__)
    async with AsyncLocalClient(module.load) as queue:
        answer = await queue.predict([1, 2, 3, 4])
    assert [type(number) for number in answer] == [float, float]
