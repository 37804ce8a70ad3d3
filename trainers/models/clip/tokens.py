"""Tokenises captions for a CLIP model: cuts them at its context, and counts the captions that were cut.

CLIP's tokeniser has 48,894 merges on top of 512 byte tokens, with the most frequent first. A model with a
smaller vocabulary uses only the first merges: every caption can still be written, in more tokens, and the
vocabulary depends on no record.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpgcl_core.errors import ConfigError
from trainers.models.clip.published_models import ClipSpec
from trainers.torchvision_import import open_clip

CLIP_VOCABULARY = 49_408
_BYTES_AND_ENDS = 512 + 2
_MAX_CACHED_CAPTIONS = 2**18
"""Number of captions whose tokens are kept: some hundred megabytes."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Captions as token numbers.

    Attributes:
      tokens: int64 `[n, context_length]`.
      num_truncated: number of captions that were cut. **Private-only**: it depends on the records.
    """

    tokens: Tensor
    num_truncated: int


class ClipTokenizer:
    """The tokeniser of a CLIP model.

    A caption's tokens depend only on that caption.

    Args:
      spec: the model's specification; its vocabulary is CLIP's, the beginning of CLIP's, or a vocabulary of
        the package transformers.

    Attributes:
      context_length: tokens per caption.

    Raises:
      ConfigError: the vocabulary is too small for any text, or a tokeniser of transformers cannot be loaded.

    >>> from trainers.models.clip.published_models import ClipConfig, find_clip
    >>> ClipTokenizer(find_clip(ClipConfig()))(["a red square", "red " * 99]).num_truncated
    1
    """

    def __init__(self, spec: ClipSpec) -> None:
        self.context_length = spec.context_length
        self._tokenizer = _tokenizer(spec)
        self._tokens_of = lru_cache(_MAX_CACHED_CAPTIONS)(self._tokenise)

    def __call__(self, captions: Sequence[str]) -> Tokens:
        """Return the tokens of captions, in their order; a repeated caption is tokenised once."""
        found = [self._tokens_of(caption) for caption in captions]
        empty = torch.zeros(0, self.context_length, dtype=torch.int64)
        return Tokens(
            tokens=torch.stack([tokens for tokens, _ in found]).long() if found else empty,
            num_truncated=sum(cut for _, cut in found),
        )

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text that tokens spell, in lower case like CLIP's vocabulary.

        >>> from trainers.models.clip.published_models import ClipConfig, find_clip
        >>> tokenizer = ClipTokenizer(find_clip(ClipConfig()))
        >>> tokenizer.text(tokenizer(["A red ring."]).tokens[0, 1:6].tolist())
        'a red ring.'
        """
        return re.sub(r" (?=[.,;:!?])", "", self._tokenizer.decode(list(tokens)).strip())

    def _tokenise(self, caption: str) -> tuple[Tensor, bool]:
        """Return the tokens of a caption, and whether it was cut.

        Only a caption that fills its context may be longer. It is tokenised again with one more place, to
        find out. The last two places are checked, because some vocabularies pad with their end token.
        """
        empty, tokens = self._tokenizer(["", caption], context_length=self.context_length)
        padding = empty[-1]
        if (tokens[-2:] == padding).all():
            return tokens.int(), False
        longer: Tensor = self._tokenizer([caption], context_length=self.context_length + 1)[0]
        # The additional place is not padding, or moves the end token.
        return tokens.int(), bool((longer[:-1] != tokens).any() or longer[-1] != padding)


def write_merges(path: Path, vocabulary: int) -> None:
    """Write the merges of a vocabulary for `open_clip.SimpleTokenizer(bpe_path=...)`.

    Args:
      path: the path of the file, `.gz`.
      vocabulary: number of tokens, between 514 and CLIP's 49,408.

    Raises:
      ConfigError: the number of tokens is outside that range.
    """
    if not _BYTES_AND_ENDS <= vocabulary <= CLIP_VOCABULARY:
        raise ConfigError(
            f"a vocabulary must have {_BYTES_AND_ENDS} to {CLIP_VOCABULARY} tokens, including "
            f"{_BYTES_AND_ENDS} for bytes, start and end; got {vocabulary}"
        )
    with gzip.open(open_clip().tokenizer.default_bpe(), "rt", encoding="utf-8") as source:
        lines = source.read().split("\n")[: 1 + vocabulary - _BYTES_AND_ENDS]  # the first is a heading
    # The file has no date and no name, so that the same vocabulary gives the same bytes.
    path.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


def write_fast_tokenizer(folder: Path, merges: Path) -> None:
    """Write a vocabulary's tokeniser for transformers, through which open_clip reads it from a folder.

    open_clip cleans the text. Everything else is as in `open_clip.SimpleTokenizer(bpe_path=merges)`: lower
    case, the same words, bytes and merges, start and end tokens, and padding with zeros.

    Args:
      folder: the folder for `open_clip.get_tokenizer("local-dir:FOLDER")`.
      merges: the file that `write_merges` wrote.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    plain = open_clip().SimpleTokenizer(bpe_path=str(merges))
    start, end = "<start_of_text>", "<end_of_text>"
    tokenizer: Any = Tokenizer(
        models.BPE(
            vocab=plain.encoder, merges=list(plain.bpe_ranks), end_of_word_suffix="</w>", unk_token=end
        )
    )
    tokenizer.normalizer = normalizers.Lowercase()
    words = pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([start, end, _PADDING])
    ends = [(start, plain.encoder[start]), (end, plain.encoder[end])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", pair=None, special_tokens=ends
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    # open_clip replaces the separator by zeros (`OWN_TOKENIZER`); here the separator is the padding token.
    names = {"bos_token": start, "eos_token": end, "unk_token": end, "pad_token": _PADDING}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "sep_token": _PADDING}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


_PADDING = "<|nothing but padding|>"
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def _tokenizer(spec: ClipSpec) -> Any:
    """Return open_clip's tokeniser, which maps texts to tokens when called, and back with `decode`."""
    text = spec.architecture["text_cfg"]
    if text.get("hf_tokenizer_name") or "siglip" in spec.name.lower():
        return _load_transformers_tokenizer(spec.name)
    vocabulary = min(int(text.get("vocab_size", CLIP_VOCABULARY)), CLIP_VOCABULARY)
    if vocabulary == CLIP_VOCABULARY:
        return open_clip().SimpleTokenizer(**text.get("tokenizer_kwargs", {}))
    with tempfile.TemporaryDirectory() as folder:
        merges = Path(folder) / "merges.txt.gz"
        write_merges(merges, vocabulary)
        return open_clip().SimpleTokenizer(bpe_path=str(merges))


def _load_transformers_tokenizer(name: str) -> Any:
    """Return a tokeniser that open_clip loads through transformers, by download or from its cache."""
    folder = Path(name.removeprefix("local-dir:")).expanduser()
    try:
        return open_clip().get_tokenizer(f"local-dir:{folder}" if folder.is_dir() else name)
    except Exception as error:  # offline, or a file is missing: each library has its own errors
        raise ConfigError(
            f"the tokeniser of CLIP model {name} cannot be loaded ({type(error).__name__}). Put its "
            "files and open_clip_config.json into one folder, and set --network to this folder."
        ) from error
