"""A learned sparse encoder: which tokens of its vocabulary stand for a text, and what each weighs.

    ids ─▶ transformer ─▶ head for masked tokens ─▶ logits_TX ─▶ max over tokens ─▶ log(1 + relu) ─▶ weights_X

Chunks are read one by one, as the model was trained on passages; of a chunk longer than a row each token has
its highest weight. The strongest :data:`MAX_TOKENS` are kept, quantised to :data:`SPARSE_STEP`. A query's
weights are not quantised; they come from the same pass or from the folder's table, which runs no model.

BERT and its kin run on the engine; models for masked tokens of other families are run by transformers. A
folder has one of three layouts:

    SPLADE's own             config.json and weights of a model for masked tokens, nothing else
    Sentence-Transformers    modules.json: Transformer or MLMTransformer ─▶ SpladePooling
    inference-free           modules.json: Router, whose router_config.json names the modules of documents, as
                             above, and SparseStaticEmbedding for queries: one weight a token

Sources: Formal et al. 2021 (SPLADE v2), eq. 1 and 6; Geng et al. 2024, eq. 4, for the second logarithm.

    B rows    T tokens of a row    N tokens of all    X vocabulary    D model dim
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import Precision
from cairn.pipeline.encode.documents import EncodedDocuments, TokenRows
from cairn.pipeline.encode.tokenization import tokenize
from cairn.pipeline.errors import ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import odd_files_reported, reader_of, require_embeddings
from cairn.pipeline.model.document_encoder import one_torch_thread, run_in_batches
from cairn.pipeline.model.engine.attention import Workspace
from cairn.pipeline.model.engine.precision import default_device, resolve_precision
from cairn.pipeline.model.engine.transformer import ACTIVATE, activation_named, project
from cairn.pipeline.model.engine.weights import Linear
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint, read_tokenizer
from cairn.pipeline.model.folders.names import is_endpoint, model_folder
from cairn.pipeline.model.folders.sentence_transformers_folder import (
    MODULES_NAME,
    SETTINGS_NAME,
    WEIGHTS_NAME,
    SentenceTransformersFolder,
    folder_inside,
    module_list,
    prompts_of,
    read_json,
    read_json_if_any,
    routes_of,
)
from cairn.pipeline.model.transformers_backbone import load_model, max_positions
from cairn.pipeline.types import SPARSE_STEP, SPARSE_WEIGHT
from jaxtyping import Float, Float32, Int64
from safetensors.torch import load_file

MAX_TOKENS: Final = 192
"""Tokens kept of a chunk: a SPLADE of MS MARCO gives 97 of 100 chunks of 45 words fewer (Cranfield)."""
BATCH_TOKENS: Final = 512
"""Logits of so many tokens are 62 MB with the vocabulary of BERT."""
SPARSE_VERSION: Final = 1
"""Raised when the same files come to other weights."""

IDF_NAME: Final = "idf.json"
_MASKED: Final = ("Transformer", "MLMTransformer")
_STATIC: Final = ["SparseStaticEmbedding"]

_BERT: Final = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions")
_ROBERTA: Final = ("lm_head.dense", "lm_head.layer_norm", "lm_head")
_HEADS: Final[Mapping[object, tuple[str, str, str]]] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector"),
}
"""What families of the engine call the dense layer, the norm and the decoder of their heads."""
_Logits = Callable[[Int64[np.ndarray, "B T"], Int64[np.ndarray, " B"]], Float[torch.Tensor, "N X"]]
"""Returns the logits of rows' tokens, row after row, without padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseFolder:
    """Where the transformer lies and how its logits become weights.

    ``takes_log_twice``: weights are log(1 + log(1 + x)) of a positive logit x, else log(1 + x). ``table`` is
    the folder of the weights of queries' tokens, None where the transformer reads queries, too.
    """

    transformer: Path
    takes_log_twice: bool = False
    table: Path | None = None
    query_prompt: str = ""
    document_prompt: str = ""


