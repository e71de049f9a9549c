"""Compare an ingest by an endpoint with the endpoint's own throughput, on loopback with 5 ms latency.

The server is a process of its own that answers one request at a time, each after 5 ms and what its tokens
take at 100,000 a second. Its own throughput is that of bare requests for the same batches, eight at once.
Both need idle cores: cutting texts takes about half a millisecond of a core a chunk. Start-up is left out.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock

import pytest

pytestmark = pytest.mark.bench

LATENCY_SECONDS = 0.005
TOKENS_A_SECOND = 100_000
PASSAGES = 6_000


def _serve(told: Connection) -> None:
    import base64
    import json

    import numpy as np

    turn = Lock()
    rows = np.random.default_rng(0).standard_normal((64, 384)).astype(np.float32)
    written = [base64.b64encode(row.tobytes()).decode() for row in rows]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
            with turn:
                time.sleep(LATENCY_SECONDS + sum(map(len, asked)) / 4 / TOKENS_A_SECOND)
            data = [{"index": k, "embedding": written[hash(text) % 64]} for k, text in enumerate(asked)]
            reply = json.dumps({"data": data}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.send(server.server_port)
    server.serve_forever()


def test_bench_endpoint_against_its_own_throughput(
    tmp_path: Path,
    sample_passages: Callable[[int], list[str]],
    write_passages: Callable[[Path, list[str]], str],
) -> None:
    from cairn.pipeline.encode.endpoint import BATCH_TEXTS, INGEST, EndpointEncoder
    from cairn.pipeline.line.build_index import build_index
    from cairn.pipeline.line.encoder_worker import EncoderWorker
    from cairn.pipeline.line.ingest_settings import resolve_ingest_config

    texts = sample_passages(PASSAGES)
    source = write_passages(tmp_path / "passages.parquet", texts)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=[there], daemon=True)
    process.start()
    try:
        model = f"http://127.0.0.1:{here.recv()}/v1/embeddings"
        config = resolve_ingest_config({"encoder": {"model": model}}, None)
        encoder = EndpointEncoder(config.encoder)
        encoder.check()
        sent: list[tuple[str, ...]] = []
        encoder._ask = (
            lambda batch: (
                sent.extend(unit for _, unit in batch)
                or {  # type: ignore[method-assign]
                    key: encoder.probes_PV[:1] for key, _ in batch
                }
            )
        )
        encoder.encode(texts)
        size = BATCH_TEXTS + 1  # what an ingest sends with its probe
        batches = [sent[first : first + size] for first in range(0, len(sent), size)]
        started = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(partial(encoder._endpoint.embed, patience=INGEST), batches))
        own = time.monotonic() - started
        engine = EncoderWorker(config)
        engine.load()
        report = build_index([source], tmp_path / "root", "c", config, engine=engine)
    finally:
        process.kill()
        process.join()
    encode = report.stage_seconds["encode"]
    print(f"\nchunks={report.chunks} endpoint={own:.2f}s encode={encode:.2f}s ingest={report.seconds:.2f}s")
    print(f"endpoint / encode = {own / encode:.3f}  (goal >= 0.9)")
    assert report.encoded == PASSAGES
