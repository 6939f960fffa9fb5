"""Ask Python's own documentation: ``python search.py "how do I catch an exception?"``, while a worker runs.

First embeds all that it searches: ``map`` keeps some hundred texts under way and gives their answers in order.
"""

import asyncio
import re
import sys
import zlib
from pydoc_data.topics import topics

import numpy as np

from batchq import AsyncClient


def passages(count=None):
    """English that comes with Python: some 2,500 sentences, paragraphs and pages, of one to 600 words, in no order.

    With ``count``, so many of them: as many short and long ones in proportion, the shortest and the longest included.
    """
    pages = [[" ".join(part.split()) for part in re.split(r"\n\s*\n", page)] for page in topics.values()]
    pages = [
        [part for part in parts if re.fullmatch(r'[A-Z"].*[a-z")][.:]', part)] for parts in pages
    ]  # prose
    found = {
        text for parts in pages for part in parts for text in (part, *re.split(r"(?<=[.:]) (?=[A-Z])", part))
    }
    found |= {page for page in map(" ".join, pages) if 300 <= len(page.split()) <= 600}
    texts = sorted(found, key=lambda text: (len(text.split()), text))
    if count is not None:
        texts = [texts[round(i * (len(texts) - 1) / (count - 1))] for i in range(count)]
    return sorted(texts, key=lambda text: zlib.crc32(text.encode()))


async def main(question):
    texts = passages(1000)
    async with AsyncClient() as queue:  # BATCHQ_REDIS_URL and BATCHQ_QUEUE say where
        vectors = np.stack([vector async for vector in queue.map(texts)])
        scores = vectors @ await queue.predict(question)
    for i in scores.argsort()[:-4:-1]:
        print(f"{scores[i]:.2f}  {texts[i]}\n")


if __name__ == "__main__":
    asyncio.run(main(" ".join(sys.argv[1:]) or "how do I catch an exception?"))
