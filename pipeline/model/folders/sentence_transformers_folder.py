"""A Sentence-Transformers folder as it describes itself, without torch: modules, pooling, prompts.

    modules.json ─▶ Transformer ─▶ Pooling ─▶ Dense · LayerNorm · Normalize …
    modules.json ─▶ Router ─▶ such modules for documents, and others for queries
    1_Pooling/config.json, 2_Dense/config.json ─▶ the settings of each module
    config_sentence_transformers.json ─▶ prompts, truncate_dim
    sentence_bert_config.json ─▶ do_lower_case

Says what is written there and refuses what Cairn cannot run. Old and new spellings of Pooling's configuration
are read. ``max_seq_length`` is not: nothing is truncated here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from cairn.pipeline import durable
from cairn.pipeline.errors import ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.late_interaction import (
    METADATA_NAME,
    STANFORD,
    LateInteraction,
    of_mask_module,
    of_pylate,
    of_stanford,
)
from cairn.pipeline.model.folders.model_types import PPLX

MODULES_NAME: Final = "modules.json"
WEIGHTS_NAME: Final = "model.safetensors"
SETTINGS_NAME: Final = "config_sentence_transformers.json"
TRANSFORMER_SETTINGS_NAME: Final = "sentence_bert_config.json"

QUANTIZER: Final = "FlexibleQuantizer"
"""The last module of pplx-embed: a vector's numbers become whole ones between -127 and 127."""
WEIGHTLESS: Final = ("Normalize", QUANTIZER)
_STEPS: Final = ("Dense", "LayerNorm", *WEIGHTLESS)
_ENCODERS: Final = ("Transformer", "StaticEmbedding")
ROUTER_NAME: Final = "router_config.json"
_MODULES: Final = (*_ENCODERS, "Pooling", *_STEPS, "Dropout", "MultiVectorMask")
_OLD_POOLING_KEYS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One module between pooling and the vector: its kind, its folder and its configuration."""

    kind: str
    folder: Path
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceTransformersFolder:
    """What the folder says; ``pooling`` = None has no Pooling module.

    ``is_static``: in the transformer's place stands a table of token vectors. ``late``: how the tokens of a
    late-interaction model are read. ``steps`` leave out the last Normalize, which every vector gets.
    ``asking``: the modules that read queries, where a Router has some of their own.
    """

    transformer: Path
    is_static: bool = False
    late: LateInteraction | None = None
    pooling: str | None = None
    pools_prompt: bool = True
    steps: tuple[Step, ...] = ()
    lowercases: bool = False
    query_prompt: str = ""
    document_prompt: str = ""
    truncate_dim: int | None = None
    asking: SentenceTransformersFolder | None = None


def read_sentence_transformers_folder(folder: Path) -> SentenceTransformersFolder | None:
    """Read such a folder, None for one in another layout; what does not run here raises."""
    if not (folder / MODULES_NAME).is_file():
        return _without_modules(folder)
    listed = module_list(folder)
    is_routed = bool(listed) and str(listed[0].get("type")).endswith(".Router")
    behind = [(_kind(module), folder_inside(folder, module.get("path"))) for module in listed[is_routed:]]
    if not is_routed:
        return _described(folder, behind)
    routes = routes_of(folder_inside(folder, listed[0].get("path")))
    queries, documents = (
        _described(folder, [*[(_kind({"type": kind}), path) for kind, path in route], *behind])
        for route in routes
    )
    if not all(routes) or queries.late is not None:
        raise ModelError(
            "a model with a Router must have the routes query and document, each to one vector, got another; "
            "choose another model"
        )
    return replace(documents, asking=queries)


def routes_of(folder: Path) -> tuple[list[tuple[str, Path]], list[tuple[str, Path]]]:
    """Return the kinds and folders of the modules that read queries, and of those that read documents."""
    router = read_json(folder / ROUTER_NAME)
    types, structure = router.get("types"), router.get("structure")
    if not isinstance(types, dict) or not isinstance(structure, dict):
        raise ModelError(
            f"{ROUTER_NAME} of the model must hold types and structure, got others; fetch the model again"
        )
    kinds, routes = cast("Mapping[str, Any]", types), cast("Mapping[str, Sequence[str]]", structure)
    queries, documents = (
        [
            (str(kinds.get(name)).rpartition(".")[2], folder_inside(folder, name))
            for name in routes.get(route, ())
        ]
        for route in ("query", "document")
    )
    return queries, documents


def _described(folder: Path, modules: Sequence[tuple[str, Path]]) -> SentenceTransformersFolder:
    encoder, transformer = next((each for each in modules if each[0] in _ENCODERS), ("", folder))
    pooling = next((read_json(path / "config.json") for kind, path in modules if kind == "Pooling"), None)
    settings = read_json_if_any(folder / SETTINGS_NAME)
    transformer_settings = read_json_if_any(transformer / TRANSFORMER_SETTINGS_NAME)
    mask = next((path for kind, path in modules if kind == "MultiVectorMask"), None)
    late = of_pylate(settings)
    if late is None and mask is not None:
        late = of_mask_module(transformer_settings, read_json_if_any(mask / "config.json"))
    prompts = prompts_of(settings)
    if late is not None:
        query, document = (
            marker + prompt.removeprefix(marker) for marker, prompt in zip(late.markers, prompts, strict=True)
        )
        prompts = query, document
    return SentenceTransformersFolder(
        transformer=transformer,
        is_static=encoder == "StaticEmbedding",
        pooling=None if pooling is None else _pooling_mode(pooling),
        pools_prompt=True if pooling is None else bool(pooling.get("include_prompt", True)),
        late=late,
        steps=_steps(modules, "sentence_embedding" if late is None else "token_embeddings"),
        lowercases=bool(transformer_settings.get("do_lower_case", False)),
        query_prompt=prompts[0],
        document_prompt=prompts[1],
        truncate_dim=settings.get("truncate_dim"),
    )


def steps_fingerprint(steps: Sequence[Step]) -> str:
    """Hash kinds, settings and weights, wherever they lie."""
    parts = [
        (
            step.kind,
            dict(sorted(step.config.items())),
            None if step.kind in WEIGHTLESS else durable.sha256_of_file(module_weights(step.folder)),
        )
        for step in steps
    ]
    return fingerprint(kind="projection", steps=parts)


def module_weights(folder: Path) -> Path:
    """Return a module's file of weights; one without raises :class:`ModelError`."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise ModelError(
            f"the model's module {folder.name} must hold {WEIGHTS_NAME}, got none; convert the weights "
            "to safetensors"
        )
    return path


