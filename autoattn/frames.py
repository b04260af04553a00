"""Cache entries, rivals, trials, samples of finals and benchmark results as pandas data frames.

pandas is no dependency: `pip install 'autoattn[frames]'` brings it, and pyarrow for Parquet.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoattn.cache import finals_samples, inventory
from autoattn.core.cache_entry import CacheEntry
from autoattn.core.trial import Evidence
from autoattn.errors import HostError, UsageError
from autoattn.hardware import nvidia
from autoattn.report import figures, groups
from autoattn.search import shared_trials

if TYPE_CHECKING:
    import pandas as pd

Rows = list[dict[str, object]]

# Column -> its dtype. docs/frames.md has the units.
KEYS = {"device": "string", "operation": "string", "problem": "string", "key": "string"}
ENTRIES = {
    **KEYS, "kind": "string", "dtype": "string", "batch": "Int64", "heads_q": "Int64", "heads_kv": "Int64",
    "seq_q": "Int64", "seq_kv": "Int64", "head_dim": "Int64", "head_dim_v": "Int64", "mask": "string",
    "layout": "string", "modifiers": "string", "evidence": "string", "runs_on": "string", "template": "string",
    "time_us": "float64", "tflops": "float64", "best_rival": "string", "ratio": "float64", "ratio_low": "float64",
    "ratio_high": "float64", "max_error": "float64", "rms_error": "float64", "samples": "Int64", "clock_mhz": "Int64",
    "throttled": "boolean", "trials": "Int64", "effort": "string", "torch": "string", "triton": "string",
    "source_digest": "string", "cache": "string",
}  # fmt: skip
RIVALS = {
    **KEYS, "kind": "string", "dtype": "string", "kernel_us": "float64", "rival": "string", "median_us": "float64",
    "ratio": "float64", "ratio_low": "float64", "ratio_high": "float64", "max_error": "float64",
    "joules": "float64", "watts": "float64",
}  # fmt: skip
TRIALS = {
    "study": "string", "number": "Int64", "ended": "datetime64[us]", "template": "string", "outcome": "string",
    "evidence": "string", "time_us": "float64", "digest": "string", "detail": "string", "registers": "Int64",
    "spilled_bytes": "Int64", "shared_bytes": "Int64",
}  # fmt: skip
FINALS = {
    "round": "Int64", "place": "Int64", "contestant": "string", "digest": "string", "time_us": "float64",
    "clock_mhz": "Int64", "temperature_c": "Int64", "slowed": "boolean",
}  # fmt: skip
BENCH = {"ours": "boolean", "slowed": "boolean"}  # what a CSV holds as 0 and 1


def entries(cache: Path | str | None = None) -> pd.DataFrame:
    """A row for each problem of a cache, of the entry that counts; ENTRIES has the columns.

    Args:
        cache: a cache folder; the user's own and the shipped one together when None.

    Raises:
        HostError: pandas is not installed.
        CacheError: `cache` is no folder, or one of its files cannot be read.
    """
    return _frame(_pandas(), entry_rows(_placed(cache)), ENTRIES)


def rivals(cache: Path | str | None = None) -> pd.DataFrame:
    """A row for each rival of each measured problem of a cache; RIVALS has the columns. Arguments as `entries`."""
    rows = [row for _, device, entry in _placed(cache) for row in _rival_rows(device, entry)]
    return _frame(_pandas(), rows, RIVALS)


def trials(journal: Path | str) -> pd.DataFrame:
    """A row for each finished trial of a journal (`<cache>/<device>/studies/<problem>.journal`), in order.

    The columns of TRIALS, then one for each parameter, `param.BLOCK_M`, empty in trials of a template without it.

    Raises:
        HostError: pandas is not installed.
        CacheError: the journal cannot be read.
    """
    pandas = _pandas()
    studies = shared_trials.dated(Path(journal))
    rows: Rows = []
    for study, dated in studies.items():
        for number, (ended, trial) in enumerate(dated, start=1):
            report = trial.report
            rows.append(
                {
                    "study": study,
                    "number": number,
                    "ended": ended.replace(tzinfo=None),
                    "template": trial.variant.template,
                    "outcome": trial.outcome.value,
                    "evidence": (Evidence.MEASURED if trial.measurement is not None else Evidence.PREDICTED).value,
                    "time_us": trial.time_us,
                    "digest": trial.digest,
                    "detail": trial.detail,
                    "registers": report.registers if report is not None else None,
                    "spilled_bytes": report.spilled_bytes if report is not None else None,
                    "shared_bytes": report.shared_bytes if report is not None else None,
                    **{f"param.{name}": value for name, value in trial.variant.as_dict().items()},
                }
            )
    params = sorted({name for row in rows for name in row if name.startswith("param.")})
    frame = _frame(pandas, rows, {**TRIALS, **dict.fromkeys(params, "object")})
    return frame.astype({name: frame[name].convert_dtypes().dtype for name in params})


def finals(samples: Path | str) -> pd.DataFrame:
    """A row for each sample of a problem's finals (`<cache>/<device>/studies/<problem>.finals.json`), by round.

    Raises:
        HostError: pandas is not installed.
        CacheError: the file cannot be read.
        UsageError: there is no such file.
    """
    pandas = _pandas()
    known = finals_samples.read(Path(samples))
    if known is None:
        raise UsageError(f"finals need a file of samples, but {samples!s:.500} does not exist; correct the path")
    rows: Rows = []
    for number, finals_round in enumerate(known.rounds, start=1):
        for place, (name, time_us) in enumerate(finals_round.times_us.items(), start=1):
            row = {"round": number, "place": place, "contestant": name, "time_us": time_us}
            rows.append({**row, "digest": known.kernels.get(name), **_pulse(finals_round.pulse)})
    return _frame(pandas, rows, FINALS)


def bench(path: Path | str) -> pd.DataFrame:
    """A row for each problem and contestant of a CSV of `autoattn bench`; `samples_us` holds a list of floats.

    Raises:
        HostError: pandas is not installed.
        UsageError: the file cannot be read, or is no such CSV.
    """
    pandas = _pandas()
    try:
        frame = pandas.read_csv(path).convert_dtypes()
    except (OSError, ValueError) as error:
        raise UsageError(f"a benchmark must be a CSV of autoattn bench, but {path!s:.500}: {error}") from None
    if not {"problem", "samples_us"} <= set(frame.columns):
        raise UsageError(
            f"a benchmark must have the columns problem and samples_us, but {path!s:.500} lacks them; "
            "name a CSV of autoattn bench"
        )
    samples = [[float(word) for word in str(text).split()] if pandas.notna(text) else [] for text in frame.samples_us]
    types = {name: dtype for name, dtype in BENCH.items() if name in frame}
    return frame.assign(samples_us=pandas.Series(samples, dtype="object")).astype(types)


def entry_rows(placed: Iterable[tuple[Path, str, CacheEntry]]) -> Rows:
    """The rows of `entries`, of (cache folder, device, entry); without pandas."""
    return [_entry_row(folder, device, entry) for folder, device, entry in placed]


def parquet(rows: Rows, columns: Mapping[str, str]) -> bytes:
    """Rows as a Parquet file.

    Raises:
        HostError: pandas or pyarrow is not installed.
    """
    frame, data = _frame(_pandas(), rows, columns), io.BytesIO()
    try:
        frame.to_parquet(data, engine="pyarrow", index=False)
    except ImportError:
        raise _missing("Parquet needs pyarrow") from None
    return data.getvalue()


def _placed(cache: Path | str | None) -> list[tuple[Path, str, CacheEntry]]:
    overlays = inventory.overlays(None if cache is None else Path(cache), nvidia.fingerprint_of)
    overlays.sort(key=lambda overlay: (overlay.device, groups.OPERATIONS[overlay.op.value]))
    return [
        (place.folder, overlay.device, place.entry)
        for overlay in overlays
        for place in sorted(overlay.counting.values(), key=lambda place: groups.order(place.entry.problem))
    ]


def _key_facts(device: str, entry: CacheEntry) -> dict[str, object]:
    problem = entry.problem
    return {
        "device": device,
        "operation": problem.op.value,
        "problem": str(problem),
        "key": problem.key,
        "kind": groups.kind_of(problem),
        "dtype": groups.dtype_of(problem),
    }


def _entry_row(folder: Path, device: str, entry: CacheEntry) -> dict[str, object]:
    problem, own, verdict = entry.problem, entry.measurement, entry.verdict
    best = figures.others(entry)[0] if own is not None and figures.others(entry) else None
    lead = best.lead if best is not None else None
    sizes = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "head_dim_v")
    return {
        **_key_facts(device, entry),
        **{name: getattr(problem, name) for name in sizes},
        "mask": str(problem.mask),
        "layout": problem.layout.value,
        "modifiers": " ".join(problem.modifiers.names),
        "evidence": entry.evidence.value,
        "runs_on": figures.choice(entry),
        "template": entry.template,
        "time_us": entry.time_us,
        "tflops": entry.tflops,
        "best_rival": best.name if best is not None else None,
        "ratio": figures.lead(entry, best) if best is not None else None,
        "ratio_low": lead.low if lead is not None else None,
        "ratio_high": lead.high if lead is not None else None,
        "max_error": verdict.max_error if verdict is not None else None,
        "rms_error": verdict.rms_error if verdict is not None else None,
        "samples": own.samples if own is not None else None,
        "clock_mhz": own.clock_mhz if own is not None else None,
        "throttled": own.throttled if own is not None else None,
        "trials": entry.search.trials,
        "effort": entry.search.effort,
        "torch": entry.versions.get("torch"),
        "triton": entry.versions.get("triton"),
        "source_digest": entry.source_digest,
        "cache": str(folder),
    }


def _rival_rows(device: str, entry: CacheEntry) -> Rows:
    return [
        {
            **_key_facts(device, entry),
            "kernel_us": entry.time_us,
            "rival": rival.name,
            "median_us": rival.measurement.median_us,
            "ratio": figures.lead(entry, rival),
            "ratio_low": rival.lead.low if rival.lead is not None else None,
            "ratio_high": rival.lead.high if rival.lead is not None else None,
            "max_error": rival.max_error,
            "joules": rival.energy.joules if rival.energy is not None else None,
            "watts": rival.energy.watts if rival.energy is not None else None,
        }
        for rival in entry.rivals
    ]


def _pulse(pulse: Any) -> dict[str, object]:
    if pulse is None:
        return {}
    return {"clock_mhz": pulse.clock_mhz, "temperature_c": pulse.temperature_c, "slowed": pulse.slowed}


def _frame(pandas: Any, rows: Sequence[Mapping[str, object]], columns: Mapping[str, str]) -> pd.DataFrame:
    return pandas.DataFrame(rows, columns=list(columns)).astype(dict(columns))


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise _missing("data frames need pandas") from None
    return pandas


def _missing(words: str) -> HostError:
    return HostError(f"{words}, which is not installed; run pip install 'autoattn[frames]'")
