"""Write a Llama with random weights, a byte-level tokenizer and a chat template: ``make_tiny_model.py FOLDER``.

It has about 115,000 parameters and 375 tokens: it loads at once, and vLLM treats it like any other model. Runs inside
the environment that `build.py` makes, without network; the weights come from a fixed seed.
"""

# mypy: ignore-errors
from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 4096
BEGIN, END, PAD = "<s>", "</s>", "<pad>"
SENTENCES = (
    "the console starts a server and watches its key value cache",
    "a request waits in the queue until the scheduler finds free blocks for it",
    "one two three four five six seven eight nine ten",
    "hello world said the user to the assistant of the system",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """All 256 bytes, three special tokens, and the merges learned from the sentences above."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=375,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES * 50, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BEGIN, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = CONTEXT
    return fast


def model() -> LlamaForCausalLM:
    """Two layers, two heads, hidden size 64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main(folder: str) -> None:
    """Write model and tokenizer into ``folder``."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(folder)
    model().save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
