"""What the results of a bench say: averages, differences from a reference, and which configuration to use.

Systems are chosen by their quality: the mean of the primary measures of a set (nDCG@10, and evidence recall
at 2,000 characters where there is evidence), averaged over the sets. The advice names only what an ingest can
build. The settings as they were given, searched without flags, stand as long as none is better beyond noise.

Tests are paired query by query; with several sets the queries of all count alike, so a large set decides more
of a test than of an average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from cairn.pipeline.config import DEFAULT_MODEL, EncoderConfig, default_overlap
from cairn.pipeline.lab.evaluate.bench import SystemResult, primary_measures
from cairn.pipeline.lab.evaluate.measures import PairedComparison, compare_paired, verdict_of
from cairn.pipeline.lab.evaluate.searched_set import AS_SEARCHED
from cairn.pipeline.lab.evaluate.systems import Ranking, System
from cairn.pipeline.model.folders.model_defaults import encoder_config, given_defaults
from cairn.pipeline.options import Option, options_of
from cairn.pipeline.search_options import SearchOptions
from jaxtyping import Float64

_SEARCHES: Final[Mapping[Ranking, SearchOptions]] = {**AS_SEARCHED, "dense": AS_SEARCHED["chunk"]}
"""What a search without windows of its own gives; the dense baseline is ranked as chunks are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A configuration to use: quality and cost over all sets, the flags that build and search it."""

    system: str
    quality: float
    encode_seconds: float
    tokens: int
    index_bytes: int
    query_milliseconds: float
    ingest_flags: str
    search_flags: str


class Report:
    """All results of a run, by system; every system must have one result a set, the sets in one order."""

    def __init__(self, results: Sequence[SystemResult]) -> None:
        self.set_names = list(dict.fromkeys(result.set_name for result in results))
        self.by_system: dict[str, list[SystemResult]] = {}
        for result in results:
            self.by_system.setdefault(result.system.name, []).append(result)
        for name, own in self.by_system.items():
            assert [result.set_name for result in own] == self.set_names, (
                f"{name} was not scored on every set once"
            )

    def averages(self) -> dict[str, dict[str, float]]:
        """Return every system's measures averaged over the sets that have them."""
        averages: dict[str, dict[str, float]] = {}
        for name, own in self.by_system.items():
            means = [result.means() for result in own]
            names = dict.fromkeys(measure for mean in means for measure in mean)
            averages[name] = {
                measure: float(np.mean([mean[measure] for mean in means if measure in mean]))
                for measure in names
            }
        return averages

    def quality(self, name: str) -> float:
        """Return the mean of the primary measures of each set, averaged over the sets."""
        means = [result.means() for result in self.by_system[name]]
        return float(np.mean([np.mean([own[each] for each in primary_measures(own)]) for own in means]))

    def best_baseline(self) -> str | None:
        """Return the baseline of the highest quality, ties by name; None without baselines."""
        return self._best([name for name, own in self.by_system.items() if own[0].system.is_baseline])

    def compare(
        self, name: str, reference: str, measure: str, seed: int
    ) -> list[tuple[str, PairedComparison]]:
        """Return the paired comparison on every set that has the measure."""
        pairs = zip(self.set_names, self.by_system[name], self.by_system[reference], strict=True)
        return [
            (set_name, compare_paired(own.values[measure], other.values[measure], seed=seed))
            for set_name, own, other in pairs
            if measure in own.values
        ]

    def advise(self, seed: int) -> Advice | None:
        """Return what to build: the settings that were given, unless others are better beyond noise."""
        best = self._best(self._buildable())
        if best is None:
            return None
        alike = self.not_told_apart(best, seed)
        return self._advice(
            next((name for name in alike if _is_as_given(self.by_system[name][0].system)), best)
        )

    def not_told_apart(self, name: str, seed: int) -> dict[str, PairedComparison]:
        """Return what an ingest can build, too, and whose difference from this one is noise."""
        compared = {
            other: compare_paired(self._per_query(other), self._per_query(name), seed=seed)
            for other in self._buildable()
            if other != name
        }
        return {other: each for other, each in compared.items() if verdict_of(each) == "noise"}

    def is_told_apart(self, one: str, other: str, seed: int) -> bool:
        """Tell whether two systems differ by more than chance."""
        return verdict_of(compare_paired(self._per_query(one), self._per_query(other), seed=seed)) != "noise"

    def _buildable(self) -> list[str]:
        return [name for name, own in self.by_system.items() if is_buildable(own[0].system)]

    def to_dict(self, reference: str | None, seed: int) -> dict[str, Any]:
        """Return plain JSON values: every mean, cost and comparison with the reference."""
        results = {
            name: {own.set_name: {"measures": own.means(), "cost": asdict(own.cost)} for own in results}
            for name, results in self.by_system.items()
        }
        advice = self.advise(seed)
        alike = self.not_told_apart(advice.system, seed) if advice else {}
        return {
            "systems": results,
            "averages": self.averages(),
            "quality": {name: self.quality(name) for name in self.by_system},
            "reference": reference,
            "comparisons": self._comparisons(reference, seed) if reference else {},
            "advice": [asdict(advice)] if advice else [],
            "not_told_apart": {name: asdict(each) for name, each in alike.items()},
        }

    def _comparisons(self, reference: str, seed: int) -> dict[str, Any]:
        measures = primary_measures(self.averages()[reference])
        return {
            name: {
                measure: {s: asdict(c) for s, c in self.compare(name, reference, measure, seed)}
                for measure in measures
            }
            for name in self.by_system
            if name != reference
        }

    def _best(self, names: Sequence[str]) -> str | None:
        return min(names, key=lambda name: (-self.quality(name), name), default=None)

    def _per_query(self, name: str) -> Float64[np.ndarray, " Q"]:
        """Return the mean of a query's primary measures, those of all sets one after the other."""
        return np.concatenate(
            [
                np.nanmean([own.values[measure] for measure in primary_measures(own.values)], axis=0)
                for own in self.by_system[name]
            ]
        )

    def _advice(self, name: str) -> Advice:
        own = self.by_system[name]
        return Advice(
            system=name,
            quality=self.quality(name),
            encode_seconds=sum(result.cost.encode_seconds for result in own),
            tokens=sum(result.cost.tokens for result in own),
            index_bytes=sum(result.cost.index_bytes for result in own),
            query_milliseconds=float(np.mean([result.cost.query_milliseconds for result in own])),
            ingest_flags=ingest_flags(own[0].system),
            search_flags=search_flags(own[0].system),
        )


