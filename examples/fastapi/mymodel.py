"""A model in the form that ``batchq worker --model mymodel:load`` wants: tells praise from complaint.

It is tiny and learns from the sentences below each time it is loaded (about a second), so that the example
needs no download. Put your own model into ``load`` and keep the shape: a list in, an answer for each out.
"""

import itertools
import re

import torch
from torch import nn

PRAISE = """
what a lovely film | i love it | great acting and a great story | one of the best meals i have had
this works perfectly | the staff were kind and helpful | i am very happy with it
excellent quality, fast delivery | a wonderful evening | beautiful, funny and clever
i enjoyed every minute | highly recommended | it was really good | not bad at all
the room was clean and the view amazing | a pleasant surprise | thank you, perfect | superb value
brilliant from start to end | my favourite so far | easy to use and reliable
the best purchase this year | fantastic service | i would buy it again
"""
COMPLAINT = """
what a terrible film | i hate it | bad acting and a dull story | one of the worst meals i have had
this does not work | the staff were rude and slow | i am very unhappy with it
poor quality, late delivery | an awful evening | ugly, boring and stupid | i regret every minute
not recommended | it was really bad | not good at all | the room was dirty and the view depressing
a nasty surprise | never again, broken | a waste of money | horrible from start to end
my biggest disappointment so far | hard to use and unreliable | the worst purchase this year
useless service | i want my money back
"""


sample = "what a lovely film"  # for batchq worker --check


def features(text):
    """Words and pairs of neighbours: 'not good' must not count as 'good'."""
    words = re.findall(r"[a-z']+", text.lower())
    return words + [f"{a} {b}" for a, b in itertools.pairwise(words)]


def load(device="cpu"):
    """Called once in each worker process; returns ``predict``."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocks = [re.split(r"\s*[|\n]\s*", block.strip()) for block in (COMPLAINT, PRAISE)]
    known = sorted({feature for block in blocks for text in block for feature in features(text)})
    number = {feature: index for index, feature in enumerate(known, 1)}

    def encode(texts):
        """The known features of all texts in one row, and where each text starts; 0: nothing known."""
        rows = [[number[f] for f in features(text) if f in number] or [0] for text in texts]
        starts = torch.tensor([0] + [len(row) for row in rows[:-1]]).cumsum(0)
        return torch.tensor([n for row in rows for n in row], device=device), starts.to(device)

    model = nn.EmbeddingBag(len(known) + 1, 2, mode="mean", padding_idx=0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2)
    inputs = encode(blocks[0] + blocks[1])
    labels = torch.tensor([0] * len(blocks[0]) + [1] * len(blocks[1]), device=device)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(*inputs), labels).backward()
        optimizer.step()

    def predict(texts):
        with torch.inference_mode():
            shares = model(*encode(texts)).softmax(1)[:, 1].tolist()
        return [{"label": "praise" if p >= 0.5 else "complaint", "praise": round(p, 3)} for p in shares]

    return predict
