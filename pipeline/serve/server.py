"""Bind and serve until stopped; a server that other machines can reach must have a key."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import uvicorn
from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker
from cairn.pipeline.errors import ConfigError, StorageError
from cairn.pipeline.index.held_files import lease_held_files
from cairn.pipeline.search.reader import LocalReader
from cairn.pipeline.search.served import MakeReader
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.connections import PunctualProtocol, max_connections
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import MAX_HEADER_BYTES, ServeSettings, num_processors
from fastapi import FastAPI

CONNECTIONS_A_REQUEST: Final = 8
"""Connections that may be open, idle ones too, for each request that may be in flight; more are refused."""
BACKLOG: Final = 1_024
KEEP_ALIVE_SECONDS: Final = 30


def run_server(
    settings: ServeSettings, on_listening: Callable[[str], None], make_reader: MakeReader = LocalReader
) -> None:
    """Serve until SIGINT or SIGTERM; ``on_listening`` hears the address once it is bound.

    ``make_reader`` says who reads the segments of a generation.
    """
    require_key(settings)
    app = app_of(settings, make_reader)
    listener = bind(settings)
    with listener:
        host, port = listener.getsockname()[:2]
        on_listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        lease_held_files()
        server_of(app, settings).run(sockets=[listener])


def app_of(settings: ServeSettings, make_reader: MakeReader = LocalReader) -> FastAPI:
    """Return the application with the reranker and the threads that the settings ask for."""
    num_threads = settings.encoder_threads or min(torch.get_num_threads(), num_processors())
    reranker = None if settings.rerank_model is None else CrossEncoderReranker(settings.rerank_model)
    return create_app(
        settings,
        reranker=reranker,
        on_encoder_thread=partial(torch.set_num_threads, num_threads),
        make_reader=make_reader,
    )


def server_of(app: FastAPI, settings: ServeSettings) -> uvicorn.Server:
    """Return what serves an application within the bounds of its settings."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=PunctualProtocol,
            loop="asyncio",  # whatever is installed beside it
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=max_connections(CONNECTIONS_A_REQUEST * settings.max_requests),
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(settings.deadline_seconds)),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
    )


def require_key(settings: ServeSettings) -> None:
    """Refuse to serve others without a key, and anyone where keys were made and their file is gone."""
    keys = KeyFile(settings.keys_path)
    keys.require_kept()
    is_guarded = any(key.revoked_at is None for key in keys.read())
    if not is_guarded and not settings.is_loopback:
        named = (
            ("--keys-file", str(settings.keys_file)) if settings.keys_file else ("--root", str(settings.root))
        )
        command = shlex.join(["cairn", "keys", "create", "NAME", *named])
        raise ConfigError(
            "host must be this machine's own (127.0.0.1) while there is no API key, got "
            f"{settings.host!r}; run `{command}`"
        )


def bind(settings: ServeSettings) -> socket.socket:
    """Return a listening socket; an address that is taken or not this machine's raises a sentence."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StorageError(
            f"port {settings.port} of {settings.host} cannot be listened on: {error.strerror or error}"
        ) from error
    # Connections take it from here: asyncio leaves it out for a socket it did not make, and an answer's
    # second packet waits 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