def read_sparse_folder(folder: Path) -> SparseFolder:
    """Read such a folder; raise :class:`ModelError` for one of another kind."""
    if not (folder / MODULES_NAME).is_file():
        read_json(folder / "config.json")
        return SparseFolder(transformer=folder, table=folder if (folder / IDF_NAME).is_file() else None)
    modules = [
        (_kind(each.get("type")), folder_inside(folder, each.get("path"))) for each in module_list(folder)
    ]
    queries = modules
    if [kind for kind, _ in modules] == ["Router"]:
        queries, modules = routes_of(modules[0][1])
    kinds = [kind for kind, _ in modules]
    if len(kinds) != 2 or kinds[0] not in _MASKED or kinds[1] != "SpladePooling":
        raise ModelError(
            "a sparse encoder must be a transformer for masked tokens and SpladePooling, got the modules "
            f"{', '.join(kinds) or 'of no documents'}; give a SPLADE model, or this one as --model"
        )
    is_static = [kind for kind, _ in queries] == _STATIC
    if not is_static and queries != modules:
        raise ModelError(
            "queries of a sparse encoder must be read as documents or by SparseStaticEmbedding, got "
            f"{', '.join(kind for kind, _ in queries) or 'no modules'}; choose another model"
        )
    query_prompt, document_prompt = prompts_of(read_json_if_any(folder / SETTINGS_NAME))
    return SparseFolder(
        transformer=modules[0][1],
        takes_log_twice=_takes_log_twice(read_json_if_any(modules[1][1] / "config.json")),
        table=queries[0][1] if is_static else None,
        query_prompt=query_prompt,
        document_prompt=document_prompt,
    )


def _takes_log_twice(pooling: Mapping[str, Any]) -> bool:
    strategy = pooling.get("pooling_strategy", "max")
    activation = pooling.get("activation_function", "relu")
    if strategy != "max" or activation not in ("relu", "log1p_relu"):
        raise ModelError(
            "SpladePooling of the model must take the max of relu or log1p_relu, got "
            f"{strategy!r} of {activation!r}; choose another model"
        )
    return activation == "log1p_relu"


def _kind(name: object) -> str:
    return str(name).rpartition(".")[2]


