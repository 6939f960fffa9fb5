"""examples/images: the bytes of pictures in, labels out; a broken one is its sender's trouble alone."""

from __future__ import annotations

import importlib.util
import io
import os
import re
from typing import Any

import pytest

from batchq import AsyncClient, ModelError
from tests.conftest import ROOT, StartWorker

NEEDED = ("PIL", "fastapi", "httpx", "numpy", "sklearn", "torch")

pytestmark = pytest.mark.skipif(
    not os.environ.get("CI") and any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason=f"needs {', '.join(NEEDED)}",
)

MODEL = "examples.images.classifier:load"


def picture(digit: Any, kind: str = "PNG") -> bytes:
    """Return one of the 8 x 8 digits as a file of 64 x 64 pixels."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray((digit * 15.9).astype("uint8")).resize((64, 64), Image.Resampling.NEAREST).save(
        file, kind
    )
    return file.getvalue()


def unfolds() -> bytes:
    """Return a PNG of 4 KB that has 36 million pixels."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (6000, 6000)).save(file, "PNG")
    return file.getvalue()


async def test_each_picture_gets_its_label_and_a_broken_one_fails_alone(
    start_worker: StartWorker, redis_url: str
) -> None:
    import numpy as np

    from batchq_cli.digits import data, model

    images, _ = data.held_out()
    images = images[:60]
    expected = [answer["label"] for answer in model.load()(list(images))]
    files = [picture(image, ("PNG", "JPEG")[i % 2]) for i, image in enumerate(images)]
    broken = {3: b"", 10: b"no picture at all", 31: files[31][:-40], 32: unfolds(), 59: b"GIF89a" + files[59]}
    sent = [broken.get(i, file) for i, file in enumerate(files)]

    start_worker(MODEL)
    async with AsyncClient(redis_url) as queue:
        answers = await queue.predict_many(sent, timeout=60, return_exceptions=True)
    for i, answer in enumerate(answers):
        if i in broken:
            assert isinstance(answer, ModelError), i
            assert answer.error_type == "BadImageError"
        else:
            assert answer["label"] == int(np.argmax(answer["probabilities"])) == expected[i]
            assert sum(answer["probabilities"]) == pytest.approx(1, abs=1e-5)


async def test_the_api_answers_pictures_and_says_400_to_what_is_none(
    start_worker: StartWorker, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    from batchq_cli.digits import data
    from examples.images import app as example

    start_worker(MODEL)
    monkeypatch.setenv("BATCHQ_REDIS_URL", redis_url)
    monkeypatch.setattr(example, "MAX_BYTES", 5000)
    images, labels = data.held_out()
    async with example.lifespan(example.app) as state:

        async def served(scope: Any, receive: Any, send: Any) -> None:
            await example.app({**scope, "state": dict(state)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://api") as api:
            good = await api.post("/classify", content=picture(images[0]))
            bad = await api.post("/classify", content=picture(images[0])[:50])
            large = await api.post("/classify", content=bytes(5001))
    assert (good.status_code, good.json()["label"]) == (200, labels[0])
    assert (bad.status_code, large.status_code) == (400, 413)
    assert "not a PNG or JPEG" in bad.json()["message"]


def test_the_picture_that_the_readme_makes_is_one_that_the_model_reads(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from examples.images.classifier import load

    readme = (ROOT / "examples" / "images" / "README.md").read_text()
    [script] = re.findall(r'python -c "\n(.*?)"\n', readme, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "README.md", "exec"), {})
    model = load().eval()
    with torch.inference_mode():
        [answer] = model.split(model(model.collate([(tmp_path / "digit.png").read_bytes()])), 1)
    assert capsys.readouterr().out == f"this is a {answer['label']}\n"
