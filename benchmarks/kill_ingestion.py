"""Kill an ingestion at random times, and check that the store remains intact.

    python benchmarks/kill_ingestion.py --kills 20

Each round starts ``blockattn-rag ingest`` on the same folder of texts, sends SIGKILL after a random
delay, and verifies the store. If the ingestion finishes before the signal, the round does not
count, and the next round starts with an empty store. Finally, one ingestion runs to completion, and
another must compute nothing. The exit status is 1 if an entry is damaged or lost.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from blockattn_rag.app.demo.corpus import bundled_corpus

COMMAND = [sys.executable, "-m", "blockattn_rag"]


def run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, *arguments, "--json"], capture_output=True, text=True)
    if not done.stdout:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def write_texts(folder: Path, count: int) -> None:
    """Write bundled passages to files, with numbered headings that make every passage unique."""
    passages = bundled_corpus()
    for number in range(count):
        passage = passages[number % len(passages)]
        (folder / f"{number}.txt").write_text(f"Note {number}. {passage.title}.\n{passage.text}\n")


def kill_once(texts: Path, db: Path, delay_s: float) -> bool:
    """Start an ingestion and kill it. Return whether it was still running."""
    process = subprocess.Popen(
        [*COMMAND, "ingest", str(texts), "--model", "bundled", "--db", str(db), "--json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(delay_s)
    running = process.poll() is None
    process.kill()
    process.wait()
    return running


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--files", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        texts, db = Path(folder, "texts"), Path(folder, "db")
        texts.mkdir()
        write_texts(texts, options.files)
        started = time.perf_counter()
        run("ingest", str(texts), "--model", "bundled", "--db", str(Path(folder, "whole")))
        whole_s = time.perf_counter() - started
        killed, damaged, entries = 0, 0, []
        while killed < options.kills:
            if not kill_once(texts, db, rng.uniform(0.2, 1.0) * whole_s):
                shutil.rmtree(db)  # With a complete store, nothing would be written.
                continue
            killed += 1
            if (db / "kv").exists():
                report = run("store", "verify", str(db / "kv"))
                damaged += len(report["damaged"])
                entries.append(report["ok"])
        last = run("ingest", str(texts), "--model", "bundled", "--db", str(db))
        again = run("ingest", str(texts), "--model", "bundled", "--db", str(db))
    result = {
        "uninterrupted_s": whole_s,
        "kills": killed,
        "entries_after_each_kill": entries,
        "damaged": damaged,
        "completing_run": {name: last[name] for name in ("passages", "computed", "reused")},
        "run_after_that": {name: again[name] for name in ("passages", "computed", "added")},
    }
    print(json.dumps(result, indent=2))
    return int(bool(damaged or again["computed"] or again["added"]))


if __name__ == "__main__":
    sys.exit(main())
