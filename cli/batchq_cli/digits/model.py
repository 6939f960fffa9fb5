"""The demo's model, in the form of any user's: ``batchq worker --model batchq_cli.digits.model:load``.

Eight small networks vote. Each looks at the image with two convolutions, then reads its eight columns from
both sides with an LSTM. That is a chain of many small operations, as most real networks are at batch size 1:
one image costs 2 to 5 ms of one core, 32 of them 5 to 10 ms together. Weights: ``weights.npz``, plain
float16 arrays, made by ``bench/train_digits.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import nn

MEMBERS = 8
CHANNELS = 12
HIDDEN = 24
MAX_PIXEL = 16.0


def build() -> Any:
    """Return the untrained ensemble: a ModuleList of its members."""
    return nn.ModuleList(
        nn.ModuleDict(
            {
                "look": nn.Conv2d(1, CHANNELS, 3, padding=1),
                "shrink": nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, stride=(2, 1)),
                "read": nn.LSTM(4 * CHANNELS, HIDDEN, num_layers=2, bidirectional=True, batch_first=True),
                "decide": nn.Linear(2 * HIDDEN, 10),
            }
        )
        for _ in range(MEMBERS)
    )


def logits(member: Any, pixels: Any) -> Any:
    """Return one member's scores, shape (n, 10), for images of shape (n, 1, 8, 8) in 0..1."""
    seen = torch.relu(member["shrink"](torch.relu(member["look"](pixels))))  # (n, channels, 4, 8)
    columns = seen.permute(0, 3, 1, 2).flatten(2)  # (n, 8 columns, 4 * channels)
    read, _ = member["read"](columns)
    return member["decide"](read.mean(1))


def to_pixels(images: Any) -> Any:
    """Return images (n, 8, 8) in 0..16 as the networks want them: float32 (n, 1, 8, 8) in 0..1."""
    return torch.as_tensor(np.asarray(images, dtype=np.float32)).unsqueeze(1) / MAX_PIXEL


def load(device: str = "cpu") -> Callable[[list[Any]], list[dict[str, Any]]]:
    """Return ``predict``: a list of 8x8 images in 0..16 in, for each a dict out.

    ``label`` is the digit, ``confidence`` its probability; ``batch`` and ``model_seconds`` tell how many
    images were in the same batch and how long the networks took for it, so that a caller can see what
    batching does.
    """
    torch.set_num_threads(1)  # operations this small lose by being spread over threads
    ensemble = build()
    with resources.files("batchq_cli.digits").joinpath("weights.npz").open("rb") as file:
        weights = np.load(file, allow_pickle=False)
        ensemble.load_state_dict(
            {name: torch.from_numpy(weights[name].astype(np.float32)) for name in weights.files}
        )
    ensemble.to(device).eval()

    def predict(images: list[Any]) -> list[dict[str, Any]]:
        started = time.perf_counter()
        with torch.inference_mode():
            pixels = to_pixels(np.stack(images)).to(device)
            votes = torch.stack([logits(member, pixels).softmax(1) for member in ensemble]).mean(0)
            confidences, labels = votes.max(1)
            pairs = list(zip(labels.tolist(), confidences.tolist(), strict=True))
        seconds = time.perf_counter() - started
        return [
            {"label": label, "confidence": confidence, "batch": len(images), "model_seconds": seconds}
            for label, confidence in pairs
        ]

    return predict
