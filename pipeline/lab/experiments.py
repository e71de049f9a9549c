"""Experiments that can show a paper's claim: variants of a training, each with several seeds, scored alike.

    variants and seeds ─▶ the Trainer ─▶ nDCG@10 of every query ─▶ FOLDER/NAME/results.jsonl ─▶ intervals

    cde         batches mixed or clustered, biencoder or context (eq. 5), false negatives kept; behind the own
                context, that of another set, random training documents, random words, none (Morris & Rush
                2024, table 1 and §6)
    lmk         landmarks of drawn or fixed intervals, mean and [CLS] on new rotary weights, as texts grow
    m3bert      one model of several widths and depths against one for each (table 2)
    distil      the first layers as they stand, and following the whole model (NV-Embed, appendix A.2)
    tempscale   temperatures of documents and queries in rows of 510 tokens; nothing is trained (table 2)
    nvembed     a second stage on a query's own negatives, blended or a source a batch (§3.3); negatives
                whatever their score (§4.1.1)

A line of the results is a variant with a seed. What stands there of the same settings and data is not made
again, and a training that was cut off goes on from its checkpoint. Intervals draw seeds and queries again:
with three seeds they say what other queries would change, and only roughly what other seeds would.

    S seeds    Q queries    R samples
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.config import BASE_MODEL, ContextConfig, EncoderConfig
from cairn.pipeline.lab.evaluate import retrieval_set as judged_sets
from cairn.pipeline.lab.evaluate.bench import make_ranker
from cairn.pipeline.lab.evaluate.encodings import Encoding, build_encoder, encode_set
from cairn.pipeline.lab.evaluate.measures import NDCG, document_measures
from cairn.pipeline.lab.evaluate.systems import System
from cairn.pipeline.lab.train import settings as lab_settings
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.distill import distill
from cairn.pipeline.lab.train.leakage import without_judged
from cairn.pipeline.lab.train.pairs import read_pairs, read_texts, training_files
from cairn.pipeline.lab.train.pretrain import pretrain
from cairn.pipeline.lab.train.trainer import TrainingLog, read_log
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.first_layers import first_layers
from cairn.pipeline.model.folders.model_defaults import context_config, encoder_config
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float64

NUM_SAMPLES: Final = 10_000
ROW_TOKENS: Final = 510
"""Tokens of the longest row of BERT's models, beside [CLS] and [SEP]."""
CHARACTERS_A_TOKEN: Final = 4
ROOM: Final = 256
"""Tokens that a text of so many characters may have beyond its length."""

Settings = dict[str, Any]
Scores = Float64[np.ndarray, " Q"]
Rows = Mapping[str, Scores]
"""nDCG@10 of every query, by what a model is asked."""
Sets = Sequence[judged_sets.RetrievalSet]
Cells = Mapping[str, Callable[[int], Rows]]
"""What is measured with a seed, by variant."""

NEW_BASE: Final[Mapping[str, Any]] = {
    "model_type": "m3bert", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 344, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6,
}  # fmt: skip
TRAINED: Final[Mapping[str, Any]] = {
    "pooling": "mean", "attention": "chunk", "max_query_tokens": 32, "sequence_documents": 1,
    "title_share": 0.0, "context_documents": 0, "distillation_weight": 0.0, "freeze_embeddings": True,
    "heldout_pairs": 0, "peak_lr": 2e-4,
}  # fmt: skip
"""Settings of a training that an experiment does not change."""


