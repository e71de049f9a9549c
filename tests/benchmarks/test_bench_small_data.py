"""Small experiments on what pairs are made of and who ranks them: the same base, budget and judged set as
:mod:`tests.benchmarks.test_bench_small_training`, with training seeds 0 and 1.

A cross-encoder is trained here first, because none is at hand; its scores are distilled. The writer of
queries is no language model: behind the address that one would have, it copies a passage's title and the
sentence with its rarest words, without common words.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.settings import QueryWriterConfig, TrainConfig
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.model.folders.names import model_folder

from tests.benchmarks.test_bench_small_training import (
    BASE_NAME,
    SEED,
    STEPS,
    TRAINED,
    Record,
    base,
    drawn,
    drawn_rows,
    judged,
    lines,
    report,
    scores,
    trained,
)

__all__ = ["base", "drawn", "judged"]

pytestmark = pytest.mark.bench

SEEDS = (0, 1)
CHARACTERS = 220
"""Of documents that a cross-encoder reads: the 48 tokens that are trained."""

NUM_RANKED, NUM_OWN = STEPS * 32, 3
TEACHER_STEPS, TEACHER_QUERIES, TEACHER_LR, TEACHER_TOKENS = 120, 8, 5e-5, 80
WRITTEN_WORDS, PASSAGE_CHARACTERS, PASSAGE_TOKENS = 12, (250, 380), 96
NUM_HALVES, NUM_ASKED = 700, 300
COMPARED = (
    ("in both directions, from 4 on", "in both directions, from 0 on"),
    ("in both directions, twice the steps", "in one direction, twice the steps"),
)


@pytest.fixture(scope="module")
def titled() -> list[Record]:
    """Return the same pairs with the titles of their documents."""
    return drawn_rows(["query", "document", "source", "title"])


def of_seeds(
    sources: list[Path], folder: Path, base: Path, judged: RetrievalSet, **settings: Any
) -> np.ndarray:
    """Return nDCG@10 of every query, the mean over training seeds."""
    return np.mean(
        [
            scores(trained(sources, folder / str(seed), base, **{**settings, "seed": seed}), judged)
            for seed in SEEDS
        ],
        axis=0,
    )


def own_negatives(records: list[Record]) -> list[list[str]]:
    """Return the 11th to 13th document of each query by the whole MiniLM, its own left out."""
    encoder = DocumentEncoder(encoder_config({"model": BASE_NAME}))
    texts = list(dict.fromkeys(record["document"] for record in records))
    vectors_NV = encoder.encode(texts).document_vectors_NV
    order_QN = np.argsort(
        -(encoder.encode_queries([r["query"] for r in records]) @ vectors_NV.T), axis=1, kind="stable"
    )
    return [
        [texts[n] for n in order_N[: NUM_OWN + 10].tolist() if texts[n] != record["document"]][-NUM_OWN:]
        for record, order_N in zip(records, order_QN, strict=True)
    ]


def train_cross_encoder(records: list[Record], negatives: list[list[str]], folder: Path) -> None:
    """Write a cross-encoder of MiniLM's layers that ranks a query's document before its negatives."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(SEED)
    source = str(model_folder(BASE_NAME))
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TEACHER_LR)
    order = np.random.default_rng(SEED).permutation(len(records))
    model.train()
    for step in range(TEACHER_STEPS):
        chosen = order[np.arange(step * TEACHER_QUERIES, (step + 1) * TEACHER_QUERIES) % len(order)].tolist()
        pairs = [
            (records[number]["query"], text)
            for number in chosen
            for text in (records[number]["document"], *negatives[number])
        ]
        read = tokenizer(pairs, padding=True, truncation=True, max_length=TEACHER_TOKENS, return_tensors="pt")
        with torch.autocast("cpu", torch.bfloat16):
            logits_QK = model(**read).logits.float().view(len(chosen), 1 + NUM_OWN)
        loss = torch.nn.functional.cross_entropy(logits_QK, torch.zeros(len(chosen), dtype=torch.long))
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = TEACHER_LR * min(1.0, step / 12, (TEACHER_STEPS - step) / (0.9 * TEACHER_STEPS))
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_bench_scores_of_a_cross_encoder_against_none(
    drawn: list[Record], judged: RetrievalSet, base: Path, tmp_path: Path, capsys: Any
) -> None:
    cut = [{**record, "document": record["document"][:CHARACTERS]} for record in drawn]
    negatives = own_negatives(cut)
    taught, asked = slice(NUM_RANKED), slice(len(cut) - NUM_ASKED, None)
    train_cross_encoder(cut[NUM_RANKED:-NUM_ASKED], negatives[NUM_RANKED:-NUM_ASKED], tmp_path / "teacher")
    records = [{**r, "negatives": own} for r, own in zip(cut[taught], negatives[taught], strict=True)]
    pairs = lines(tmp_path / "pairs.jsonl", records)
    scored = {"score_teacher": str(tmp_path / "teacher")}
    found = {
        "base": scores(base, judged),
        "followed, weight 1": of_seeds([pairs], tmp_path / "one", base, judged, **scored),
        "followed, weight 5": of_seeds([pairs], tmp_path / "five", base, judged, **scored, score_weight=5.0),
        "no teacher": of_seeds([pairs], tmp_path / "none", base, judged),
    }
    report(capsys, "nDCG@10", found)
    teacher = CrossEncoderReranker(str(tmp_path / "teacher"))
    is_first = [
        float(teacher.logits(r["query"], [r["document"], *own]).argmax() == 0)
        for r, own in zip(cut[asked], negatives[asked], strict=True)
    ]
    with capsys.disabled():
        print(f"  the teacher has {np.mean(is_first):.3f} of {NUM_ASKED} other positives before {NUM_OWN}")
    assert found["followed, weight 1"].mean() > found["base"].mean()


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@pytest.fixture
def writer(titled: list[Record]) -> Iterator[str]:
    """Return the address of a server that answers with a passage's title and rarest words, in their order."""
    counts = Counter(word for record in titled for word in set(words_of(record["document"])))

    def query_of(passage: str) -> str:
        title, _, passage = passage.removeprefix("Title: ").rpartition("\n\n")
        best: list[str] = []
        rarest = math.inf
        for sentence in re.split(r"(?<=[.!?])\s+", passage):
            rare = sorted({word for word in words_of(sentence) if len(word) > 2}, key=counts.__getitem__)
            mean = float(np.mean([counts[word] for word in rare[:3]])) if len(rare) > 2 else math.inf
            if not best or mean < rarest:
                kept, rarest = set(rare[:WRITTEN_WORDS]), mean
                best = [word for word in words_of(sentence) if word in kept]
        return f"{title}: {' '.join(best)}" if title else " ".join(best)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps({"query": query_of(asked["messages"][-1]["content"])})
            body = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_bench_written_queries_against_cut_ones(
    titled: list[Record], judged: RetrievalSet, base: Path, writer: str, tmp_path: Path, capsys: Any
) -> None:
    """The same passages: with queries copied by a writer, cut by Cairn, and asked by people."""
    shortest, longest = PASSAGE_CHARACTERS
    passages: dict[str, Record] = {}
    for record in titled:
        passage = record["document"][:longest].rsplit(" ", 1)[0]
        if len(passage) >= shortest and passage not in passages:
            passages[passage] = {**record, "document": passage, "title": record["title"] or ""}
    own = list(passages.values())
    columns = {"text": [r["document"] for r in own], "title": [r["title"] for r in own]}
    documents = tmp_path / "documents.parquet"
    pq.write_table(pa.table(columns), documents)
    by_people = lines(tmp_path / "pairs.jsonl", own)
    asks = QueryWriterConfig(query_writer=writer, query_writer_model="extractive")
    arms: dict[str, dict[str, Any]] = {
        "asked by people": {"sources": [by_people]},
        "copied by a writer": {"sources": [], "documents": [documents], "query_writer": asks},
        "cut from the passages": {"sources": [], "documents": [documents]},
    }
    found = {"base": scores(base, judged)}
    for name, arm in arms.items():
        of_arm: list[np.ndarray] = []
        for seed in SEEDS:
            config = TrainConfig(**{**TRAINED, "max_document_tokens": PASSAGE_TOKENS, "seed": seed})
            train(folder=tmp_path / name / str(seed), config=config, base=str(base), **arm)
            of_arm.append(scores(tmp_path / name / str(seed) / "model", judged))
        found[name] = np.mean(of_arm, axis=0)
    report(capsys, f"nDCG@10, {len(own)} passages", found)
    written = (tmp_path / "copied by a writer" / "0" / "written_queries.jsonl").read_text().splitlines()
    with capsys.disabled():
        print("  such as", [json.loads(line)["query"] for line in written[:3]])
    assert found["copied by a writer"].mean() > 0.5 * found["cut from the passages"].mean()


