"""Shared code of the GPU campaign's steps: cases and their records, engines, and device timing.

A command runs one or more steps, and a step is a list of cases. Each finished case is immediately
appended to ``<out>/<step>.jsonl`` as a JSON line, so an interrupted command can resume. A record
has this form::

    {"case": "8b/32768/forward", "machine": {...}, "dry": false, "seconds": 12.3,
     "result": {...}}             # or "out_of_memory": "...", or "error": "Traceback ..."
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import machine
from random_models import counting_tokenizer, random_llama

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.model import BlockModel
from blockattn_rag.store import KVStore, MemoryStore

Record = dict[str, Any]
COMMANDS = {
    "first": ("correctness", "first_token"),
    "second": ("graphs", "kernel_times", "profiling", "shared_prompt", "transfer"),
}
"""Steps of each command, in order of importance."""

STEPS = tuple(step for steps in COMMANDS.values() for step in steps)

DONE, FAILED, UNFINISHED = 0, 1, 3
"""Exit statuses of a step. ``UNFINISHED``: the time is up; run the step again."""


class Case(NamedTuple):
    """A measurement. ``measure`` returns a JSON object. If its ``passed`` field is False, the case
    failed."""

    name: str
    measure: Callable[[], Record]


class Ceilings(NamedTuple):
    """Peak rates of the device: memory bandwidth in bytes per second, and 16-bit operations per
    second."""

    bytes_per_s: float
    flops_per_s: float


@dataclass
class Campaign:
    """Settings of one run.

    Args:
        out: Folder for the records.
        resume: Folder with the records of an earlier run, whose finished cases are reused.
        dry: Whether to test the campaign with tiny shapes on the CPU.
    """

    out: Path
    resume: Path | None = None
    dry: bool = False
    _started_s: float = field(default_factory=lambda: time.monotonic())
    _model: tuple[str, BlockModel] | None = None

    @property
    def device(self) -> torch.device:
        """Device of the models.

        Raises:
            RuntimeError: No GPU was found, and this is not a dry run.
        """
        if self.dry:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise RuntimeError("Found no CUDA device: expected one, or DRY=1 for a dry run.")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def repeats(self) -> int:
        return 1 if self.dry else 5

    def model(self, shape: str, max_tokens: int) -> BlockModel:
        """Return a model with random weights. Only the last model is kept in memory."""
        shape, dtype = ("tiny", "float32") if self.dry else (shape, "bfloat16")
        if self._model is None or self._model[0] != shape:
            self._model = None
            free_memory()
            loaded = random_llama(
                shape, max_tokens=max_tokens, device=str(self.device), dtype=dtype
            )
            tokenizer = counting_tokenizer(loaded.config.vocab_size)
            self._model = shape, BlockModel(loaded, tokenizer, pack_weights=False)
        return self._model[1]

    def engine(
        self, model: BlockModel, *, store: KVStore | None = None, **options: Any
    ) -> BlockAttentionEngine:
        """Return an engine that recomputes repeated questions. Default store: a new one on the
        device."""
        store = MemoryStore(1 << 40) if store is None else store
        options.setdefault("recipe", "none")
        return BlockAttentionEngine(model, store, resident_bytes=0, **options)

    @cached_property
    def ceilings(self) -> Ceilings:
        """Peak rates, measured with a copy and a product of square matrices."""
        size, side = (1 << 20, 64) if self.dry else (1 << 32, 8192)
        source = torch.randint(255, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy_s = median_s(lambda: target.copy_(source), self.device)
        dtype = torch.float32 if self.dry else torch.bfloat16
        left, right = (torch.randn(side, side, dtype=dtype, device=self.device) for _ in range(2))
        product_s = median_s(lambda: left @ right, self.device)
        return Ceilings(2 * size / copy_s, 2 * side**3 / product_s)

    def run_all(self, steps: Mapping[str, Callable[[], Iterable[Case]]], minutes: float) -> int:
        """Measure the cases of several steps, and return the exit status.

        Each step can use its share of the time, and the time left over by earlier steps. Unfinished
        steps then share the remaining time.
        """
        statuses = {}
        for number, (step, cases) in enumerate(steps.items(), start=1):
            statuses[step] = self.run(step, cases(), minutes * number / len(steps))
        for step, cases in steps.items():
            if statuses[step] == UNFINISHED:
                statuses[step] = self.run(step, cases(), minutes)
        return max(statuses.values(), default=DONE)

    def run(self, step: str, cases: Iterable[Case], minutes: float) -> int:
        """Measure the cases of a step that have no record yet, and return the exit status.

        No case starts later than ``minutes`` after the start of the campaign. Running out of memory
        counts as a result. Any other error is recorded, and the step continues unless the GPU has
        become unusable.
        """
        here = json.loads(json.dumps(machine(self.device)))
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / f"{step}.jsonl"
        earlier = self._earlier(step, here)
        known = {case: one for case, one in earlier.items() if is_finished(one)}
        file.write_text("".join(json.dumps(one) + "\n" for one in earlier.values()), "utf-8")
        status = DONE
        # Repeat failed cases last, because they may stop the step again.
        for case in sorted(cases, key=lambda case: case.name in earlier and case.name not in known):
            if case.name in known:
                continue
            if time.monotonic() - self._started_s > 60 * minutes:
                say(f"{step}: {minutes:g} minutes are over; run it again to continue")
                return UNFINISHED
            record = {"case": case.name, "machine": here, "dry": self.dry} | measured(case)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
            outcome = outcome_of(record)
            say(f"{step}: {case.name}: {outcome} ({record['seconds']:.1f} s)")
            if not is_finished(record):
                status = FAILED
            if "CUDA error" in record.get("error", ""):
                say(f"{step}: stopped, because the GPU cannot be used after such an error")
                return status
        return status

    def _earlier(self, step: str, here: Record) -> dict[str, Record]:
        """Return the earlier records of this machine, by case. Finished cases take precedence over
        failures, which are measured again."""
        folders = [folder for folder in (self.resume, self.out) if folder]
        records = [one for folder in folders for one in read_records(folder, step)]
        same = [one for one in records if one["dry"] == self.dry and one["machine"] == here]
        return {one["case"]: one for one in sorted(same, key=is_finished)}


def is_finished(record: Record) -> bool:
    return outcome_of(record) in ("done", "out of memory")


def outcome_of(record: Record) -> str:
    """Return ``done``, ``out of memory``, ``wrong`` (the case did not pass) or ``error``."""
    if "error" in record:
        return "error"
    if "out_of_memory" in record:
        return "out of memory"
    return "done" if record["result"].get("passed", True) else "wrong"


def measured(case: Case) -> Record:
    """Run a case, and return its outcome and duration in seconds."""
    began = time.perf_counter()
    try:
        found: Record = {"result": case.measure()}
    except torch.OutOfMemoryError as error:
        found = {"out_of_memory": str(error).splitlines()[0]}
        traceback.clear_frames(error.__traceback__)  # The frames hold references to tensors.
    except Exception as error:  # noqa: BLE001 -- recorded, with a nonzero exit status of the step
        found = {"error": "".join(traceback.format_exception(error))}
        traceback.clear_frames(error.__traceback__)
    with suppress(RuntimeError):  # After a CUDA error, the same error is raised again.
        free_memory()
    return found | {"seconds": time.perf_counter() - began}


def free_memory() -> None:
    """Release unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def read_records(folder: Path, step: str) -> list[Record]:
    """Return the records of a step, oldest first, without a truncated last line."""
    file = folder / f"{step}.jsonl"
    if not file.exists():
        return []
    complete, _, _ = file.read_text("utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def results_of(folders: Sequence[Path | None], step: str) -> dict[str, Record]:
    """Return the results of a step's finished cases, by name. Later folders take precedence."""
    records = [one for folder in folders if folder for one in read_records(folder, step)]
    return {one["case"]: one["result"] for one in records if "result" in one}


def elapsed_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds from the start of ``work`` to the end of the operations it launched."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    make: Any = torch.cuda.Event
    first, last = make(enable_timing=True), make(enable_timing=True)
    torch.cuda.synchronize(device)
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


def median_s(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the median of ``elapsed_s`` after two warm-up runs."""
    return statistics.median([elapsed_s(work, device) for _ in range(repeats + 2)][2:])


def random_ids(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Return a list of random token ids for each length, without 0 (padding)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths
    ]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