class SparseEncoder:
    """A sparse encoder in memory; ``fingerprint`` names its weights. Safe to share between threads."""

    def __init__(self, model: str, precision: Precision = "auto") -> None:
        if is_endpoint(model):
            raise ModelError(f"a sparse encoder must run here, got the endpoint {model}; give a folder")
        root = model_folder(model)
        with odd_files_reported(root):
            self._folder = read_sparse_folder(root)
            plain = SentenceTransformersFolder(transformer=self._folder.transformer)
            checkpoint = read_checkpoint(self._folder.transformer, modules=plain)
            self._device = default_device()
            dtype = resolve_precision("auto" if precision == "int8" else precision, self._device)
            self._tokenizer = checkpoint.tokenizer
            self._logits, self._max_positions, num_tokens = _load(checkpoint, dtype, self._device)
            require_embeddings(checkpoint, num_tokens)
            self._table = (
                None if self._folder.table is None else self._read_table(self._folder.table, num_tokens)
            )
        self._frame = (() if checkpoint.cls_id is None else (checkpoint.cls_id,)), (checkpoint.landmark_id,)
        self._pad_id = checkpoint.pad_id
        self.fingerprint = fingerprint(
            kind="sparse",
            version=SPARSE_VERSION,
            weights=checkpoint.fingerprint,
            takes_log_twice=self._folder.takes_log_twice,
            prompts=[self._folder.query_prompt, self._folder.document_prompt],
            table=None if self._table is None else hashlib.sha256(self._table.tobytes()).hexdigest(),
            kept=[MAX_TOKENS, SPARSE_STEP],
        )

    def encode_chunks(self, texts: Sequence[str], encoded: EncodedDocuments) -> TokenRows:
        """Return the weights of all chunks of documents as rows of :data:`SPARSE_WEIGHT`."""
        owners = np.repeat(np.arange(len(texts)), np.diff(encoded.chunk_offsets)).tolist()
        spans = zip(owners, encoded.start_char.tolist(), encoded.end_char.tolist(), strict=True)
        return self.encode([texts[owner][start:end] for owner, start, end in spans])

    def encode(self, texts: Sequence[str]) -> TokenRows:
        """Return the quantised weights of passages as rows of :data:`SPARSE_WEIGHT`."""
        groups: list[np.ndarray] = []
        for known in self.weigh([self._folder.document_prompt + text for text in texts]):
            steps = [(token, min(round(weight / SPARSE_STEP), 255)) for token, weight in known.items()]
            rows = np.array(steps, SPARSE_WEIGHT)
            groups.append(rows[rows["weight"] > 0])
        laid = np.concatenate([np.empty(0, SPARSE_WEIGHT), *groups])
        return TokenRows(
            rows=laid.view(np.uint8).reshape(-1, SPARSE_WEIGHT.itemsize),
            offsets=np.cumsum([0, *map(len, groups)]),
        )

    def encode_queries(self, texts: Sequence[str]) -> list[dict[int, float]]:
        """Return the weights of queries; of one that holds a token twice the table counts it once."""
        prompted = [self._folder.query_prompt + text for text in texts]
        if self._table is None:
            with one_torch_thread():  # others would wait for each other over one short row
                return self.weigh(prompted)
        tokens, table_X = tokenize(self._tokenizer, prompted), self._table
        own = [set(ids.tolist()) for ids in np.split(tokens.ids, tokens.text_offsets[1:-1])]
        return [{token: float(table_X[token]) for token in ids if table_X[token] > 0} for ids in own]

    def weigh(self, texts: Sequence[str]) -> list[dict[int, float]]:
        """Return the strongest tokens of each text and their weights, all above 0."""
        head, tail = self._frame
        room = self._max_positions - len(head) - len(tail)
        tokens = tokenize(self._tokenizer, texts)
        rows: list[list[int]] = []
        owners: list[int] = []
        for owner, ids in enumerate(np.split(tokens.ids, tokens.text_offsets[1:-1])):
            for start in range(0, max(len(ids), 1), room):
                rows.append([*head, *ids[start : start + room].tolist(), *tail])
                owners.append(owner)
        lengths_R = np.array([len(row) for row in rows], np.int64)

        def run(batch_B: Int64[np.ndarray, " B"]) -> list[tuple[int, list[int], list[float]]]:
            lengths_B = lengths_R[batch_B]
            ids_BT = np.full((len(batch_B), int(lengths_B.max())), self._pad_id, np.int64)
            for place, row in enumerate(batch_B.tolist()):
                ids_BT[place, : len(rows[row])] = rows[row]
            weights_BX = self._pooled(ids_BT, lengths_B)
            best = weights_BX.topk(min(MAX_TOKENS, weights_BX.shape[1]), dim=1)
            own = [owners[row] for row in batch_B.tolist()]
            return list(zip(own, best.indices.tolist(), best.values.tolist(), strict=True))

        found: list[dict[int, float]] = [{} for _ in texts]
        for batch in run_in_batches(lengths_R, BATCH_TOKENS, run, self._device):
            for owner, ids, weights in batch:
                known = found[owner]
                for token, weight in zip(ids, weights, strict=True):
                    if weight > known.get(token, 0.0):
                        known[token] = weight
        return [dict(nlargest(MAX_TOKENS, known.items(), key=itemgetter(1))) for known in found]

    def _pooled(
        self, ids_BT: Int64[np.ndarray, "B T"], lengths_B: Int64[np.ndarray, " B"]
    ) -> Float32[torch.Tensor, "B X"]:
        with torch.inference_mode():
            logits_NX = self._logits(ids_BT, lengths_B)
            logits_BX = torch.stack([own_TX.amax(dim=0) for own_TX in logits_NX.split(lengths_B.tolist())])
            weights_BX = torch.log1p(F.relu(logits_BX.float()))
            if self._folder.takes_log_twice:
                weights_BX = torch.log1p(weights_BX)
        if not bool(torch.isfinite(weights_BX).all()):
            raise ModelError(
                "logits of a sparse encoder must be finite, got NaN or infinity; fetch the model again, or "
                "choose --precision fp32"
            )
        return weights_BX

    def _read_table(self, folder: Path, num_tokens: int) -> Float32[np.ndarray, " X"]:
        """Return the weights of queries' tokens; those of another vocabulary raise :class:`ModelError`."""
        path = folder / "tokenizer.json"
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if path.is_file() and read_tokenizer(path).get_vocab(with_added_tokens=True) != vocabulary:
            raise ModelError(
                "the tokenizers of queries and of documents of a sparse encoder must have one vocabulary, "
                "got two; fetch the model again"
            )
        if (folder / WEIGHTS_NAME).is_file() and folder != self._folder.transformer:
            weights = load_file(folder / WEIGHTS_NAME).get("weight", torch.zeros(0)).float().numpy()
        else:
            weights = np.zeros(num_tokens, np.float32)
            for token, weight in read_json(folder / IDF_NAME).items():
                if token in vocabulary:
                    weights[vocabulary[token]] = weight
        if len(weights) <= max(vocabulary.values()) or not np.isfinite(weights).all():
            raise ModelError(
                f"the weights of queries' tokens of a sparse encoder must be {len(vocabulary):,} finite "
                "numbers, got others; fetch the model again"
            )
        return weights