def halved(text: str) -> tuple[str, str]:
    """Cut a text at the blank nearest to its middle."""
    blanks = [match.start() for match in re.finditer(" ", text)]
    middle = min(blanks, key=lambda place: abs(place - len(text) / 2))
    return text[:middle].strip(), text[middle:].strip()


def test_bench_scored_texts_in_both_directions_against_one(
    titled: list[Record], base: Path, tmp_path: Path, capsys: Any
) -> None:
    """Halves of one passage score 5, of two passages on one subject 3, of others 0.

    Asked for is the other half among those of passages that no step saw, from the first and from the second.
    """
    shortest, longest = PASSAGE_CHARACTERS
    cut = {r["document"][:longest].rsplit(" ", 1)[0]: r["title"] or r["document"] for r in titled}
    passages = [(*halved(text), title) for text, title in cut.items() if len(text) >= shortest]
    seen, unseen = passages[:NUM_HALVES], passages[-NUM_ASKED:]
    scored = [{"query": first, "document": second, "score": 5} for first, second, _ in seen]
    for number, (first, _, title) in enumerate(seen):
        like = next((s for _, s, other in seen[number + 1 :] if other == title), None)
        other = {"query": first, "document": like or seen[number - 1][1], "score": 3 if like else 0}
        scored.append(other)
    plain = [{"query": r["query"], "document": r["document"]} for r in scored if r["score"] == 5]
    both, one = lines(tmp_path / "both.jsonl", scored), lines(tmp_path / "one.jsonl", plain)
    arms: dict[str, tuple[Path, dict[str, Any]]] = {
        "in both directions, from 4 on": (both, {}),
        "in both directions, from 0 on": (both, {"min_score": 0.0}),
        "in both directions, twice the steps": (both, {"steps": 2 * STEPS}),
        "in one direction, twice the steps": (one, {"steps": 2 * STEPS}),
        "in one direction, from 4 on": (one, {}),
    }
    found: dict[str, list[np.ndarray]] = {"base": [ranks_of_halves(base, unseen)]}
    for seed in SEEDS:
        for name, (source, settings) in arms.items():
            own = {**settings, "max_query_tokens": TRAINED["max_document_tokens"], "seed": seed}
            folder = trained([source], tmp_path / name / str(seed), base, **own)
            found.setdefault(name, []).append(ranks_of_halves(folder, unseen))
    means = {name: np.mean(values, axis=0) for name, values in found.items()}
    for place, measure in enumerate(("the second half for the first", "the first half for the second")):
        report(capsys, measure, {name: values_2Q[place] for name, values_2Q in means.items()})
    of_both = {name: values_2Q.mean(0) for name, values_2Q in means.items()}
    report(capsys, "both", of_both)
    for a, b in COMPARED:
        report(capsys, "both", {name: of_both[name] for name in (a, b)})
    assert means["in both directions, from 4 on"].mean() > means["base"].mean()


def ranks_of_halves(folder: Path, unseen: list[tuple[str, str, str]]) -> np.ndarray:
    """Return 1 / rank of the second half for the first, and of the first half for the second."""
    encoder = DocumentEncoder(encoder_config({"model": str(folder)}))
    halves = [list(texts) for texts in list(zip(*unseen, strict=True))[:2]]
    asked = [encoder.encode_queries(texts) for texts in halves]
    stored = [encoder.encode(texts).document_vectors_NV for texts in halves]
    cosines = [asked[0] @ stored[1].T, asked[1] @ stored[0].T]
    return np.stack([1 / (c >= np.diag(c)[:, None]).sum(1) for c in cosines])