@dataclass(kw_only=True, slots=True)
class Laboratory:
    """What the cells of an experiment share; runs stand in ``folder``."""

    folder: Path
    sources: Sequence[Path]
    texts: Sequence[Path]
    judged: Sets
    config: lab_settings.ExperimentConfig
    deadline: float = math.inf
    progress: ProgressListener = silent_progress

    def limits(self) -> Settings:
        """Return what every training is handed beside its settings."""
        return {"deadline": self.deadline, "progress": self.progress}

    def base(self, layers: int | None = None) -> Path:
        """Return a model of the first layers of the base, which nothing trained to be one."""
        layers = layers or self.config.layers
        folder = self.folder / f"base-{layers}"
        if not folder.is_dir():
            whole = read_checkpoint(model_folder(BASE_MODEL))
            with durable.replacing_folder(folder) as temporary:
                save_encoder_folder(temporary, first_layers(whole, layers), EncoderConfig())
        return folder

    def trained(self, run: str, seed: int, base: Path | None = None, **changes: Any) -> Path:
        """Train on the pairs: mean pooled chunks of one row, without titles and context, but for changes."""
        base, config = base or self.base(), self.config
        shared = ("steps", "batch_pairs", "max_document_tokens")
        settings: Settings = {
            **TRAINED,
            **{name: getattr(config, name) for name in shared},
            "seed": seed,
            **changes,
        }
        settings.setdefault("landmark_intervals", (settings["max_document_tokens"],))
        folder, kept = self.folder / f"{run}-{seed}", self.folder / f"surrogate-{base.name}.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        if kept.is_file():  # one surrogate embeds the pairs for all variants
            shutil.copyfile(kept, folder / "surrogate.safetensors")
        train(self.sources, folder, lab_settings.TrainConfig(**settings), base=str(base), **self.limits())
        shutil.copyfile(folder / "surrogate.safetensors", kept)
        return folder / "model"

    def new_base(self, seed: int) -> Path:
        """Return new rotary weights after masked words with landmarks."""
        folder, most = self.folder / f"words-{seed}", max(self.config.lengths) + 2 * ROOM
        if not (folder / "model").is_dir():
            described = self.folder / "rotary.json"
            described.write_text(json.dumps({**NEW_BASE, "max_position_embeddings": most}))
            rows: Settings = {"batch_rows": 16, "max_tokens": 256, "landmark_intervals": (32, 64, 128)}
            own: Settings = {"steps": 2 * self.config.steps, "peak_lr": 1e-3, "seed": seed}
            config = lab_settings.PretrainConfig(**rows, **own, heldout_rows=0)
            pretrain(self.texts, folder, config, base=BASE_MODEL, from_config=described, **self.limits())
        return folder / "model"

    def training_documents(self, count: int, seed: int) -> judged_sets.RetrievalSet:
        """Return random documents of the training data, as a set without questions."""
        different = list(dict.fromkeys(row.document for row in read_pairs(self.sources).rows))
        drawn = np.random.default_rng(seed).permutation(len(different))[:count].tolist()
        return replace(
            self.judged[0].with_queries(np.zeros(0, np.int64)),
            doc_ids=tuple(f"training-{number}" for number in drawn),
            titles=("",) * len(drawn),
            texts=tuple(different[number] for number in drawn),
        )

    def scored(self, model: str | Path, context: str = "none", sets: Sets = (), **served: Any) -> Scores:
        """Return nDCG@10 by vectors of all queries behind a context: none, own, other, training or words."""
        own = encoder_config({"model": str(model), "token_bytes": 0, **served})
        asked = replace(own, use_context=context != "none")
        kind = {"none": "none", "words": "random"}.get(context, "corpus")
        encoding = Encoding(encoder=asked, context=kind)  # pyright: ignore[reportArgumentType]
        system = System(name="experiment", encoding=encoding, ranking="fused")
        drawn = context_config(str(model), {}) if context != "none" else ContextConfig()
        sets, values = sets or self.judged, list[np.ndarray]()
        for number, judged in enumerate(sets):
            of_whom = sets[(number + 1) % len(sets)] if context == "other" else judged
            if context == "training":
                of_whom = self.training_documents(drawn.context_documents, drawn.seed)
            encoder, _ = build_encoder(of_whom, encoding, drawn)
            encoded = encode_set(judged, encoding, encoder, self.progress)
            ranker = make_ranker(judged, [system], encoded, encoder.token_codebook, None)
            answers = ranker.rank(system, np.zeros(len(judged.query_ids), np.bool_))
            values.append(document_measures(judged, [answer.documents for answer in answers])[NDCG])
        return np.concatenate(values)


