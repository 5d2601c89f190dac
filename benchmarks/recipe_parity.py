"""Compare the answers of a server with those of an engine in process, with the same recipe.

    python benchmarks/recipe_parity.py --prompts 200
    python benchmarks/recipe_parity.py --model smollm2 --recipe auto --prompts 200

Both compute in float32. The server starts with an empty store, on each number of ranks. By default,
the recipe has a random adapter and promotes one passage. Exit status 1 if the greedy tokens of an
answer differ. It runs in the environment of `make test-vllm`.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import typer
from serving_load import ENVIRONMENT, host, write
from tables import markdown

from blockattn_rag import BlockAttentionEngine, MemoryStore
from blockattn_rag.engine.find_recipe import resolve_recipe
from blockattn_rag.model import BlockModel
from blockattn_rag.model.loading import resolve_name
from blockattn_rag.server.client import RemoteEngine
from blockattn_rag.server.profile import profile_of
from tests.recipes import recipe_of
from tests_vllm.reference import PACKAGE
from tests_vllm.server import KEY, Server

SYSTEM = "Answer from the texts.\n"
MOST_AT_ONCE = 8


def prompts_of(count: int) -> list[list[str]]:
    """Prompts from the bundled data: 3 to 6 passages of two records, in random order."""
    file = PACKAGE / "app" / "demo" / "data" / "test-order-5.jsonl"
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    choose = random.Random(0)
    found = []
    for _ in range(count):
        first, second = choose.sample(records, 2)
        passages = [one["text"] + "\n" for one in (*first["passages"], *second["passages"])]
        taken = choose.sample(passages, min(len(passages), choose.randint(3, 6)))
        found.append([SYSTEM, *taken, f"Question: {first['question']}\nAnswer:"])
    return found


@contextmanager
def served(options: dict[str, Any], ranks: int, model: str, log: Path) -> Iterator[RemoteEngine]:
    """Run a server on so many ranks."""
    bind = "nobind" if ranks == 1 else "|".join(map(str, range(ranks)))
    environment = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": bind, "NO_PROXY": "127.0.0.1"}
    more = ("--tensor-parallel-size", str(ranks))
    server = Server(options, log, *more, model=model, environment=environment)
    try:
        server.wait()
        yield RemoteEngine(str(server.http.base_url), tokenizer=model, api_key=KEY)
    finally:
        server.close()


def main(
    model: str = "bundled",
    recipe: Annotated[str, typer.Option(help="A recipe as for an engine, or 'random'.")] = "random",
    prompts: int = 200,
    ranks: str = "1,2",
    tokens: int = 24,
    output: Annotated[Path | None, typer.Option()] = None,
) -> None:
    path, asked = resolve_name(model), prompts_of(prompts)
    local = BlockModel.from_pretrained(path, dtype="float32", device="cpu")
    is_random = recipe == "random"
    used = (
        recipe_of(local, size=0.05, promote=1)
        if is_random
        else resolve_recipe(recipe, local, MemoryStore(1))
    )
    options = {"max_new_tokens": tokens, "temperature": 0.0}
    engine = BlockAttentionEngine(local, MemoryStore(1 << 32), recipe=used)
    expected = [engine.generate(prompt, **options) for prompt in asked]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        used.save(folder / "recipe")
        profile_of(local, used).write(folder / "profile.json")
        files = {"recipe": str(folder / "recipe"), "profile": str(folder / "profile.json")}
        for count in map(int, ranks.split(",")):
            config = {**files, "store": str(folder / f"kv-{count}"), "memory": "1GiB"}
            with served(config, count, path, folder / f"{count}.log") as remote:
                found = remote.generate_batch(asked, batch_size=MOST_AT_ONCE, **options)
            pairs = [*zip(found, expected, strict=True)]
            identical = sum(one.token_ids == other.token_ids for one, other in pairs)
            rows.append({"ranks": count, "identical": identical})
    head = ("ranks", "prompts", "identical greedy tokens")
    table = markdown(head, [(r["ranks"], prompts, r["identical"]) for r in rows])
    given = {"model": model, "recipe": str(used), "prompts": prompts, "tokens": tokens}
    write(output, {**given, "machine": host(), "rows": rows}, table)
    print(f"{model}, recipe {used}, float32\n\n{table}")
    if any(row["identical"] < prompts for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