def _load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> tuple[_Logits, int, int]:
    """Return what gives the logits of rows, the longest row, and the size of the vocabulary."""
    model_type = checkpoint.config.get("model_type")
    if model_type not in _HEADS:
        return _run_by_transformers(checkpoint, dtype, device)
    engine = reader_of(model_type)(checkpoint, dtype=dtype, device=device)
    engine.pack()
    dense, norm, decoder = _HEADS[model_type]
    table_XD = engine.embedding.tokens_VD
    if checkpoint.config.get("tie_word_embeddings") is False:
        table_XD = _tensor(checkpoint, f"{decoder}.decoder.weight", f"{decoder}.weight")
    shared = partial(torch.Tensor.to, device=device, dtype=dtype)
    weight_DD, bias_D, scale_D, shift_D = (
        shared(_tensor(checkpoint, f"{name}.{part}")) for name in (dense, norm) for part in ("weight", "bias")
    )
    table_XD, bias_X = (
        shared(table_XD),
        shared(_tensor(checkpoint, f"{decoder}.bias", f"{decoder}.decoder.bias")),
    )
    named = {"lm_head": "", "vocab_projector": "activation"}.get(decoder, "hidden_act")
    name = str(checkpoint.config.get(named, "gelu"))
    activate = ACTIVATE[activation_named("hidden_act", name)]
    epsilon = checkpoint.number("layer_norm_eps", default=1e-12)
    if table_XD.shape != (len(bias_X), engine.model_dim):
        raise ModelError(
            f"the head of a sparse encoder must have a weight for each of its {len(table_XD):,} tokens, got "
            f"{len(bias_X):,}; fetch the model again"
        )

    head = Linear(weight=table_XD, bias=bias_X).packed()  # most of a query's time
    workspace = Workspace(device)

    def logits(ids_BT: np.ndarray, lengths_B: np.ndarray) -> torch.Tensor:
        states_BTD = engine.hidden_states(ids_BT, lengths_B)
        states_ND = states_BTD[_is_text(ids_BT, lengths_B, device)].to(dtype)
        inner_ND = activate(F.linear(states_ND, weight_DD, bias_D))
        normed_ND = F.layer_norm(inner_ND, (engine.model_dim,), scale_D, shift_D, epsilon)
        return project(head, normed_ND, workspace, "logits")

    return logits, engine.max_positions, len(table_XD)


def _run_by_transformers(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> tuple[_Logits, int, int]:
    from transformers import AutoModelForMaskedLM

    model: Any = load_model(checkpoint, dtype, AutoModelForMaskedLM).to(device)

    def logits(ids_BT: np.ndarray, lengths_B: np.ndarray) -> torch.Tensor:
        is_text_BT = _is_text(ids_BT, lengths_B, device)
        ids = torch.from_numpy(ids_BT).to(device)
        return model(input_ids=ids, attention_mask=is_text_BT.long()).logits[is_text_BT]

    return logits, max_positions(model, checkpoint), len(model.get_output_embeddings().weight)


def _is_text(ids_BT: np.ndarray, lengths_B: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.arange(ids_BT.shape[1]) < lengths_B[:, None]).to(device)


def _tensor(checkpoint: Checkpoint, *names: str) -> torch.Tensor:
    found = next((checkpoint.tensors[name] for name in names if name in checkpoint.tensors), None)
    if found is None:
        raise ModelError(
            f"a sparse encoder must have a head for masked tokens, got no {names[0]} among its weights; "
            "give a SPLADE model, or this one as --model"
        )
    return found
