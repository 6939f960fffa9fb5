"""Image classification: ``batchq worker --model classifier:load``. Which digit does a picture show?

A value is the bytes of a PNG or JPEG, white on black; the answer ``{"label": 3, "probabilities": [ten of them]}``. The small networks
are those of ``batchq demo``, trained on pictures of 8 x 8 pixels: put your own module into ``load`` and its size into ``read``.
"""

import io
from importlib import resources

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

from batchq_cli.digits import model as digits

SIDE = 8
MAX_PIXELS = 25_000_000  # a small file can unfold into gigabytes


def load():
    """Called once in each worker process; batchq moves the module to its device and switches it to inference."""
    return Classifier()


class BadImageError(ValueError):
    """These bytes are no image that can be read."""


def read(file):
    """Return the picture as the network wants it: float32, (1, SIDE, SIDE), 0 to 1."""
    try:
        with Image.open(io.BytesIO(file), formats=("PNG", "JPEG")) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadImageError(f"{image.width} x {image.height} pixels; at most {MAX_PIXELS:,} are read")
            upright = ImageOps.exif_transpose(image)  # telephones turn pictures by a note in the file
            small = upright.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    except BadImageError:
        raise
    except Exception as error:  # Pillow raises many kinds of them for broken files
        raise BadImageError("not a PNG or JPEG that can be read") from error
    return torch.from_numpy(np.asarray(small, dtype=np.float32) / 255).unsqueeze(0)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = digits.build()
        with resources.files("batchq_cli.digits").joinpath("weights.npz").open("rb") as file:
            weights = np.load(file, allow_pickle=False)
            self.members.load_state_dict({name: torch.from_numpy(weights[name]) for name in weights.files})

    def collate(self, files):
        """A broken picture raises: batchq runs the others without it, and its caller alone gets the error."""
        return torch.stack([read(file) for file in files])

    def forward(self, images):
        return torch.stack([digits.logits(member, images).softmax(1) for member in self.members]).mean(0)

    def split(self, output, n):
        return [{"label": int(shares.argmax()), "probabilities": shares.tolist()} for shares in output]


def _sample():
    file = io.BytesIO()
    Image.new("L", (64, 64)).save(file, "PNG")
    return file.getvalue()


sample = _sample()  # for batchq worker --check