def is_buildable(system: System) -> bool:
    """Whether an ingest and a search give this system.

    They give no pieces with titles in front, no context of random words, no windows that overlap by another
    number than the default, for which there is no flag.
    """
    encoding = system.encoding
    if encoding.encoder.window_overlap_tokens != default_overlap(encoding.encoder.window_tokens):
        return False
    return not encoding.has_pieces and encoding.context != "random" and system.ranking in _SEARCHES


def _is_as_given(system: System) -> bool:
    """Whether an ingest with the evaluated settings and a search without flags give this system."""
    return system.name.startswith("cairn/") and not search_flags(system)


def ingest_flags(system: System) -> str:
    """Return the flags of ``ingest`` that give this system, beyond defaults and what the model brings."""
    config, column = system.encoding.encoder, system.encoding.vector_column
    if column is None:
        default = {**asdict(encoder_config({"model": config.model}, for_ingest=True)), "model": DEFAULT_MODEL}
    else:
        default = asdict(EncoderConfig(**given_defaults({})))
        if config.token_bytes:  # an ingest must know who encodes queries
            column += " --model MODEL_OF_THE_VECTORS"
    wanted = asdict(config)
    flags = [
        _flag(option, wanted[name])
        for name, option in options_of(EncoderConfig).items()
        if option.about.help and wanted[name] is not None and wanted[name] != default[name]
    ]
    return " ".join(flags if column is None else [f"--vector-column {column}", *flags])


def search_flags(system: System) -> str:
    """Return the flags of ``cairn search`` that rank as this system does."""
    options = _SEARCHES[system.ranking]
    flags = {
        f"--granularity {options.granularity}": options.granularity != "both",
        "--no-hybrid": not options.hybrid,
        "--no-late": bool(system.encoding.encoder.token_bytes) and not system.reads("token vectors"),
    }
    return " ".join(flag for flag, is_needed in flags.items() if is_needed)


def _flag(option: Option, value: Any) -> str:
    if isinstance(value, bool):
        return option.flag if value else str(option.about.off_flag)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{option.flag} '{text}'" if not text or any(map(str.isspace, text)) else f"{option.flag} {text}"
