"""Shared by all tests: no network, one thread a process, shapes checked, and a tiny model made in code."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before torch, FAISS, tokenizers or Ray are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import jaxtyping
import pytest
from jaxtyping import install_import_hook


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make models` write the table of README that a test compares otherwise, and the rest of the options."""
    parser.addoption("--rewrite-readme", action="store_true", help="write what the tests find into README.md")
    parser.addoption("--api-cases", type=int, default=300, help="cases of the API's fuzz run")
    parser.addoption("--api-seed", type=int, default=0, help="seed of the API's fuzz run")
    parser.addoption("--rewrite-openapi", action="store_true", help="write the API's description into tests/golden")


def check_outermost(*, typechecker: Any, check: Callable[..., Any] = jaxtyping.jaxtyped) -> Callable[[Any], Any]:
    """Stand in the place of ``jaxtyping.jaxtyped``: a function in a function would be wrapped anew at every call.

    That is more than half of the time a tiny model takes to encode a text.
    """
    return lambda item: item if "<locals>" in item.__qualname__ else check(item, typechecker=typechecker)


jaxtyping.jaxtyped = check_outermost
install_import_hook(
    ["pipeline.evaluate", "pipeline.model", "pipeline.train", "pipeline.encode", "pipeline.corpus.tokenization"], "beartype.beartype"
)


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Flush nothing to the disk: no test cuts the power, and hundreds of ingests would wait for a third of the time.

    What is flushed and when is tested by who asks for it; measurements flush (tests/benchmarks), as do the processes that tests start.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


