"""What a first ingest says of its texts and columns: what its model, BM25 and filters make of them.

A sample of texts is cut by the model's tokenizer. A model does not fit a language whose tokens it does not
know, or whose words it cuts into many. A column of texts is told of where most of them are numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as arrow_compute
import pyarrow.dataset as pa_dataset
from cairn.pipeline.config import DEFAULT_MODEL, NO_MODEL, IngestConfig
from cairn.pipeline.corpus.columns import PLAIN, WITH_COMMA, are_names, decimals_of
from cairn.pipeline.lexical.languages import AUTO, STEMMERS, UNSPACED, language_of
from cairn.pipeline.lexical.tokenizer import main_languages, runs_of
from cairn.pipeline.model.folders.names import describe_model, is_endpoint, model_folder
from cairn.pipeline.types import staged_schema
from tokenizers import Tokenizer

pc: Any = arrow_compute  # its functions are made at import time, unseen by type checkers

SAMPLE_TEXTS: Final = 256
SAMPLE_CHARACTERS: Final = 400
MOST_UNKNOWN: Final = 0.02
"""Share of unknown tokens. The base model has .6 in Chinese, .5 in Thai, none in European languages."""
MOST_TOKENS_A_WORD: Final = 1.6
"""The base model has 1.1 in English, 1.8 in Spanish, 2.2 in German, 5.8 in Russian."""
_UNKNOWN: Final = ("[UNK]", "<unk>")
SHOWN_CHARACTERS: Final = 40
_NUMBER: Final = next(pattern for pattern, kind in PLAIN.items() if kind == pa.float64())
_NUMBERS: Final = (WITH_COMMA, _NUMBER, r"^0[0-9]+$")
"""Numbers with a comma, also one between thousands, those that are read as such, and codes such as 007."""


def language_warnings(config: IngestConfig, rows: pa_dataset.Dataset) -> tuple[str, ...]:
    """Return what is to be said of the languages of the first texts, nothing of English ones."""
    texts = rows.head(SAMPLE_TEXTS, columns=["text"]).column("text").to_pylist()
    by_language: dict[str, list[str]] = {}
    for text in texts:
        by_language.setdefault(language_of(text), []).append(text[:SAMPLE_CHARACTERS])
    main = main_languages({language: len(own) for language, own in by_language.items()})
    if main in {(), ("en",)}:
        return ()
    strange: list[str] = []
    model, advice = config.encoder.model, "choose a multilingual model with --model"
    if (is_endpoint(model) or model == NO_MODEL) and config.encoder.token_bytes:
        model, advice = DEFAULT_MODEL, "leave --token-bytes out"
    if not is_endpoint(model) and model != NO_MODEL:  # whose tokenizer is here
        # Loads torch, which an ingest without changes does without.
        from cairn.pipeline.model.folders.checkpoint import read_checkpoint

        tokenizer = read_checkpoint(model_folder(model)).tokenizer
        strange = [each for language in main for each in _misfit(language, by_language[language], tokenizer)]
    warnings: list[str] = []
    if strange:
        warnings.append(
            f"{describe_model(model)} must know the languages of the texts, got {', '.join(strange)}; "
            f"{advice}, in a new collection"
        )
    if config.index.language == AUTO:
        counted = ", ".join(f"{language} ({_how_counted(language)})" for language in main)
        warnings.append(
            f"BM25 counts the words of each text by its language, here {counted}; if all texts are in one, "
            "name it with --language, in a new collection"
        )
    return tuple(warnings)


def column_warnings(rows: pa_dataset.Dataset, given: Sequence[str] = ()) -> Iterator[str]:
    """Say which columns of rows are texts and hold numbers: with commas, or beside texts.

    What other warnings that were ``given`` say of a column is not said again.
    """
    commas: list[str] = []
    points: list[str] = []
    mixed: list[str] = []
    own = staged_schema([]).names
    fields = [field.name for field in rows.schema if field.type == pa.string()]
    for name in [name for name in fields if name not in own]:
        if any(each.startswith(f"column {name!r} holds ") for each in given):
            continue
        column = rows.to_table(columns=[name]).column(name).drop_null()
        shown = {pattern: column.filter(pc.match_substring_regex(column, pattern)) for pattern in _NUMBERS}
        with_commas, plain, codes = shown.values()
        others = len(column) - len(plain) - len(codes)
        if len(with_commas) and 2 * (len(with_commas) + len(plain)) >= len(column):
            commas.append(f"{name!r}, such as {with_commas[0].as_py()!r}")
        elif len(plain) == len(column) and (decimals := decimals_of(column.combine_chunks())):
            points += [] if are_names(decimals) else [f"{name!r}, such as {plain[0].as_py()!r}"]
        elif len(plain) >= others > 0:
            is_other = pc.invert(pc.match_substring_regex(column, "|".join(_NUMBERS[1:])))
            other = column.filter(is_other)[0].as_py()
            mixed.append(f"{name!r}, with {other[:SHOWN_CHARACTERS]!r} among them")
    told = "are kept as texts, and filters compare them as such"
    if commas:
        beside = f", and so are those with points beside them ({'; '.join(points)})" if points else ""
        yield (
            f"numbers with commas {told} ({'; '.join(commas)}){beside}; write decimal points and no other "
            "signs, or leave the columns out with --metadata-columns"
        )
    if mixed:
        yield (
            f"numbers in columns with other texts {told} ({'; '.join(mixed)}); leave those fields empty, or "
            "the columns out with --metadata-columns"
        )


def _misfit(language: str, texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield how a model misses a language, where it does."""
    words = [runs_of(text) for text in texts]  # without the signs of markup
    tokens: Counter[int] = Counter()
    for encoding in tokenizer.encode_batch([" ".join(each) for each in words], add_special_tokens=False):
        tokens.update(encoding.ids)
    unknown = sum(tokens[number] for name in _UNKNOWN if (number := tokenizer.token_to_id(name)) is not None)
    num_words = sum(map(len, words))
    if unknown > MOST_UNKNOWN * tokens.total():
        yield f"{language}, of whose tokens {unknown / tokens.total():.0%} are unknown to it"
    elif language not in UNSPACED and tokens.total() > MOST_TOKENS_A_WORD * num_words > 0:
        yield f"{language}, whose words it cuts into {tokens.total() / num_words:.1f} tokens each"


def _how_counted(language: str) -> str:
    if language in UNSPACED:
        return "pairs of characters"
    return "stems" if language in STEMMERS else "words as they stand"
