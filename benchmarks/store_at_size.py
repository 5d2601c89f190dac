"""Measure the time and memory of store maintenance with many entries, on a local disk.

Entries are tiny and written without fsync, so the results show the work per entry, not the speed of
the disk. Each command runs in a separate process. Memory is the peak of this process
(``ru_maxrss``), printed next to that of a process that only imports the package.

    python benchmarks/store_at_size.py --entries 10000
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, describe_all, gc, verify


def digest_of(number: int) -> str:
    """Return 64 hex digits, distributed like those of a hash."""
    return f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}" * 4


def fill(path: Path, entries: int) -> None:
    """Fill a store with entries that have one token each."""
    store = DirectoryStore(path, fsync=False)
    part = (torch.ones(1, 1, 4),)
    first = BlockKV(part, part, torch.zeros(1, dtype=torch.int64), "f" * 64, "", "")
    for number in range(entries):
        digest = digest_of(number)
        kv = replace(first, digest=digest, handle=digest[:32])
        store.put(kv.key, kv)


def commands(path: Path, entries: int) -> dict[str, Callable[[], object]]:
    """Return the commands to measure, by name. Half of the entries are in use."""

    def collect() -> object:
        live = {digest_of(number)[:32] for number in range(0, entries, 2)}
        report = gc(DirectoryStore(path), live, grace_s=0, dry_run=True)
        return {"kept": report.kept, "deleted": report.deleted.count}

    def sample() -> object:
        report = verify(DirectoryStore(path), sample=0.01)
        return {"ok": report.ok, "skipped": report.skipped}

    return {
        "import": lambda: None,
        "open": lambda: repr(DirectoryStore(path))[:14],
        "ls": lambda: DirectoryStore(path).stats().entries,
        "stats": lambda: sum(1 for _ in describe_all(DirectoryStore(path))),
        "gc --dry-run": collect,
        "verify --sample 1%": sample,
    }


def measure(name: str, path: Path, entries: int) -> None:
    """Run a command in this process, and print its time and memory."""
    start_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    command = commands(path, entries)[name]
    began = time.perf_counter()
    result = command()
    took_s = time.perf_counter() - began
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {"seconds": round(took_s, 4), "peak_mib": round(peak_mib, 1)}
    grown_mib = round(peak_mib - start_mib, 1)
    print(json.dumps({"command": name, **figures, "grown_mib": grown_mib, "result": result}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--store", type=Path, help="store that was filled by an earlier run")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        measure(options.only, options.store, options.entries)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.store or Path(folder) / "kv"
        if not path.exists():
            began = time.perf_counter()
            fill(path, options.entries)
            print(json.dumps({"filled": options.entries, "seconds": time.perf_counter() - began}))
        for name in commands(path, options.entries):
            own = [sys.executable, __file__, "--only", name, "--store", str(path)]
            subprocess.run([*own, "--entries", str(options.entries)], check=True)


if __name__ == "__main__":
    main()