def _cde(lab: Laboratory) -> Cells:
    num_context, most = lab.config.context_documents, lab.config.max_document_tokens
    reads = {"context_documents": num_context, "max_context_tokens": most, "context_absence": 0.1}
    kept = {"margin": math.inf}
    variants: dict[str, Settings] = {
        "mixed, biencoder": {"batches": "mixed"},
        "mixed, context": {"batches": "mixed", **reads},
        "clustered, biencoder": {},
        "clustered, context": reads,
        "mixed, biencoder, false negatives kept": {"batches": "mixed", **kept},
        "clustered, biencoder, false negatives kept": kept,
        "clustered, biencoder, left out from .1 above": {"margin": 0.1},
        "clustered, context, false negatives kept": {**kept, **reads},
    }
    contexts = ("own", *(("other",) if len(lab.judged) > 1 else ()), "training", "words", "none")

    def measured(name: str, seed: int) -> Rows:
        model = lab.trained(name, seed, **variants[name])
        if "context" not in name:
            return dict.fromkeys((f"context {kind}" for kind in contexts), lab.scored(model))
        return {f"context {kind}": lab.scored(model, kind) for kind in contexts}

    return {name: partial(measured, name) for name in variants}


def _lmk(lab: Laboratory) -> Cells:
    sets = {length: _long_texts(lab, length) for length in lab.config.lengths}
    longest = max(lab.config.lengths)
    trained_on = 4 * lab.config.max_document_tokens
    drawn = tuple(trained_on // part for part in (8, 4, 2))
    of_landmarks: Settings = {"pooling": "lmk", "attention": "full"}
    variants: dict[str, Settings] = {
        "mean": {},
        "[CLS]": {"pooling": "cls"},
        "landmarks, drawn": {**of_landmarks, "landmark_intervals": drawn},
        "landmarks, fixed": {**of_landmarks, "landmark_intervals": drawn[1:2]},
    }

    def measured(name: str, seed: int) -> Rows:
        trained = {"max_document_tokens": trained_on, "freeze_embeddings": False, **variants[name]}
        model = lab.trained(name, seed, lab.new_base(seed), **trained)
        chunk = drawn[1] if name.startswith("landmarks") else longest + ROOM
        served: Settings = {"window_tokens": longest + 2 * ROOM, "landmark_interval": chunk}
        return {f"{length} tokens": lab.scored(model, sets=[own], **served) for length, own in sets.items()}

    return {name: partial(measured, name) for name in variants}


def _long_texts(lab: Laboratory, length: int) -> judged_sets.RetrievalSet:
    """Return texts of about so many tokens, asked for by a sentence cut out of their middle."""
    folder, most = lab.folder / f"{length} tokens", length * CHARACTERS_A_TOKEN
    lines: list[str] = []
    for number, text in enumerate(read_texts(lab.texts).texts):
        head, end, tail = text[: most // 2].rpartition(". ")
        if len(text) >= most and end and len(lines) < lab.config.max_documents:
            sentence, rest = judged_sets.split_first_sentence(tail + text[most // 2 : most])
            lines.append(json.dumps({"id": f"{number:08d}", "text": f"{sentence} {head}. {rest}"}))
    folder.mkdir(parents=True, exist_ok=True)
    durable.write_bytes(folder / "corpus.jsonl", "\n".join(lines).encode())
    return judged_sets.known_item_set(folder, lab.config.max_queries, 0)


def _m3bert(lab: Laboratory) -> Cells:
    whole, layers = int(read_checkpoint(lab.base()).config["hidden_size"]), lab.config.layers
    served: dict[str, Settings] = {"whole": {}, "32 dimensions": {"dims": 32}, "1 layer": {"layers": 1}}

    def joint(seed: int) -> Rows:
        model = lab.trained("joint", seed, matryoshka_dims=(32, whole), matryoshka_layers=(1, layers))
        return {name: lab.scored(model, **own) for name, own in served.items()}

    def separate(seed: int) -> Rows:
        narrow, shallow = {"matryoshka_dims": (32,)}, {"base": lab.base(1)}
        trained: dict[str, Settings] = {"whole": {}, "32 dimensions": narrow, "1 layer": shallow}
        models = {name: lab.trained(name, seed, **own) for name, own in trained.items()}
        return {name: lab.scored(model, **served[name]) for name, model in models.items()}

    return {"a model for each": separate, "one joint model": joint}


def _distil(lab: Laboratory) -> Cells:
    def followed(layers: int, seed: int) -> Path:
        folder = lab.folder / f"followed-{layers}-{seed}"
        config = lab_settings.DistillConfig(steps=lab.config.steps, seed=seed, heldout_texts=0)
        distill(BASE_MODEL, str(lab.base(layers)), lab.texts, folder, config, **lab.limits())
        return folder / "model"

    def rows(seed: int, model_of: Callable[[int, int], Path]) -> Rows:
        depths = range(1, lab.config.layers + 1)
        return {f"layers {layers}": lab.scored(model_of(layers, seed)) for layers in depths}

    as_it_stands = partial(rows, model_of=lambda layers, _: lab.base(layers))
    return {"as they stand": as_it_stands, "following the whole": partial(rows, model_of=followed)}


def _tempscale(lab: Laboratory) -> Cells:
    pairs = ((1.0, 1.0), (0.9, 1.0), (0.8, 1.0), (1.0, 0.9), (1.0, 0.8), (0.9, 0.9), (0.8, 0.8))
    is_long: list[np.ndarray] = []
    for judged in lab.judged:
        lengths_N, found = np.array([len(text) for text in judged.texts]), judged.judgements
        longest = lengths_N >= np.quantile(lengths_N, 0.8)
        is_long.append(np.isin(np.arange(len(judged.query_ids)), found.query_J[longest[found.document_J]]))

    def measured(of_documents: float, of_queries: float, _: int) -> Rows:
        rows: Settings = {"landmark_interval": ROW_TOKENS, "attention": "chunk", "pooling": "mean"}
        values_Q = lab.scored(BASE_MODEL, temperature=of_documents, query_temperature=of_queries, **rows)
        return {"all": values_Q, "asked of the longest fifth": values_Q[np.concatenate(is_long)]}

    return {f"documents {pair[0]}, queries {pair[1]}": partial(measured, *pair) for pair in pairs}


def _nvembed(lab: Laboratory) -> Cells:
    def one(name: str, seed: int, **changes: Any) -> Rows:
        return {"nDCG@10": lab.scored(lab.trained(name, seed, steps=2 * lab.config.steps, **changes))}

    def two(name: str, seed: int, **changes: Any) -> Rows:
        base = lab.folder / f"first-{seed}-{name}"
        shutil.copytree(lab.trained("first", seed, hard_negatives=2), base, dirs_exist_ok=True)
        second = lab.trained(name, seed, base, negatives="own", hard_negatives=4, **changes)
        return {"nDCG@10": lab.scored(second)}

    return {
        "one stage": partial(one, "one", hard_negatives=2),
        "one stage, nothing mined": partial(one, "unmined"),
        "one stage, mined at any score": partial(one, "any", hard_negatives=2, hard_negative_share=1.0),
        "two stages, blended": partial(two, "blended", batches="mixed"),
        "two stages, a source a batch": partial(two, "separate"),
    }


EXPERIMENTS: Final[Mapping[str, Callable[[Laboratory], Cells]]] = {
    "cde": _cde, "lmk": _lmk, "m3bert": _m3bert,
    "distil": _distil, "tempscale": _tempscale, "nvembed": _nvembed,
}  # fmt: skip
"""By name; the variants of each are compared with its first."""
_UNTRAINED: Final = ("tempscale",)


class ExperimentReport(dict[str, Mapping[str, Float64[np.ndarray, "S Q"]]]):
    """Values of every query, a line a seed, by variant and row."""

    def to_dict(self) -> dict[str, str]:
        """Return means, differences from the first variant and gains of the own context, with intervals."""
        said, first = dict[str, str](), next(iter(self.values()))
        for variant, rows in self.items():
            for row, values_SQ in rows.items():
                change = "" if rows is first else "  " + interval(values_SQ - first[row])
                said[f"{variant} | {row}"] = f"{values_SQ.mean():.3f}{change}"
                if "context" in variant and row != "context own":
                    said[f"{variant} | own over {row}"] = interval(rows["context own"] - values_SQ)
        return said


def interval(difference_SQ: Float64[np.ndarray, "S Q"]) -> str:
    """Return the mean and its 95 % interval: seeds and queries drawn again, a query for all seeds alike."""
    generator = np.random.default_rng(0)
    num_seeds, num_queries = difference_SQ.shape
    seeds_RS = generator.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), NUM_SAMPLES)
    queries_RQ = generator.multinomial(num_queries, np.full(num_queries, 1 / num_queries), NUM_SAMPLES)
    means_R = (seeds_RS @ difference_SQ * queries_RQ).sum(1) / difference_SQ.size
    low, high = np.quantile(means_R, [0.025, 0.975])
    return f"{difference_SQ.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def run_experiment(
    name: lab_settings.ExperimentName,
    folder: Path,
    config: lab_settings.ExperimentConfig,
    *,
    sources: Sequence[Path],
    judged: Sequence[Path],
    texts: Sequence[Path] = (),
    deadline: float = math.inf,
    progress: ProgressListener = silent_progress,
) -> ExperimentReport:
    """Measure what is missing of an experiment, and return all of it."""
    files = [Path(file.path) for file in training_files([*sources, *texts])]
    files += [file for each in judged for file in sorted(each.rglob("*.*")) if file.is_file()]
    settings = {key: value for key, value in asdict(config).items() if key != "seeds"}
    made_of = fingerprint(settings=settings, files=[durable.sha256_of_file(file) for file in files])
    folder = folder / name
    most: Settings = {"max_queries": config.max_queries, "max_documents": config.max_documents, "seed": 0}
    sets = [judged_sets.sample_set(judged_sets.read_retrieval_set(each), **most) for each in judged]
    pairs = folder / made_of[:12] / "pairs.jsonl"
    if not pairs.is_file():
        rows = without_judged(read_pairs(sources), judged, progress).rows
        pairs.parent.mkdir(parents=True, exist_ok=True)
        durable.write_bytes(pairs, "\n".join(json.dumps(row._asdict()) for row in rows).encode())
    lab = Laboratory(
        folder=pairs.parent,
        sources=[pairs],
        texts=texts,
        judged=sets,
        config=config,
        deadline=deadline,
        progress=progress,
    )
    cells = EXPERIMENTS[name](lab)
    seeds = range(1 if name in _UNTRAINED else config.seeds)
    path = folder / "results.jsonl"
    done = {
        (record["variant"], record["seed"]): record["rows"]
        for record in read_log(path)
        if record["made_of"] == made_of
    }
    log = TrainingLog(path, path.read_bytes().rfind(b"\n") + 1 if path.is_file() else 0)
    for seed in seeds:
        for variant, measure in cells.items():
            if (variant, seed) not in done:
                rows = {row: values_Q.tolist() for row, values_Q in measure(seed).items()}
                log.append({"variant": variant, "seed": seed, "made_of": made_of, "rows": rows})
                done[variant, seed] = rows
            progress(name, len(done), len(cells) * len(seeds), "cells")
    shutil.rmtree(lab.folder, ignore_errors=True)
    report = ExperimentReport()
    for variant in cells:
        rows_S = [done[variant, seed] for seed in seeds]
        report[variant] = {row: np.array([rows[row] for rows in rows_S]) for row in rows_S[0]}
    return report