def module_list(folder: Path) -> list[dict[str, Any]]:
    """Return what modules.json lists."""
    modules: Any = _load(folder / MODULES_NAME)
    if not isinstance(modules, list) or not all(
        isinstance(module, dict) for module in cast("list[Any]", modules)
    ):
        raise ModelError(
            f"{MODULES_NAME} of the model must list its modules, got something else; fetch the model again"
        )
    return cast("list[dict[str, Any]]", modules)


def _kind(module: Mapping[str, Any]) -> str:
    kind = str(module.get("type", "")).rpartition(".")[2]
    if kind not in _MODULES:
        raise ModelError(
            f"a model folder must hold modules of the kinds {', '.join(_MODULES)}, got {kind!r}; choose "
            "another model"
        )
    return kind


def folder_inside(folder: Path, named: object) -> Path:
    """Return the folder of a module; one that is named outside of the model's raises :class:`ModelError`."""
    path = Path(str(named or ""))
    if path.is_absolute() or ".." in path.parts:
        raise ModelError(
            f"{MODULES_NAME} of the model must name folders inside it, got {str(path)!r}; fetch the "
            "model again"
        )
    return folder / path


def _pooling_mode(config: Mapping[str, Any]) -> str:
    named: Any = config.get("pooling_mode")
    if named is None:
        named = [mode for key, mode in _OLD_POOLING_KEYS.items() if config.get(key)] or ["mean"]
    return named if isinstance(named, str) else "+".join(map(str, named))


def _without_modules(folder: Path) -> SentenceTransformersFolder | None:
    """Describe a ColBERT or a pplx-embed in the layout of its authors; None for any other folder."""
    config = read_json_if_any(folder / "config.json")
    if config.get("model_type") == PPLX:
        return SentenceTransformersFolder(
            transformer=folder, steps=(Step(kind=QUANTIZER, folder=folder, config={}),)
        )
    architectures: Any = config.get("architectures")
    if not isinstance(architectures, list) or STANFORD not in architectures:
        return None
    late = of_stanford(read_json_if_any(folder / METADATA_NAME))
    query, document = late.markers
    return SentenceTransformersFolder(
        transformer=folder, late=late, query_prompt=query, document_prompt=document
    )


def _steps(modules: Sequence[tuple[str, Path]], feature: str) -> tuple[Step, ...]:
    steps = [
        # A quantiser has no folder of its own.
        Step(
            kind=kind, folder=path, config={} if kind == QUANTIZER else read_json_if_any(path / "config.json")
        )
        for kind, path in modules
        if kind in _STEPS
    ]
    for step in steps:
        names = {step.config.get(key) or feature for key in ("module_input_name", "module_output_name")}
        if names != {feature}:
            raise ModelError(
                f"the {step.kind} module of the model must read and write {feature}, got "
                f"{', '.join(sorted(map(str, names)))}; choose another model"
            )
    while steps and steps[-1].kind == "Normalize":
        steps.pop()
    return tuple(steps)


def prompts_of(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the prompts named for queries and documents, else the folder's default for both."""
    prompts: Any = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(value, str | None) for value in cast("dict[Any, Any]", prompts).values()
    ):
        raise ModelError(
            f"{SETTINGS_NAME} of the model must give each prompt as text, got something else; fetch the "
            "model again"
        )
    texts = {name: value for name, value in cast("dict[str, str | None]", prompts).items() if value}
    query = texts.get("query", "")
    document = next((texts[name] for name in ("document", "passage", "corpus") if name in texts), "")
    if query or document:
        return query, document
    default = texts.get(str(settings.get("default_prompt_name")), "")
    return default, default


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model folder; a missing or damaged one raises :class:`ModelError`."""
    content = _load(path)
    if not isinstance(content, dict):
        raise ModelError(
            f"{path.name} of the model must hold one JSON object, got something else; fetch the model again"
        )
    return cast("dict[str, Any]", content)


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Read one that may be missing, which is an empty one."""
    return read_json(path) if path.is_file() else {}


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(
            f"the model's folder {path.parent} must hold {path.name}, got none; "
            "give a folder in Hugging Face or sentence-transformers layout"
        )
    try:
        return json.loads(path.read_bytes())
    except (OSError, RecursionError, ValueError) as error:
        raise ModelError(
            f"{path.name} of the model must be JSON, got an unreadable file; fetch the model again"
        ) from error