TINY_WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "stone",
    "path",
    "way",
    "mark",
    "##s",
    "##ing",
    "a",
    "river",
    "mountain",
    "walk",
    "##er",
    "old",
)
TINY_DIM, TINY_LAYERS, TINY_INNER, TINY_POSITIONS = 32, 2, 64, 96


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a random model: tiny unless told otherwise; ``layers`` = None leaves their number to the family."""

    width: int = TINY_DIM
    heads: int = 4
    inner: int = TINY_INNER
    positions: int = TINY_POSITIONS
    layers: int | None = None
    window: int = 8


TINY = Size()


def make_tiny_model(folder: Path, model_type: str = "bert", seed: int = 0, size: Size = TINY) -> Path:
    """Write a random BERT or RoBERTa in the published layout: config.json, model.safetensors, tokenizer.json; of two layers if tiny."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tiny_tokenizer(folder)
    generator = torch.Generator().manual_seed(seed)
    is_roberta = model_type != "bert"
    num_layers = size.layers or TINY_LAYERS
    config = {
        "model_type": model_type,
        "hidden_size": size.width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.inner,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": size.positions + (1 if is_roberta else 0),
        "vocab_size": vocab_size,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    (folder / "config.json").write_text(json.dumps(config))

    def linear(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        weight = torch.randn(rows, columns, generator=generator) * 0.3
        return {f"{name}.weight": weight, f"{name}.bias": torch.randn(rows, generator=generator) * 0.1}

    def norm(name: str) -> dict[str, torch.Tensor]:
        weight = 1 + torch.randn(size.width, generator=generator) * 0.1
        return {f"{name}.weight": weight, f"{name}.bias": torch.randn(size.width, generator=generator) * 0.1}

    tensors = {
        "embeddings.word_embeddings.weight": torch.randn(vocab_size, size.width, generator=generator),
        "embeddings.position_embeddings.weight": torch.randn(config["max_position_embeddings"], size.width, generator=generator) * 0.3,
        "embeddings.token_type_embeddings.weight": torch.randn(2, size.width, generator=generator) * 0.3,
        **norm("embeddings.LayerNorm"),
    }
    for index in range(num_layers):
        layer = f"encoder.layer.{index}"
        for name in ("query", "key", "value"):
            tensors |= linear(f"{layer}.attention.self.{name}", size.width, size.width)
        tensors |= linear(f"{layer}.attention.output.dense", size.width, size.width) | norm(f"{layer}.attention.output.LayerNorm")
        tensors |= linear(f"{layer}.intermediate.dense", size.inner, size.width)
        tensors |= linear(f"{layer}.output.dense", size.width, size.inner) | norm(f"{layer}.output.LayerNorm")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _write_tiny_tokenizer(folder: Path) -> int:
    """Write a WordPiece tokenizer that pads and truncates, as published ones do; return the size of its vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *TINY_WORDS,
        *letters,
        *(f"##{letter}" for letter in letters),
        *".,;:!?'-_()[]/",
    ]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(max_length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(vocab)


def make_latent_block(width: int, heads: int, head_dim: int, *, latents: int = 5, inner: int = 20, seed: int = 0) -> dict[str, Any]:
    """Return the tensors of a random latent attention block in the names NV-Embed-v2 publishes."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    attention, mlp = (f"latent_attention_model.cross_attend_blocks.{index}" for index in range(2))
    norms = (f"{attention}.norm", f"{attention}.norm_context", f"{mlp}.norm")
    return {
        "latent_attention_model.latents": randn(latents, width),
        **{f"{name}.weight": 1 + randn(width) for name in norms},
        **{f"{name}.bias": randn(width) for name in norms},
        f"{attention}.fn.to_q.weight": randn(heads * head_dim, width),
        f"{attention}.fn.to_kv.weight": randn(2 * heads * head_dim, width),
        f"{attention}.fn.to_out.weight": randn(width, heads * head_dim),
        f"{mlp}.fn.net.0.weight": randn(2 * inner, width),
        f"{mlp}.fn.net.0.bias": randn(2 * inner),
        f"{mlp}.fn.net.2.weight": randn(width, inner),
        f"{mlp}.fn.net.2.bias": randn(width),
    }


@pytest.fixture(scope="session")
def latent_block() -> Callable[..., dict[str, Any]]:
    """Return :func:`make_latent_block`."""
    return make_latent_block


@pytest.fixture(scope="session")
def tiny_latent_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny BERT's folder with a latent attention block beside its weights."""
    from safetensors.torch import save_file

    folder = shutil.copytree(tiny_model_folder, tmp_path_factory.mktemp("tiny-latent") / "model")
    save_file(make_latent_block(TINY_DIM, 8, 6), folder / "cairn_extra.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random BERT of 2 layers, 32 dimensions and 96 positions."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-bert"))


@pytest.fixture(scope="session")
def tiny_roberta_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random RoBERTa, whose positions start after the padding id."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-roberta"), model_type="roberta", seed=1)


CDE_CONTEXT = 6
"""J of the tiny CDE models; with 8 soft prompts and texts of up to 40 tokens before it, fewer than their backbones' positions."""


@pytest.fixture(scope="session")
def make_cde(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a writer of random CDE checkpoints in the published layout: ``make(version, **settings)``, settings as in config.json.

    v1 has its backbone's configuration in its folder, v2 beside it.
    """

    def make(version: int, seed: int = 0, size: Size = TINY, **settings: Any) -> Path:
        import torch
        from safetensors.torch import save_file

        vocab_size = json.loads((tiny_model_folder / "config.json").read_text())["vocab_size"]
        generator = torch.Generator().manual_seed(100 * version + seed)

        def matrix(name: str, rows: int, columns: int, *, bias: bool = False, scale: float = 0.2) -> dict[str, torch.Tensor]:
            found = {f"{name}.weight": torch.randn(rows, columns, generator=generator) * scale}
            return found | ({f"{name}.bias": torch.randn(rows, generator=generator) * 0.1} if bias else {})

        def norm(name: str, *, bias: bool) -> dict[str, torch.Tensor]:
            found = {f"{name}.weight": 1 + torch.randn(size.width, generator=generator) * 0.1}
            return found | ({f"{name}.bias": torch.randn(size.width, generator=generator) * 0.1} if bias else {})

        def backbone(prefix: str, num_layers: int) -> dict[str, torch.Tensor]:
            tensors = {}
            if version == 1:
                tensors |= matrix(f"{prefix}.embeddings.word_embeddings", vocab_size, size.width, scale=1.0)
                tensors |= matrix(f"{prefix}.embeddings.token_type_embeddings", 2, size.width) | norm(f"{prefix}.emb_ln", bias=True)
                for layer in (f"{prefix}.encoder.layers.{index}" for index in range(num_layers)):
                    tensors |= matrix(f"{layer}.attn.Wqkv", 3 * size.width, size.width) | matrix(
                        f"{layer}.attn.out_proj", size.width, size.width
                    )
                    tensors |= matrix(f"{layer}.mlp.fc11", size.inner, size.width) | matrix(f"{layer}.mlp.fc12", size.inner, size.width)
                    tensors |= matrix(f"{layer}.mlp.fc2", size.width, size.inner)
                    tensors |= norm(f"{layer}.norm1", bias=True) | norm(f"{layer}.norm2", bias=True)
                return tensors
            tensors |= matrix(f"{prefix}.embeddings.tok_embeddings", vocab_size, size.width, scale=1.0)
            tensors |= norm(f"{prefix}.embeddings.norm", bias=False) | norm(f"{prefix}.final_norm", bias=False)
            for index in range(num_layers):
                layer = f"{prefix}.layers.{index}"
                tensors |= norm(f"{layer}.attn_norm", bias=False) if index else {}
                tensors |= matrix(f"{layer}.attn.Wqkv", 3 * size.width, size.width) | matrix(f"{layer}.attn.Wo", size.width, size.width)
                tensors |= norm(f"{layer}.mlp_norm", bias=False)
                tensors |= matrix(f"{layer}.mlp.Wi", 2 * size.inner, size.width) | matrix(f"{layer}.mlp.Wo", size.width, size.inner)
            return tensors

        config = {
            "architecture": "transductive",
            "architectures": ["DatasetTransformer" if version == 1 else "ContextualDocumentEmbeddingTransformer"],
            "autoregressive_backbone": False,
            "dataset_backbone": None,
            "disable_dropout": True,
            "disable_transductive_rotary_embedding": True,
            "embedder": "nomic-ai/nomic-bert-2048" if version == 1 else "answerdotai/ModernBERT-base",
            "embedding_output_dim": None,
            "limit_layers": None,
            "limit_layers_first_stage": None,
            "logit_scale": 50.0,
            "max_seq_length": 40,
            "torch_dtype": "float32",
            "transductive_corpus_size": CDE_CONTEXT,
            "transductive_sequence_dropout_prob": 0.0,
            "transductive_tie_token_embeddings": False,
            "transductive_tokens_per_document": 1,
        }
        if version == 2:
            config |= {"pool_ignore_contextual_tokens": True, "pool_ignore_instruction_tokens": True, "pooling_strategy": "mean"}
        config |= settings
        num_layers = size.layers or (2 if version == 1 else 4)
        output_dim = config["embedding_output_dim"] or size.width
        first, second = "first_stage_model", "second_stage_model"
        tensors = backbone(f"{first}.embedder", config["limit_layers_first_stage"] or num_layers)
        tensors |= backbone(f"{second}.backbone", config["limit_layers"] or num_layers)
        tensors |= matrix(f"{first}.mlp.0", size.width, size.width, bias=True) | matrix(f"{first}.mlp.2", size.width, size.width, bias=True)
        tensors |= matrix(f"{second}.prompt_projection.0", size.width, size.width, bias=True)
        tensors |= matrix(f"{second}.prompt_projection.2", 8 * size.width, size.width, bias=True)
        tensors |= matrix(f"{second}.output_projection.0", size.width, size.width, bias=True)
        tensors |= matrix(f"{second}.output_projection.2", output_dim, size.width, bias=True)
        if config["transductive_sequence_dropout_prob"]:
            tensors[f"{second}.sequence_dropout_null_embedding"] = torch.randn(size.width, generator=generator)

        folder = tmp_path_factory.mktemp("cde") / "model"
        folder.mkdir()
        shutil.copy(tiny_model_folder / "tokenizer.json", folder)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        sizes = {
            1: {
                "model_type": "nomic_bert",
                "n_embd": size.width,
                "n_head": size.heads,
                "n_inner": size.inner,
                "n_layer": num_layers,
                "n_positions": size.positions,
                "rotary_emb_base": 1000,
                "vocab_size": vocab_size,
            },
            2: {
                "model_type": "modernbert",
                "hidden_size": size.width,
                "num_attention_heads": size.heads,
                "intermediate_size": size.inner,
                "num_hidden_layers": num_layers,
                "max_position_embeddings": size.positions,
                "global_attn_every_n_layers": 3,
                "global_rope_theta": 160000.0,
                "local_rope_theta": 10000.0,
                "local_attention": size.window,
                "vocab_size": vocab_size,
            },
        }[version]
        if version == 1:
            (folder / "nomic-bert-2048.json").write_text(json.dumps(sizes))
        else:
            (folder.parent / "ModernBERT-base").mkdir()
            (folder.parent / "ModernBERT-base" / "config.json").write_text(json.dumps(sizes))
        return folder

    return make


@pytest.fixture(scope="session")
def model_size() -> type[Size]:
    """Return the class of sizes a writer of models takes."""
    return Size


@pytest.fixture(scope="session")
def make_bert(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Size], Path]:
    """Return a writer of random BERTs of a size."""
    return lambda size: make_tiny_model(tmp_path_factory.mktemp("bert") / "model", size=size)


@dataclass
class ObjectStore:
    """An S3-compatible server in a process of its own, see ``s3_server.py``, with one empty bucket, ``cairn``."""

    url: str
    process: subprocess.Popen[str]

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        headers = {"Content-Type": "application/octet-stream"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers, method=method), timeout=30) as answer:
            return answer.read()

    def put(self, key: str, content: bytes) -> None:
        import obstore
        from obstore.store import from_url

        obstore.put(from_url("s3://cairn"), key, content)

    def fault(self, method: str, path: str, fault: str, times: int = 1) -> None:
        """Make the next requests that match fail: ``refuse``, ``forbid``, ``lose-reply`` or ``stall``."""
        self.request("PUT", "/-/faults", json.dumps([{"method": method, "path": path, "fault": fault, "times": times}]).encode())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def object_stores() -> Generator[list[ObjectStore]]:
    """Hold the server that the tests of a session share, started by the first that asks for it and after each that killed it."""
    stores: list[ObjectStore] = []
    yield stores
    for store in stores:
        store.kill()


@pytest.fixture
def object_store(object_stores: list[ObjectStore], monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Return an S3-compatible server on loopback, emptied, and point this process, and those it starts, to it."""
    if not object_stores or object_stores[-1].process.poll() is not None:
        command = [sys.executable, str(Path(__file__).with_name("s3_server.py"))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        with process.stdout:
            object_stores.append(ObjectStore(process.stdout.readline().strip(), process))
    store = object_stores[-1]
    store.request("PUT", "/-/faults", b"[]")
    store.request("POST", "/moto-api/reset")
    store.request("PUT", "/cairn")
    for name, value in {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ALLOW_HTTP": "true",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    return store


@pytest.fixture
def stored() -> Callable[..., dict[str, Any]]:
    """Return a function that gives everything a reader can see of a collection, by document."""
    return _stored


@pytest.fixture
def require_same() -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Return a function that compares two of them."""
    return _require_same


def _stored(root: Path, collection: str = "c") -> dict[str, Any]:
    import pyarrow as pa

    from pipeline.index.generation import open_generation
    from pipeline.index.lance_index import LanceTables
    from pipeline.index.layout import CollectionLayout

    layout = CollectionLayout(root, collection)
    generation = open_generation(layout)
    tables = LanceTables.open(layout)
    documents = pa.Table.from_batches(
        tables.scan("documents", ["doc_id", "text", "content_sha256", "year", "cluster_id", "vector"], generation.manifest.lance_versions)
    )
    chunks = pa.Table.from_batches(
        tables.scan("chunks", ["doc_id", "ordinal", "start_char", "end_char", "vector"], generation.manifest.lance_versions)
    )
    found: dict[str, Any] = {row["doc_id"]: {**row, "chunks": []} for row in documents.to_pylist()}
    assert len(found) == documents.num_rows
    for row in chunks.to_pylist():
        found[row["doc_id"]]["chunks"].append(row)
    return found


def _require_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Same ids, content and spans; vectors equal up to the rounding that another batch brings."""
    import numpy as np

    assert sorted(left) == sorted(right)
    for doc_id, document in left.items():
        other = right[doc_id]
        assert document["content_sha256"] == other["content_sha256"]
        assert np.allclose(document["vector"], other["vector"], atol=1e-5)
        spans = [[(chunk["start_char"], chunk["end_char"]) for chunk in side["chunks"]] for side in (document, other)]
        assert spans[0] == spans[1]
        assert np.allclose([chunk["vector"] for chunk in document["chunks"]], [chunk["vector"] for chunk in other["chunks"]], atol=1e-5)


@pytest.fixture
def stop_at() -> Iterator[Any]:
    """Return a function that interrupts the run in this process at the n-th passing of a commit point."""
    from pipeline import durable

    before = list(durable._observers)

    def arm(name: str, times: int = 1) -> None:
        passed = 0

        def observer(point: str) -> None:
            nonlocal passed
            passed += point == name
            if point == name and passed == times:
                raise KeyboardInterrupt

        durable.observe_commit_points(observer)

    yield arm
    durable._observers[:] = before


class RayCluster:
    """Machines on this one, in processes that can be killed: a head that computes nothing and two others, or one with a dashboard."""

    STARTS = 3
    """Ray gives a machine 30 seconds to start, which a busy one may exceed."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("ray_cluster.py")), *options]
        # What a job calls `python` is the cluster's.
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        for left in reversed(range(self.STARTS)):
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            try:
                self._hear()
                break
            except json.JSONDecodeError:
                self.close()
                if not left:
                    raise

    def _hear(self) -> None:
        assert self._process.stdout is not None
        heard = json.loads(self._process.stdout.readline())
        self.address: str = heard["address"]
        self.dashboard = f"http://{heard['dashboard']}"
        self.raylets: list[int] = heard["raylets"]

    def machines(self) -> list[int]:
        """Return the raylets of living machines other than the head."""
        import psutil

        return [pid for pid in self.raylets[1:] if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]

    def processes(self, raylet: int) -> list[int]:
        """Return all processes of a machine, its raylet first."""
        import psutil

        return [raylet, *(child.pid for child in psutil.Process(raylet).children(recursive=True))]

    def workers(self, class_name: str) -> list[int]:
        """Return the processes of living actors of a class, the oldest first."""
        import psutil

        found = [child for raylet in self.machines() for child in psutil.Process(raylet).children(recursive=True)]
        actors = [process for process in found if process.name().startswith(f"ray::{class_name}"[:15])]
        return [process.pid for process in sorted(actors, key=psutil.Process.create_time)]

    def machine_at_work(self, class_name: str) -> int:
        """Return the machine of the oldest actor of a class."""
        import psutil

        parents = {process.pid for process in psutil.Process(self.workers(class_name)[0]).parents()}
        (machine,) = parents.intersection(self.machines())
        return machine

    def restore(self, machines: int = 2) -> None:
        """Bring the cluster back to so many machines."""
        assert self._process.stdin is not None
        while len(self.machines()) < machines:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            self._hear()

    def close(self) -> None:
        """Stop everything."""
        self._process.communicate(timeout=60)


@pytest.fixture(scope="session")
def started_ray_cluster() -> Iterator[RayCluster]:
    """Start one cluster for all tests; whoever breaks it leaves that to :func:`ray_cluster` to mend."""
    cluster = RayCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def ray_cluster(started_ray_cluster: RayCluster) -> RayCluster:
    """Return a whole cluster."""
    started_ray_cluster.restore()
    return started_ray_cluster


@pytest.fixture(scope="session")
def ray_head() -> Iterator[RayCluster]:
    """Start one machine that takes jobs."""
    cluster = RayCluster("--dashboard")
    yield cluster
    cluster.close()


@pytest.fixture
def short_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make samples of a few modules: all of them take seconds to read."""
    from pipeline.corpus import sample

    modules = sample._library_sources()[:20]
    monkeypatch.setattr(sample, "_library_sources", lambda: modules)


@pytest.fixture(scope="session")
def tiny_cross_encoder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """Return the folder of a random cross-encoder of one score, as Sentence-Transformers reads it."""
    import torch
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-cross-encoder")
    tokenizer = Tokenizer.from_file(str(tiny_model_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=TINY_DIM,
        num_hidden_layers=TINY_LAYERS,
        num_attention_heads=4,
        intermediate_size=TINY_INNER,
        max_position_embeddings=TINY_POSITIONS,
        num_labels=1,
        initializer_range=0.5,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


STONES = ("granite", "basalt", "slate", "marble", "flint", "chalk", "quartz", "gneiss", "shale", "chert")


@pytest.fixture(scope="session")
def stones_root(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """A root with the collection ``stones``: 12 documents of several chunks, ids with slashes, a number and a date to filter by."""
    import datetime as dt

    import pyarrow as pa
    import pyarrow.parquet as pq

    from jobs.build_index import build_index
    from pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig

    folder = tmp_path_factory.mktemp("stones")
    rows = [
        {
            "id": f"stones/{STONES[number % 10]}/{number}",
            "title": f"{STONES[number % 10].title()} {number}" if number % 4 else None,
            "text": f"stone {number} é: " + " ".join(STONES[(number + step * step) % 10] for step in range(20 + number)),
            "year": 2000 + number,
            "found": dt.date(2000 + number, 1, 1),
        }
        for number in range(12)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "stones.parquet")
    encoder = EncoderConfig(
        model=str(tiny_model_folder), landmark_interval=16, max_window_tokens=64, window_overlap_tokens=16, precision="fp32"
    )
    config = IngestConfig(
        encoder=encoder, cluster=ClusterConfig(num_clusters=2), context=ContextConfig(num_documents=4, max_document_tokens=32)
    )
    build_index([str(folder / "stones.parquet")], folder / "root", "stones", config)
    return folder / "root"


@pytest.fixture(scope="session")
def stones_address(stones_root: Path) -> Iterator[str]:
    """The address of a server over that root, in a thread of this process."""
    import threading
    import time

    import uvicorn

    from pipeline.serve.app import create_app
    from pipeline.serve.server import bind
    from pipeline.serve.settings import ServeSettings

    settings = ServeSettings(root=stones_root, port=0, deadline_seconds=300.0)
    with bind(settings) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(settings), lifespan="on", ws="none", log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="stones-server")
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
