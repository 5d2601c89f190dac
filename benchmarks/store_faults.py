"""Read from an S3 server that fails in every way, beside writers: is any answer wrong or late?

    python benchmarks/store_faults.py --reads 10000

It starts moto's S3 server and a server between it and the store that breaks a share of the answers
(``tests/store/faults.py``), first for an ``ObjectStore`` alone, then for one behind memory and a
folder. Exit status 1 if an answer is wrong, or comes later than the deadline and a second for each
tier.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from blockattn_rag.store import KVStore, MemoryStore, ObjectStore, TieredStore
from tests.store.faults import Fault, campaign, faulty
from tests.store.kvs import make_kv
from tests.store.servers import BUCKET, S3_ENVIRONMENT, s3_server

FAULTS: dict[Fault, float] = {
    "503": 0.02, "truncated": 0.02, "other bytes": 0.02, "other range": 0.02, "flipped bit": 0.02,
    "slow": 0.02, "hangs": 0.001, "hangs within": 0.001,
}  # fmt: skip
BLOCKS = 64
SLACK_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reads", type=int, default=10_000)
    parser.add_argument("--deadline-s", type=float, default=3.0)
    options = parser.parse_args()
    kvs = [make_kv(f"passage {i}", tokens=10 + i) for i in range(BLOCKS)]
    failed = False
    with s3_server() as upstream, tempfile.TemporaryDirectory() as folder:
        os.environ.update(S3_ENVIRONMENT, AWS_ENDPOINT_URL=upstream)
        url = f"s3://{BUCKET}/kv"
        whole = ObjectStore(url)
        for kv in kvs:
            whole.put(kv.key, kv)
        with faulty(upstream, FAULTS) as server:
            os.environ["AWS_ENDPOINT_URL"] = server.url
            home = ObjectStore(url, deadline_s=options.deadline_s, parallel=32)
            near = MemoryStore(8 * kvs[0].nbytes)
            tiered = TieredStore(near, Path(folder) / "kv", home, deadline_s=options.deadline_s)
            tiers: list[tuple[str, KVStore, int]] = [("alone", home, 1), ("in tiers", tiered, 4)]
            for name, store, steps in tiers:
                late_s = steps * (options.deadline_s + SLACK_S)
                started = time.monotonic()
                outcomes = campaign(store, kvs, reads=options.reads, late_s=late_s)
                report(name, outcomes, late_s, time.monotonic() - started)
                failed |= bool(outcomes["wrong"] or outcomes["late"])
            tiered.close()
            for tier in tiered.tier_stats():
                print(tier)
            print("answers of the server:", dict(server.made))
    sys.exit(failed)


def report(name: str, outcomes: Counter[str], late_s: float, took_s: float) -> None:
    outcomes.update(wrong=0)  # so that it is named
    figures = ", ".join(f"{value} {key}" for key, value in sorted(outcomes.items()))
    print(f"{name}: {figures} (late: after {late_s:g} s), in {took_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
