"""Tiny random models on disk, with a tokenizer, for the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from fanfold.show.text import default_text


def tokenizer(folder: Path) -> int:
    """Save a word tokenizer of Python's manual in `folder`; -> its vocabulary's size."""
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    words.train_from_iterator(
        [default_text()[:40_000]], trainers.WordLevelTrainer(vocab_size=200, special_tokens=["[UNK]", "[PAD]"])
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
    fast.save_pretrained(folder)
    return words.get_vocab_size()


def llama(folder: Path, **more: object) -> Path:
    """Two layers, d_model 32, d_ff 88, a context of 96; `more` goes into the config."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        vocab_size=tokenizer(folder),
        eos_token_id=None,
        bos_token_id=None,
        **more,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def bert(folder: Path, cls: type = transformers.BertModel) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        vocab_size=tokenizer(folder),
    )
    cls(config).save_pretrained(folder)
    return folder


def vit(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder


def resnet(folder: Path) -> Path:
    """A model without any FFN."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    transformers.ResNetForImageClassification(config).save_pretrained(folder)
    return folder


def t5(folder: Path) -> Path:
    """An encoder and a decoder of three layers each; the first ones also hold the position biases."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=3, vocab_size=60, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder
