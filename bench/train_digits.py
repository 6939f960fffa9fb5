"""Train the demo's model and write its weights: ``python bench/train_digits.py`` (``demo`` extra; a minute).

It trains on the images of ``batchq_cli.digits.data.training()`` only and reports the accuracy on the held-out
ones once, at the end: nothing was chosen by looking at them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from batchq_cli.digits import data, model

DEFAULT_OUT = Path(model.__file__).with_name("weights.npz")


def shifted(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Move each image by at most one pixel each way: a written digit stays what it is."""
    moves = rng.integers(-1, 2, size=(len(images), 2))
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    return np.stack([padded[i, 1 + dy : 9 + dy, 1 + dx : 9 + dx] for i, (dy, dx) in enumerate(moves)])


def accuracy(ensemble: nn.ModuleList, images: np.ndarray, labels: np.ndarray) -> tuple[float, list[float]]:
    """Return the ensemble's accuracy and each member's."""
    with torch.inference_mode():
        votes = [model.logits(member, model.to_pixels(images)).softmax(1) for member in ensemble]
    singly = [float((vote.argmax(1).numpy() == labels).mean()) for vote in votes]
    return float((torch.stack(votes).mean(0).argmax(1).numpy() == labels).mean()), singly


def train(
    member: nn.ModuleDict, images: np.ndarray, labels: np.ndarray, *, epochs: int, rng: np.random.Generator
) -> float:
    """Train one member; return its last epoch's loss."""
    batch = 64
    steps = epochs * -(-len(images) // batch)
    optimizer = torch.optim.AdamW(member.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.02)
    last = 0.0
    for _ in range(epochs):
        order = rng.permutation(len(images))
        losses = []
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            optimizer.zero_grad()
            loss = loss_of(
                model.logits(member, model.to_pixels(shifted(images[chosen], rng))),
                torch.from_numpy(labels[chosen]),
            )
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        last = float(np.mean(losses))
    return last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    images, labels = data.training()
    ensemble = model.build()
    for number, member in enumerate(ensemble):
        started = time.perf_counter()
        loss = train(
            member, images, labels, epochs=options.epochs, rng=np.random.default_rng([options.seed, number])
        )
        seconds = time.perf_counter() - started
        print(
            f"network {number + 1} of {len(ensemble)}: loss {loss:.4f}, {seconds:.0f} s",
            flush=True,
        )

    # what is reported is what is shipped: float16
    ensemble.half().float().eval()
    kept = {name: tensor.numpy().astype(np.float16) for name, tensor in ensemble.state_dict().items()}
    np.savez_compressed(options.out, **kept)

    together, singly = accuracy(ensemble, *data.held_out())
    print(
        f"held-out images: {data.HELD_OUT}; correct: {together:.2%} together, "
        f"{min(singly):.2%} to {max(singly):.2%} alone"
    )
    print(f"{options.out}: {options.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
