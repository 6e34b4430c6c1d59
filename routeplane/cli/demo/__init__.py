"""The main job on a small real model: generate and record, stream, read back in another process, score with replay.

Three stages, each a process of its own that knows the others by files alone: ``engine`` writes the route stream,
``trainer`` reads it and writes figures, and the parent prints them. A file, or a folder of sealed blocks, carries the
stream. Arguments travel as JSON on the command line of the child. Figures are computed in
``routeplane.cli.demo.rollout`` and, for every trainer, in ``routeplane.cli.demo.scoring``, in an own environment where
the trainer needs one.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from routeplane.errors import ErrorKind, MissingExtraError, RouteplaneError, UsageError
from routeplane.stream import folder, new_stream, open_stream

if TYPE_CHECKING:
    from routeplane.record.interfaces import RouteSink
    from routeplane.record.spec import RouteSpec
    from routeplane.record.transfer import RecordReader

__all__ = ["DemoOptions", "format_table", "run_demo"]

# What vLLM and torch read at start-up: one process, 1 GiB of KV cache, no network, no usage report, and no compiler: it
# would compile two functions of the sampler again for every batch size.
_VLLM_SETTINGS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING=0",
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_CPU_OMP_THREADS_BIND=auto",
    "VLLM_NO_USAGE_STATS=1",
    "HF_HUB_OFFLINE=1",
    "TORCHDYNAMO_DISABLE=1",
)

# What Ray reads at start-up: no usage report, no warning of a default about accelerators that are not here, and the
# token that a cluster of one's own asks for (2.60 starts one with it, and joins none with it unless told).
_RAY_SETTINGS = ("RAY_USAGE_STATS_ENABLED=0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0", "RAY_AUTH_MODE=token")


#: Trainer -> the module that loads it.
_TRAINERS = {
    "transformers": "routeplane.cli.demo.transformers_trainer",
    "automodel": "routeplane.cli.demo.automodel_trainer",
    "megatron": "routeplane.cli.demo.megatron_trainer",
}
# No bars of Transformers between the figures, one for every load and save.
_QUIET = "HF_HUB_DISABLE_PROGRESS_BARS=1"
# No network, and no compiler: Megatron's and Automodel's fused functions would be compiled for one forward each.
_TRAINER_SETTINGS = ("HF_HUB_OFFLINE=1", "TORCHDYNAMO_DISABLE=1", _QUIET)
#: Engine or trainer -> the package that it cannot go without.
_PACKAGES = {
    "transformers": "transformers",
    "vllm": "vllm",
    "vllm-scheduler": "vllm",
    "automodel": "nemo_automodel",
    "megatron": "megatron",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """What the demo runs. Defaults are the sizes at which the effect was first measured.

    ``trainer_python``: the interpreter of the trainer's environment; empty for this one. ``ablation``: seeds of the
    table of routes and sampling masks, 0 for no table; only with Transformers on both sides is there one.
    """

    out: str
    engine: Literal["transformers", "vllm", "vllm-scheduler"] = "transformers"
    trainer: Literal["transformers", "automodel", "megatron"] = "transformers"
    trainer_python: str = ""
    transport: Literal["file", "folder"] = "file"
    seed: int = 0
    sequences: int = 8
    prompt_tokens: int = 32
    max_tokens: int = 96
    layers: int = 12
    progress: bool = True
    ablation: int = 5
    fleet: bool = False  # all of it as actors of one Ray cluster, rollouts over HTTP
    compare: bool = False  # start the fleet once more, one task after another

    def __post_init__(self) -> None:
        if self.ablation not in (0, *range(2, 11)):
            raise UsageError(f"expected ablation of 0 or 2 to 10 seeds, got {self.ablation!r}", kind=ErrorKind.ARGUMENT)
        for name, allowed in (
            ("engine", ("transformers", "vllm", "vllm-scheduler")),
            ("trainer", tuple(_TRAINERS)),
            ("transport", ("file", "folder")),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(f"expected {name} of {allowed}, got {getattr(self, name)!r}", kind=ErrorKind.ARGUMENT)
        if self.compare and not self.fleet:
            raise UsageError("expected compare for a fleet, got none", kind=ErrorKind.ARGUMENT)

    def ablation_runs(self) -> list[DemoOptions]:
        """The runs of the ablation, each with weights, samples and a folder of its own."""
        if self.fleet or (self.engine, self.trainer) != ("transformers", "transformers"):
            return []
        folder = Path(self.out) / "ablation"
        seeds = range(self.seed, self.seed + self.ablation)
        return [replace(self, out=str(folder / str(seed)), seed=seed, transport="file", ablation=0) for seed in seeds]

    @property
    def model_dir(self) -> str:
        """Where the small model is saved, for both programs to load."""
        return str(Path(self.out) / "model")

    @property
    def stream(self) -> str:
        """The route stream that the engine leaves and the trainer reads: a file, or a place of blocks."""
        return str(Path(self.out) / "blocks") if self.transport == "folder" else self.kept_stream

    @property
    def kept_stream(self) -> str:
        """The same as a file that stays in ``out``, whatever carried it."""
        return str(Path(self.out) / "routes.arrows")

    @property
    def trainer_stream(self) -> str:
        """What the trainer's own gates chose for the same tokens, as a stream file."""
        return str(Path(self.out) / "trainer.arrows")


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Run all stages in ``options.out`` and return the figures, those of the controls among them.

    Raises RouteplaneError with the child's last words where a stage fails, MissingExtraError before the first one.
    """
    Path(options.out).mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    if options.fleet:
        found = _stage("routeplane.cli.demo.ray_fleet", options, settings=_RAY_SETTINGS)
        seconds = {**found.pop("seconds"), "total": time.perf_counter() - started}
        chosen = {"engine": "vllm", "trainer": "transformers", "transport": "folder", "seed": options.seed}
        return {**chosen, **found, "seconds": {name: round(value, 2) for name, value in seconds.items()}}
    if options.engine == "vllm-scheduler":
        options = replace(options, transport="folder")  # the writer inside an engine seals blocks
    own = (*(_VLLM_SETTINGS if options.engine.startswith("vllm") else ()), _QUIET)
    _require(options.engine)
    if not options.trainer_python:
        _require(options.trainer)
    engine = _stage("routeplane.cli.demo.rollout", options, settings=own)
    trainer = _stage(_TRAINERS[options.trainer], options, settings=_TRAINER_SETTINGS, python=options.trainer_python)
    seconds = {**engine.pop("seconds"), **trainer.pop("seconds"), "total": time.perf_counter() - started}
    return {
        "engine": options.engine,
        "trainer": options.trainer,
        "transport": options.transport,
        "seed": options.seed,
        **engine,
        **trainer,
        "stream_bytes": carried_bytes(options.stream),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
    }


def _require(part: str) -> None:
    """Raise MissingExtraError where this interpreter lacks what an engine or trainer needs, before anything is run."""
    package = _PACKAGES[part]
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(
            f"{part} needs {package}: install the extra routeplane[{part.split('-')[0]}]; of a trainer, "
            "--trainer-python can name another interpreter that has it",
            kind=ErrorKind.MISSING_EXTRA,
        )


def _stage(module: str, options: DemoOptions, *, settings: tuple[str, ...], python: str = "") -> dict[str, Any]:
    """Run one stage as a child; its progress goes to our stderr, its figures come back as the last line of stdout."""
    command = ["env", *settings, python or sys.executable, "-m", module, json.dumps(asdict(options))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=None, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise RouteplaneError(
            f"expected stage {module} to end with figures, got exit status {done.returncode} (its words are above)",
            kind=ErrorKind.CHILD_FAILED,
        )
    try:
        figures = json.loads(lines[-1])
    except ValueError:
        figures = None
    if not isinstance(figures, dict) or "seconds" not in figures:
        raise RouteplaneError(
            f"expected stage {module} to end with its figures as one line of JSON, got {lines[-1][:200]!r}",
            kind=ErrorKind.CHILD_FAILED,
        )
    return figures


def format_table(figures: Mapping[str, Any]) -> str:
    """The figures as the table that people read."""
    coverage = figures["coverage"]
    rows = [
        ("", "live", "replay", "shifted token", "shifted layer"),
        *(
            (
                label,
                *(f"{figures[f'{key}_{column}']:.5f}" for column in ("live", "replay", "shift_token", "shift_layer")),
            )
            for label, key in (
                ("mean |logprob difference|", "mean_abs_diff"),
                ("max  |logprob difference|", "max_abs_diff"),
                ("KL (k3)", "kl"),
            )
        ),
    ]
    body = "\n".join(f"  {name:<27}" + "".join(f"{cell:>15}" for cell in cells) for name, *cells in rows)
    ratio = figures["mean_abs_diff_live"] / max(figures["mean_abs_diff_replay"], 1e-12)
    most = figures["max_abs_diff_live"] / max(figures["max_abs_diff_replay"], 1e-12)
    seconds = ", ".join(f"{name} {value:.1f}" for name, value in figures["seconds"].items())
    return "\n".join(
        [
            *_timeline_lines(figures.get("timeline"), figures.get("compare")),
            f"engine {figures['engine']} (bfloat16) -> {figures['transport']} -> "
            f"trainer {figures['trainer']} (float32), seed {figures['seed']}",
            f"  {figures['tokens']} tokens (captured {coverage['captured']}, cached {coverage['cached']}, "
            f"not fed {coverage['not_fed']}, missing {coverage['missing']}), {figures['rows']} rows in all layers",
            f"  the trainer would have flipped {figures['flipped_share']:.1%} of the routes",
            "",
            body,
            "",
            f"  replay lowers the mean difference {ratio:.1f}x and the maximum {most:.1f}x",
            f"  stream {figures['stream_bytes']} bytes; seconds: {seconds}",
            *_ablation_lines(figures.get("ablation")),
        ]
    )


#: What a trainer does about the ratio of its probabilities to the engine's -> what the table calls it.
_TREATMENTS = {
    "neither": "neither",
    "masks": "masks",
    "routes": "routes",
    "both": "routes and masks",
    "masks_tis": "masks, ratios cut at 2 (TIS)",
    "masks_icepop": "masks, only ratios in [0.5, 5]",
}


def _ablation_lines(ablation: Mapping[str, Any] | None) -> list[str]:
    """Routes and sampling masks, each with and without, on the same tokens."""
    if not ablation:
        return []
    columns = ("mean_ratio", "k3", "extreme_share", "effective_share", "flipped_share")
    titles = ("mean ratio", "KL (k3)", "beyond 2x", "effective", "flips")
    lines = [f"  {'trainer / engine probability':<32}" + "".join(f"{title:>12}" for title in titles)]
    for treatment, label in _TREATMENTS.items():
        row = ablation["treatments"][treatment]
        cells = [f"{row[name]['mean']:.5f}" if name in row else "" for name in columns]
        lines.append(f"  {label:<32}" + "".join(f"{cell:>12}" for cell in cells).rstrip())
    changes = [
        f"  {_TREATMENTS[each['without']]} -> {_TREATMENTS[each['with']]}: {each['figure'].replace('_', ' ')} "
        f"{each['change']:+.5f} [{each['low']:+.5f}, {each['high']:+.5f}]"
        for each in ablation["paired"]
        if each["figure"] in ("k3", "mean_ratio")
    ]
    masks, spread = ablation["masks"], ablation["treatments"]["both"]["standard_errors"]["mean"]
    return [
        "",
        f"  sampling at temperature {ablation['temperature']}, top-p {ablation['top_p']}: {len(ablation['seeds'])} "
        f"seeds of weights and samples, {ablation['tokens']} sampled tokens, the same for every row",
        *lines,
        "  paired changes over the seeds, with 95% intervals:",
        *changes,
        f"  with both, the mean ratio is {spread:.1f} standard errors from 1; a mask holds {masks['mean_ids']:.1f} "
        f"ids, {masks['bytes_a_token']:.1f} bytes a sampled token",
    ]


def _timeline_lines(timeline: Mapping[str, Any] | None, compared: Mapping[str, Any] | None) -> list[str]:
    """What ran when, for a demo that was a fleet."""
    if timeline is None:
        return []
    lines = [
        f"  {task['name']:<12} {task['started']:>6.1f} s to {task['ended']:>6.1f} s"
        + (f"  (waited for {task['waited_for']})" if task["waited_for"] else "")
        for task in timeline["tasks"]
    ]
    other = "" if compared is None else f"; one task after another: {compared['one_after_another']:.1f} s"
    return [f"fleet up in {timeline['seconds']:.1f} s{other}", *lines, ""]


_RUN, _PRODUCER = "demo", "engine"


def open_sink(path: str, spec: RouteSpec, *, transport: str) -> RouteSink:
    """Open the sink that the engine's stage writes to."""
    if transport == "folder":
        return folder.open_writer(path, spec, run=_RUN, producer=_PRODUCER)
    return new_stream(path, spec, encoding="auto")


def open_source(path: str, *, transport: str) -> RecordReader:
    """Open the source that the trainer's stage reads."""
    if transport == "folder":
        return folder.open_reader(path, producers=1)
    return open_stream(path)


def engine_writer(path: str) -> dict[str, Any]:
    """Return what the writer inside an engine is told."""
    return {"place": path, "run": _RUN, "producer": _PRODUCER}


def carried_bytes(stream: str) -> int:
    """Return the bytes of the stream's files."""
    path = Path(stream)
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*.arrows")))
