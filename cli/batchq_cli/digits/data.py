"""The 1,797 handwritten digits that scikit-learn ships: 8x8 pixels, no download.

They are split once, by a fixed permutation: ``training()`` has 1,437 of them and ``held_out()`` the 360 that
the model in this package has never seen. Whoever trains or measures takes them from here, so that the
accuracy stays honest.
"""

from __future__ import annotations

from typing import Any

SEED = 20
HELD_OUT = 360


def _split(held_out: bool) -> tuple[Any, Any]:
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    # RandomState, not default_rng: numpy promises the same numbers from it in every version
    order = np.random.RandomState(SEED).permutation(len(digits.target))
    chosen = order[:HELD_OUT] if held_out else order[HELD_OUT:]
    return digits.images[chosen].astype(np.uint8), digits.target[chosen]


def training() -> tuple[Any, Any]:
    """Return the images to train on, uint8 (1437, 8, 8) in 0..16, and their labels, int (1437,)."""
    return _split(held_out=False)


def held_out() -> tuple[Any, Any]:
    """Return the images the model never saw, uint8 (360, 8, 8) in 0..16, and their labels, int (360,)."""
    return _split(held_out=True)
